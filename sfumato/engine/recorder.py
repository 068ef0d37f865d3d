"""`Recorder`: follows what a model does in an ordinary loop, so that its gradients can be clipped.

It stands in for the model's forward method. A pass in training mode leaves a tape; the per-example
losses, which come later, turn that into a sum of clipped gradients. Of plans, ledgers and noise it
knows nothing: they are the engine's.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.clipping.admit import admit, check_contributions, contributions_due, refuse_batch_norm
from sfumato.clipping.buffers import Buffers
from sfumato.clipping.checks import check_losses, refuse_compiled
from sfumato.clipping.clip import Clipped, GradientClipper
from sfumato.clipping.mixing import is_due, refuse_mixing, refuse_places
from sfumato.clipping.tape import Tape
from sfumato.engine.arguments import CallArguments, ConstantArguments
from sfumato.engine.checks import check_governed, refuse_closures, refuse_hooks
from sfumato.engine.loss_graph import (
    GraphNodes,
    LossFactors,
    find_outside,
    next_node,
    refuse_parameters,
)
from sfumato.engine.outputs import tensors_of, trial_losses
from sfumato.errors import ConfigError, PrivacyError


class Recorder:
    """Passes of `clipper.model` in training mode, each on a tape; other passes go by.

    Guarantee: what is on a tape was made by a model whose norms are those of autograd, tested for
    each kind of batch, and by the parameters that were trainable when the recorder was made. No
    pass in training mode has written to a buffer. That examples are not mixed is asked again, of
    the batches themselves: of the first of each kind, and then by chance.
    """

    def __init__(self, clipper: GradientClipper) -> None:
        self.clipper = clipper
        self.module = clipper.model
        self.optimizer: torch.optim.Optimizer | None = None
        """The one whose steps the tapes are for; None while nothing is recorded."""
        self.tape: Tape | None = None
        self._buffers = Buffers(clipper.model)
        self._governed = {id(p) for p in clipper.parameters.values()}
        self._calls = 0
        self._clipped: Counter[Any] = Counter()
        """Batches of each kind so far, of two examples or more."""
        self._finished: Counter[Any] = Counter()
        """All batches of each kind so far."""
        self._batches: dict[Any, set[int]] = {}
        """Of each kind, which arguments have the examples along their first axis."""
        self._kind: Any = None
        self._leaves: list[Tensor] | None = None
        """Inputs of the last pass, if it is to be asked whether it mixes examples."""
        self._span = GraphNodes(0, 0)
        self._settings = ConstantArguments()
        self._factors: dict[Any, LossFactors] = {}
        """Of each kind, the factors in its losses."""

    def __reduce__(self) -> Any:
        raise ConfigError(
            "the model has an engine attached, which cannot be pickled. Save "
            "model.state_dict() and engine.state_dict(), or call engine.detach() first."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        memo[id(self)] = made = object.__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Record from now on; a model that is recorded already is refused."""
        if isinstance(getattr(self.module.forward, "__self__", None), Recorder):
            raise ConfigError("the model has an engine attached already: call its detach() first.")
        refuse_closures(optimizer)
        check_governed(self.clipper.parameters, self._governed, optimizer)
        refuse_batch_norm(self.module)
        refuse_hooks(self.module)
        self.optimizer, self._forward = optimizer, self.module.forward
        self._own_forward = vars(self.module).get("forward")
        self.module.forward = self._recorded_forward  # pyright: ignore

    def stop(self) -> None:
        """Give the model its own forward method back."""
        give_back(self.module, "forward", self._own_forward)
        self.optimizer = None

    def take(self) -> Tape:
        """The tape of the one pass since the last was taken; none, or several, are an error."""
        tape, calls = self.tape, self._calls
        self.tape, self._calls = None, 0
        if tape is None:
            raise ConfigError("no recorded forward pass: call the model in training mode first.")
        if calls > 1:
            raise ConfigError(
                f"the model ran {calls} times in training mode since the last step, and only one "
                "pass can be clipped. Give it everything in one call, and run what is not trained "
                "from under torch.no_grad()."
            )
        return tape

    def clip(self, tape: Tape, loss: Tensor) -> Clipped:
        """Clipped gradients of the losses, each of which must be of one example alone."""
        check_losses(loss, tape.examples)
        self._look_outside(loss, tape.examples)
        try:
            if self._leaves is not None:
                refuse_mixing(self.clipper, tape, loss, self._leaves, retain=True)
            if contributions_due(self._finished[self._kind]):
                check_contributions(
                    self.clipper,
                    lambda mask: self.clipper.finish(tape, loss, mask, retain=True),
                    tape.examples,
                )
            clipped = self.clipper.finish(tape, loss)
        except RuntimeError as problem:
            if "backward through the graph a second time" not in str(problem):
                raise
            raise PrivacyError(
                "loss.backward() was called on this loss. Leave it out: optimizer.step(loss=...) "
                "finds the gradients itself, clipped and noised."
            ) from None
        # Where versions do not tell, on a GPU, values do: now and then there is time for that.
        self._buffers.check(values=self._leaves is not None)
        self._clipped[self._kind] += tape.examples > 1
        self._finished[self._kind] += 1
        return clipped

    # torch.compiler.disable, which is the same, would load the compiler here and now.
    @torch._disable_dynamo  # pyright: ignore
    def _recorded_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training:
            return self._forward(*args, **kwargs)
        with self._buffers.watched():
            if not torch.is_grad_enabled():
                return self._forward(*args, **kwargs)
            return self._follow(*args, **kwargs)

    def _follow(self, *args: Any, **kwargs: Any) -> Any:
        """A pass that trains the model, on a tape."""
        assert self.optimizer is not None
        refuse_compiled(self.module)
        refuse_batch_norm(self.module)
        refuse_hooks(self.module)
        check_governed(self.clipper.parameters, self._governed, self.optimizer)
        self._settings.check(args, kwargs)
        given = CallArguments.of(args, kwargs)
        values = given.values
        tensors = [v for v in values if isinstance(v, Tensor)]
        if not tensors:
            raise ConfigError("the model was given no tensor, so there is no batch to be seen.")
        examples = tensors[0].shape[0]
        if not examples:
            raise ConfigError("the model was given a batch of no examples: leave such batches out.")
        modes = tuple(module.training for module in self.module.modules())
        key = (given.kind, modes)
        is_asked = examples > 1 and is_due(self._clipped[key])
        if is_asked:
            self._buffers.remember_parameters()
        if key not in self.clipper.layouts:
            self._examine(given, examples, key)
        # What has as many rows as there are examples now, and had so before, is of the examples.
        places = {i for i, value in enumerate(values) if _is_batch(value, examples)}
        self._batches[key] = places & self._batches.get(key, places)
        self._kind, self._leaves = key, None
        if is_asked:
            # First: what a model keeps aside for a loss is to be that of the recorded pass.
            self._refuse_places(given, examples, key)
        first = next_node()
        with self.clipper.recording(examples, key) as tape:
            marked = tape.mark(values)
            if is_asked:
                self._leaves = _differentiate(marked, values, self._batches[key])
            out = given.call(self._forward, marked)
        self.tape, self._calls = tape, self._calls + 1
        self._span = GraphNodes(first, next_node())
        return out

    def _look_outside(self, loss: Tensor, examples: int) -> None:
        """What the loss does with the model's output, as far as its graph shows."""
        outside = find_outside(loss, self._span)
        refuse_parameters(outside.leaves, {id(p): n for n, p in self.clipper.parameters.items()})
        factors = self._factors.setdefault(self._kind, LossFactors())
        if self._leaves is not None or factors.wants(examples):
            factors.check(examples, outside.factors)

    def _examine(self, given: CallArguments, examples: int, key: Any) -> None:
        """Survey the model, and test on noise that its norms are those of autograd."""

        def loss(model: nn.Module, *inputs: Any) -> Tensor:
            noisy = dict(zip(places, inputs, strict=True))
            out = given.call(model.forward, [noisy.get(i, v) for i, v in enumerate(values)])
            return trial_losses(out, len(inputs[0]))

        values = given.values
        for value in values:
            if isinstance(value, Tensor) and (not value.ndim or len(value) % examples):
                raise ConfigError(
                    f"the model was given a tensor of shape {tuple(value.shape)}, which has no row "
                    f"for each of the {examples} examples. Make it a buffer of the model."
                )
        places = [i for i, value in enumerate(values) if _is_batch(value, examples)]
        noise = [_noise_like(values[i]) for i in places]
        # In full precision: that rules are right cannot be told from numbers of eight bits.
        with self._unrecorded(), torch.autocast(noise[0].device.type, enabled=False):
            admit(self.clipper, loss, noise, 3)

        def forward(marked: list[Any]) -> list[Tensor]:
            return tensors_of(given.call(self._forward, marked))

        self.clipper.survey(forward, values, examples, key)

    def _refuse_places(self, given: CallArguments, examples: int, key: Any) -> None:
        """What the model says of an example must be the same among fewer, and at another place."""

        def rows_of(places: Tensor) -> list[Tensor]:
            moved = [
                value[places.to(value.device)] if place in self._batches[key] else value
                for place, value in enumerate(given.values)
            ]
            return tensors_of(given.call(self._forward, moved))

        refuse_places(self.clipper, rows_of, examples, key)

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """The model with its own forward method, as a copy of it is to have it."""
        give_back(self.module, "forward", self._own_forward)
        try:
            yield
        finally:
            self.module.forward = self._recorded_forward  # pyright: ignore


def clip_statistics(clipped: Clipped) -> dict[str, float]:
    """How far the examples of a batch were clipped, and how long their gradients are. Private."""
    norms = clipped.norms.sort().values
    return {
        "med_clip": float(clipped.factors[0].median()),
        "min_clip": float(clipped.factors[0].min()),
        "max_clip": float(clipped.factors[0].max()),
        "med_norm": float(norms[len(norms) // 2]),
    }


def give_back(owner: Any, name: str, before: Any) -> None:
    """Put back what an object had under this name of its own, if anything."""
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _is_batch(value: Any, examples: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == examples


def _differentiate(marked: list[Any], values: Sequence[Any], places: set[int]) -> list[Tensor]:
    """Put leaves in the place of the batch, by which its gradient can be had."""
    floating = [place for place in sorted(places) if values[place].is_floating_point()]
    for place in floating:
        marked[place] = values[place].detach().requires_grad_()
    return [marked[place] for place in floating]


def _noise_like(batch: Tensor) -> Tensor:
    """Three examples: of noise, or, where they are numbers of something, of those there are."""
    if batch.is_floating_point():
        return torch.randn_like(batch[:1].expand(3, *batch.shape[1:]))
    return batch[torch.arange(3, device=batch.device) % len(batch)]
