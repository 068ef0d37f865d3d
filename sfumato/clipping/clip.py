"""Clip factors, and the sum of clipped per-example gradients.

One pass: forward, one backward pass for output gradients alone, norms on the way, then weighted
sums from what was kept. (Book-keeping: Bu et al. 2023; clip functions: Abadi et al. 2016, Bu et al.
2022b.)
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from sfumato.batch_norm import guarded
from sfumato.clipping.arithmetic import sum_type
from sfumato.clipping.batch_axis import FEW, MANY, AnotherPath, ShapeRecorder, flat_tensors
from sfumato.clipping.checks import (
    check_batch,
    check_losses,
    check_model,
    check_precision,
    refusing_compiled,
)
from sfumato.clipping.dispatch import dispatch
from sfumato.clipping.factors import MARGIN, Clipping
from sfumato.clipping.leaf import new_leaf_type, parameters_as_leaves
from sfumato.clipping.method_choice import MODES, choose_methods, layer_groups
from sfumato.clipping.param_use import ParamUse
from sfumato.clipping.probe import random_state, resize_batch, set_random_state
from sfumato.clipping.sums import Clipped, Tell, clip_and_sum
from sfumato.clipping.tape import Tape
from sfumato.errors import ConfigError, UnsupportedLayer


@dataclass
class GradientClipper:
    """A model made ready for per-example clipping. The model itself is not changed."""

    model: nn.Module
    mode: str = "ghost_mixed"
    clipping: Clipping = field(default_factory=Clipping)
    layouts: dict[Any, list[ParamUse]] = field(default_factory=dict)
    two_pass: InitVar[bool] = field(default=False, kw_only=True)
    """Without effect, and gone in the next version."""

    def __post_init__(self, two_pass: bool) -> None:
        if two_pass:
            warnings.warn(NO_TWO_PASS, DeprecationWarning, stacklevel=3)
        check_model(self.model)
        if self.mode not in MODES:
            raise ConfigError(f'mode "{self.mode}": there are {", ".join(MODES)}.')
        if not isinstance(self.clipping, Clipping):
            raise ConfigError("clipping must be a Clipping: Clipping(max_norm=1.0), say.")
        self.leaf_type = new_leaf_type(dispatch)
        first = next(iter(self.model.parameters()))
        # All dummies are views of this one zero; compiled code wants it made beforehand.
        self.seed = torch.zeros((), device=first.device, dtype=sum_type(first), requires_grad=True)
        self.group_of = dict.fromkeys(self.parameters, 0)
        self.num_groups = 1

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name; tied ones once."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def clip(
        self,
        loss_fn: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        examples: int,
        mask: Bool[Tensor, " n"] | None = None,
        tell: Tell | None = None,
    ) -> Clipped:
        """The sum of clipped gradients of `loss_fn(model, *inputs)`, one loss for each example.

        Guarantee, for a model that passes `admit`: each example adds a vector of norm at most
        `clipping.max_norm` to the total; where `mask` is false it adds nothing. An example whose
        gradient is not finite adds nothing.
        With `tell`, which is told losses, norms, factors and mask before the sums are there, it
        spoils the sum, and it is for the caller to see that by its norm.

        An example may have several rows in the inputs (views, the images of one person), next to
        each other; the loss is then one number for all of them. All that belongs to the batch must
        be among the inputs: the first call examines the model with other numbers of examples.
        """
        if examples == 0:
            return self._nothing()
        check_batch(inputs, examples)
        key = kind_of_batch(inputs, examples)
        with refusing_compiled(loss_fn):
            if key not in self.layouts:
                self.survey(lambda marked: loss_fn(self.model, *marked), inputs, examples, key)
            with self.recording(examples, key) as tape:
                losses = loss_fn(self.model, *tape.mark(inputs))
            return self.finish(tape, losses, mask, tell)

    def _nothing(self) -> Clipped:
        """What no examples add."""
        none = self.seed.new_zeros(0)
        total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        return Clipped(total, none, none.expand(self.num_groups, 0), none)

    @contextmanager
    def recording(self, examples: int, key: Any = None, **options: Any) -> Iterator[Tape]:
        """Follow the parameters through the forward pass made inside."""
        tape = self.new_tape(examples, key, **options)
        with self._swapped(tape):
            yield tape

    def new_tape(self, examples: int, key: Any = None, **options: Any) -> Tape:
        """A tape for a pass of a kind that has been surveyed."""
        return Tape(
            examples,
            self.seed,
            self.layouts[key],
            leaf_type=self.leaf_type,
            group_of=self.group_of,
            num_groups=self.num_groups,
            parameters=self.parameters,
            **options,
        )

    def survey(
        self,
        forward: Callable[[list[Tensor]], Any],
        inputs: Sequence[Any],
        examples: int,
        key: Any = None,
    ) -> list[ParamUse]:
        """Find where parameters meet the batch, and choose a method for each place.

        The model runs with two numbers of examples: by the shapes that change, `batch_axis` tells
        which axis holds them. A model that keeps constants from its first pass (relative positions)
        makes other operations in the second, so it is given another try.
        """
        check_precision(self.model)
        for _ in range(TRIES):
            watch = self._watch(forward, resize_batch(inputs, examples, MANY))
            try:
                parts = self._survey_once(forward, resize_batch(inputs, examples, FEW), watch)
                break
            except AnotherPath:
                continue
        else:
            raise UnsupportedLayer(
                "the operations of this model depend on the number of examples, or on chance, so "
                "the gradients of examples cannot be told apart. Look for sizes fixed in code, and "
                "for branches that depend on the batch."
            )
        choose_methods(parts, self.mode)
        if self.clipping.per_layer:
            self.group_of, self.num_groups = layer_groups(self.parameters, parts)
        self.layouts[key] = parts
        return parts

    def _watch(self, forward: Callable[[list[Tensor]], Any], inputs: list[Any]) -> ShapeRecorder:
        """Write down the shapes of all operations of one pass."""
        tape, state = Tape(MANY, self.seed, []), random_state()
        with torch.enable_grad(), ShapeRecorder() as watch:
            forward(tape.mark(inputs))
        set_random_state(state)
        return watch

    def _survey_once(
        self, forward: Callable[[list[Tensor]], Any], inputs: list[Any], before: ShapeRecorder
    ) -> list[ParamUse]:
        named, state = self.parameters, random_state()
        tape = Tape(FEW, self.seed, [], survey=True, leaf_type=self.leaf_type, parameters=named)
        try:
            with self._swapped(tape), torch.enable_grad(), ShapeRecorder(before) as tape.watch:
                out = forward(tape.mark(inputs))
        finally:
            set_random_state(state)
        for part, output in tape.outputs:
            # Counts changes in place, as autograd does; nothing public tells of them.
            part.output_lost |= output._version > 0
        leaves = list(named.values())
        for part, value in zip(tape.parts, tape.values, strict=True):
            touched = torch.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
            part.sources = tuple(n for n, g in zip(named, touched, strict=True) if g is not None)
        tape.replaying = True
        with self._swapped(tape):
            _refuse_untracked(out, named)
        return tape.parts

    @property
    def margin(self) -> float:
        """TF32 products keep ten bits: what is summed may be that much longer than its norm."""
        loose = self._device.type == "cuda" and (
            torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        )
        return 2.0**-8 if loose else MARGIN

    def finish(
        self,
        tape: Tape,
        losses: Tensor,
        mask: Bool[Tensor, " n"] | None = None,
        tell: Tell | None = None,
        *,
        retain: bool = False,
    ) -> Clipped:
        """Backward pass, norms, clip factors and the weighted sums.

        With `retain` the tape can be finished once more.
        """
        if tape.count != len(tape.parts):
            raise UnsupportedLayer(tape.lost_track("the end of the forward pass"))
        check_losses(losses, tape.examples)
        # A compiler plans memory itself, and before torch 2.12 takes a freed graph for used up.
        keep = retain or torch.compiler.is_compiling()
        found = self.go_back(tape, losses.sum(), [*tape.norms, *tape.keeps], retain=keep)
        # Whatever a caller has on: rounded to bf16, a sum may grow beyond the bound.
        with torch.autocast(self._device.type, enabled=False):
            return clip_and_sum(
                tape, losses, found, self.clipping, self.margin, mask, tell, retain=retain
            )

    def go_back(
        self, tape: Tape, total: Tensor, wanted: Sequence[Tensor], *, retain: bool
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the total of a recorded pass; None for what it does not depend on."""
        tape.replaying = True
        with torch.autocast(self._device.type, enabled=False), self._swapped(tape):
            return torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=retain)

    @contextmanager
    def _swapped(self, tape: Tape) -> Iterator[None]:
        leaves = {n: p.as_subclass(self.leaf_type) for n, p in tape.parameters.items()}
        tape.names = {id(leaf): name for name, leaf in leaves.items()}
        if tape.survey:
            tape.roots = {id(leaf): (name, True) for name, leaf in leaves.items()}
        if tape.recipes is not None:
            tape.leaves = leaves
        cell = self.leaf_type.cell
        before, cell.tape = cell.tape, tape
        try:
            alone = tape.examples == 1 and not torch.compiler.is_compiling()
            guard = guarded(self.model) if alone else nullcontext()
            with guard, parameters_as_leaves(self.model, tape.parameters, leaves):
                yield
        finally:
            cell.tape = before

    @property
    def _device(self) -> torch.device:
        return next(iter(self.model.parameters())).device


NO_TWO_PASS = (
    "two_pass has no effect any more, there is one pass alone. To save memory, use half the "
    "physical batch: that saves as much."
)
TRIES = 3
"""Times a model is looked at before it is said to take another path each time."""


def kind_of_batch(inputs: Sequence[Tensor], examples: int) -> Any:
    """What a layout is made for: shapes of the rows, and how many of them an example has."""
    return tuple((tuple(x.shape[1:]), x.shape[0] // max(1, examples)) for x in inputs)


def _refuse_untracked(out: Any, named: dict[str, nn.Parameter]) -> None:
    """All gradients must go through parts: none may reach a parameter on another way."""
    tensors = [t for t in flat_tensors([out]) if t.requires_grad]
    if not tensors:
        return
    total = torch.stack([t.double().sum() for t in tensors]).sum()
    leaked = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, leaked, strict=True):
        if gradient is not None:
            raise UnsupportedLayer(
                f'"{name}" is used in a way that cannot be followed (written into a tensor, or by '
                "a custom autograd function). Use it in an ordinary operation, or freeze it."
            )
