"""`PrivacyEngine`: the familiar cover over `ghost` and `privacy`.

For people who know private_vision (or Opacus): attach it to an optimizer, and give the per-example
losses to `optimizer.step(loss=...)`. What is different is that it cannot be used to lie. It knows
how batches were drawn: from its own Poisson `loader`, or from an ordinary shuffled one, and then
the epsilon it reports is the honest one for shuffling. It refuses steps beyond the plan, optimizers
whose parameters it does not govern, and gradients that something else has written.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from sfumato.config import differences, to_json
from sfumato.engine.guards import (
    ACCOUNTANTS,
    check_accounting,
    check_governed,
    govern_only,
    refuse_foreign_gradients,
    refuse_mixing_losses,
    warn_of_shuffling,
)
from sfumato.errors import ConfigError, PrivacyError
from sfumato.ghost.admit import admit, refuse_batch_norm
from sfumato.ghost.clip import Clipped, Ghost
from sfumato.ghost.factors import Clipping
from sfumato.ghost.tape import Tape, flat
from sfumato.nn.average import new_average
from sfumato.privacy.budget import Budget, check_delta, default_delta, make_plan
from sfumato.privacy.ledger import Header, Ledger
from sfumato.privacy.noise import privatize
from sfumato.privacy.sampling import Secret, poisson_batches

CLIP_FUNCTIONS = {"vanilla": "vanilla", "autos": "automatic", "autov": "auto-v", "global": "global"}


class PrivacyEngine:
    """Private training with an ordinary loop.

    `batch_size` is the logical (expected) batch and divides the noisy sum; `sample_size` is the
    number of examples. Give `target_epsilon` or `noise_multiplier`, and `epochs` or `steps`.
    `noise_decay` and `clip_decay` are schedules: what noise multiplier and norm bound have been
    multiplied by at the end. With `ema` (0.999, say), `average` holds the moving average of the
    weights. `alphas`, `record_snr` and `eps_error` are taken for compatibility: accounting is PLD.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_size: float,
        sample_size: int,
        max_grad_norm: float,
        epochs: float | None = None,
        steps: int | None = None,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        alphas: Any = None,
        record_snr: bool = True,
        named_params: Any = None,
        numerical_stability_constant: float | None = None,
        ghost_clipping: bool = True,
        mixed: bool = True,
        accounting_mode: str = "pld",
        eps_error: float = 0.05,
        clip_function: str = "vanilla",
        noise_decay: float = 1.0,
        clip_decay: float = 1.0,
        ema: float = 0.0,
        noise: Literal["philox", "chacha20"] = "philox",
        secret: Secret | None = None,
    ) -> None:
        if clip_function not in CLIP_FUNCTIONS:
            raise ConfigError(f'clip_function "{clip_function}": {", ".join(CLIP_FUNCTIONS)}.')
        check_accounting(accounting_mode)
        if named_params is not None:
            govern_only(module, dict(named_params))
        delta = default_delta(sample_size) if target_delta is None else target_delta
        check_delta(delta, sample_size)
        budget = None if target_epsilon is None else Budget(epsilon=target_epsilon, delta=delta)
        self.plan = make_plan(
            None if noise_multiplier is not None else budget,
            size=sample_size,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            noise_multiplier=noise_multiplier,
            max_norm=max_grad_norm,
            noise_decay=noise_decay,
            clip_decay=clip_decay,
        )
        self.average = new_average(module, ema)
        self.secret = Secret.draw() if secret is None else secret
        header = Header(
            data="the engine's data set",
            delta=delta,
            noise=noise,
            fixed_seed=self.secret.fixed,
            secret=self.secret.commitment,
        )
        self.ledger = Ledger(header)
        stability = 0.01 if numerical_stability_constant is None else numerical_stability_constant
        style = CLIP_FUNCTIONS[clip_function]
        clipping = Clipping(max_norm=max_grad_norm, style=style, stability=stability)  # pyright: ignore
        mode = ("ghost_mixed" if mixed else "ghost") if ghost_clipping else "non-ghost"
        self.module = module
        self.ghost = Ghost(module, mode, clipping=clipping)
        self._governed = {id(p) for p in self.ghost.parameters.values()}
        self.accounting_mode = accounting_mode
        self.taken = 0
        self._tape: Tape | None = None
        self._unproven: list[Tensor] = []
        self._total: dict[str, Tensor] = {}
        self._stats: dict[str, float] = {}
        self._drawn: tuple[int, bool] | None = None
        self._uses_loader = False
        self._calls = self._gathered = 0
        self._forward: Callable[..., Any] | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer private: `step(loss=...)` and `virtual_step(loss=...)`."""
        attached = getattr(self.module.forward, "__self__", None)
        if isinstance(attached, PrivacyEngine):
            raise ConfigError("the model has an engine attached already: call its detach() first.")
        check_governed(self.ghost.parameters, self._governed, optimizer)
        refuse_batch_norm(self.module)
        self._optimizer, self._forward = optimizer, self.module.forward
        self._optimizer_step = optimizer.step
        self._before = vars(self.module).get("forward"), vars(optimizer).get("step")

        @wraps(optimizer.step)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            self.step(*args, **kwargs)

        self.module.forward = self._recorded_forward  # pyright: ignore
        # A method of the optimizer: schedules wrap it, and expect to find it bound to that.
        optimizer.step = MethodType(step, optimizer)
        optimizer.virtual_step = self.virtual_step  # pyright: ignore
        optimizer.get_privacy_spent = self.get_privacy_spent  # pyright: ignore
        optimizer.get_training_stats = self.get_training_stats  # pyright: ignore

    def detach(self) -> None:
        """Give module and optimizer back as they were."""
        if self._optimizer is None:
            return
        forward, step = self._before
        _give_back(self.module, "forward", forward)
        _give_back(self._optimizer, "step", step)
        for name in ("virtual_step", "get_privacy_spent", "get_training_stats"):
            delattr(self._optimizer, name)
        self._optimizer = self._forward = None

    def loader(
        self, dataset: Dataset[Any], *, physical_batch_size: int | None = None
    ) -> Iterator[Any]:
        """Poisson batches of the data set, in pieces of at most `physical_batch_size`.

        Call `optimizer.step(loss=...)` on every piece: the real step is taken when the logical
        batch is complete. A batch that comes out empty is stepped here, with noise alone.
        """
        if self.taken >= self.plan.steps:
            raise ConfigError(
                f"all {self.plan.steps} steps of the plan are taken: one loader is the whole plan, "
                "all epochs of it. Leave the loop over epochs out."
            )
        self._uses_loader = True
        # A batch that an abandoned loader left in part is drawn again: its pieces count once.
        self._total, self._drawn = {}, None
        size = len(dataset)  # pyright: ignore
        batches = poisson_batches(
            self.plan, size, self.secret, self.ledger, stage="train", start=self.taken,
            chunk_size=physical_batch_size, round_to=1,
        )  # fmt: skip
        for batch in batches:
            if batch.step != self.taken:
                raise PrivacyError(f"step {batch.step} was taken with another loader of this data.")
            for place, chunk in enumerate(batch.chunks):
                self._drawn = (batch.step, place == len(batch.chunks) - 1)
                yield default_collate([dataset[i] for i in chunk.indices.tolist()])
                if self._drawn is not None:
                    raise PrivacyError("a batch was drawn and not used: call step(loss=...).")
            if not batch.chunks:
                refuse_foreign_gradients(self.module, self._optimizer)
                self._take_step()

    def step(self, *_: Any, loss: Tensor | None = None, **others: Any) -> None:
        """Add the batch's clipped gradients, and take a noisy step when the batch is complete."""
        if others:
            raise ConfigError(f"step() has no argument {min(others)}: there is loss.")
        complete = self._add(loss)
        if complete:
            self._take_step()

    def virtual_step(self, *_: Any, loss: Tensor | None = None) -> None:
        """Add the batch's clipped gradients, and wait for more of the same logical batch."""
        if self._uses_loader:
            raise ConfigError("with engine.loader, call step(loss=...) on every piece.")
        self._add(loss)

    def get_privacy_spent(
        self, accounting_mode: str | None = None, delta: float | None = None
    ) -> dict[str, float]:
        """Epsilon so far, derived from the ledger; and how the batches were drawn."""
        mode = self.accounting_mode if accounting_mode is None else accounting_mode
        check_accounting(mode)
        names = ["pld", "rdp"] if mode == "all" else [ACCOUNTANTS[mode]]
        delta = self.ledger.header.delta if delta is None else delta
        found = {f"epsilon_{n}": self.ledger.epsilon(delta, n) for n in names}  # pyright: ignore
        return {"epsilon": found[f"epsilon_{names[0]}"], "delta": delta, **found}

    def get_training_stats(self) -> dict[str, float]:
        """Clip statistics of the last batch. They are private: noise does not cover them."""
        return dict(self._stats)

    def state_dict(self) -> dict[str, Any]:
        """Ledger, steps and secret. Keep it as private as the data: the secret is in it."""
        return {
            "ledger": self.ledger.records(),
            "plan": to_json(self.plan),
            "taken": self.taken,
            "secret": self.secret.key.hex(),
            "fixed": self.secret.fixed,
            "uses_loader": self._uses_loader,
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. An engine with another plan is refused."""
        changed = differences(state["plan"], to_json(self.plan))
        if changed:
            raise ConfigError("the state is of an engine with another plan: " + "; ".join(changed))
        self.ledger = Ledger.from_records(state["ledger"])
        self.secret = Secret(bytes.fromhex(state["secret"]), state["fixed"])
        self.taken, self._uses_loader = state["taken"], state["uses_loader"]
        self._total, self._gathered = {}, 0
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def _recorded_forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._forward is not None
        assert self._optimizer is not None
        plain = self._forward
        if not (self.module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        refuse_batch_norm(self.module)
        check_governed(self.ghost.parameters, self._governed, self._optimizer)
        values, split = [*args, *kwargs.values()], len(args)

        def forward(*values: Any) -> Any:
            return plain(*values[:split], **dict(zip(kwargs, values[split:], strict=True)))

        tensors = [v for v in values if isinstance(v, Tensor)]
        if not tensors:
            raise ConfigError("the model was given no tensor, so there is no batch to be seen.")
        examples = tensors[0].shape[0]
        if not examples:
            raise ConfigError("the model was given a batch of no examples: leave such batches out.")
        key = tuple(tuple(t.shape[1:]) for t in tensors)
        is_new = key not in self.ghost.layouts
        if is_new:
            self._examine(forward, values, examples, key)
        with self.ghost.recording(examples, key) as tape:
            out = forward(*tape.mark(values))
        self._unproven = flat([out]) if is_new else []
        self._tape, self._calls = tape, self._calls + 1
        return out

    def _examine(
        self, forward: Callable[..., Any], values: list[Any], examples: int, key: Any
    ) -> None:
        """Survey the model, and test on noise that its norms are those of autograd."""

        def loss(_: nn.Module, *inputs: Any) -> Tensor:
            given = dict(zip(places, inputs, strict=True))
            out = forward(*(given.get(i, value) for i, value in enumerate(values)))
            out = out[0] if isinstance(out, tuple) else out
            return out.flatten(1).sin().sum(dim=1)

        places = [i for i, value in enumerate(values) if _is_batch(value, examples)]
        noise = [_noise_like(values[i]) for i in places]
        # In full precision: that rules are right cannot be told from numbers of eight bits.
        with torch.autocast(noise[0].device.type, enabled=False):
            admit(self.ghost, loss, noise, 3)
        self.ghost.survey(lambda marked: forward(*marked), values, examples, key)

    def _add(self, loss: Tensor | None) -> bool:
        """Clip and add one physical batch; returns whether its logical batch is complete."""
        if loss is None:
            raise ConfigError(
                "step() needs the per-example losses: optimizer.step(loss=losses), one number for "
                "each example, and no loss.backward(), whose gradients are not private."
            )
        refuse_foreign_gradients(self.module, self._optimizer)
        tape, calls = self._tape, self._calls
        self._tape, self._calls = None, 0
        if tape is None:
            raise ConfigError("no recorded forward pass: call the model in training mode first.")
        if calls > 1:
            raise ConfigError(
                f"the model ran {calls} times in training mode since the last step, and only one "
                "pass can be clipped. Give it everything in one call, and run what is not learnt "
                "from under torch.no_grad()."
            )
        max_norm = self.plan.at(self.taken).max_norm
        self.ghost.clipping = replace(self.ghost.clipping, max_norm=max_norm)
        if loss.grad_fn is None:
            raise ConfigError("the loss has no graph: compute it from the model's output.")
        clipped = self._finished(tape, loss)
        if not self._uses_loader:
            self._gather(tape.examples)
        for name, part in clipped.total.items():
            self._total[name] = self._total[name] + part if name in self._total else part
        norms = clipped.norms.sort().values
        self._stats = {
            "med_clip": float(clipped.factors[0].median()),
            "min_clip": float(clipped.factors[0].min()),
            "max_clip": float(clipped.factors[0].max()),
            "med_norm": float(norms[len(norms) // 2]),
        }
        if not self._uses_loader:
            return True
        if self._drawn is None:
            raise PrivacyError("this batch did not come from engine.loader, and others did.")
        (_, last), self._drawn = self._drawn, None
        return last

    def _finished(self, tape: Tape, loss: Tensor) -> Clipped:
        outputs, self._unproven = self._unproven, []
        try:
            if outputs and loss.shape == (tape.examples,):
                refuse_mixing_losses(loss, outputs)
            return self.ghost.finish(tape, loss)
        except RuntimeError as problem:
            if "backward through the graph a second time" not in str(problem):
                raise
            raise PrivacyError(
                "loss.backward() was called on this loss. Leave it out: optimizer.step(loss=...) "
                "finds the gradients itself, clipped and noised."
            ) from None

    def _gather(self, examples: int) -> None:
        """Count a shuffled batch: one that is larger than said would make epochs pass unpaid."""
        self._gathered += examples
        if self._gathered > self.plan.expected_batch:
            raise PrivacyError(
                f"this logical batch has {self._gathered} examples and batch_size is "
                f"{self.plan.expected_batch:g}: the data would be seen more often than is paid "
                "for. Call step(loss=...) sooner, or plan with the batch size that is used."
            )

    def _take_step(self) -> None:
        assert self._optimizer is not None
        named = self.ghost.parameters
        zeros = {n: torch.zeros_like(p) for n, p in named.items()}
        plan, family = self.plan, ""
        if not self._uses_loader:
            # Shuffled: within an epoch each example is in one batch, and nothing is amplified.
            family = f"epoch {self.taken // self._epoch_steps}"
            plan = replace(self.plan, rate=1.0)
            if plan.noise_decay != 1:
                raise ConfigError("noise_decay needs Poisson batches: draw them by engine.loader.")
            if self.taken == 0:
                warn_of_shuffling(self.plan, self._epoch_steps, self.ledger.header.delta)
        noisy = privatize(
            {**zeros, **self._total}, plan, self.ledger, self.secret,
            step=self.taken, stage="train", family=family,
        )  # fmt: skip
        self._total, self._gathered = {}, 0
        self.taken += 1
        for name, parameter in named.items():
            parameter.grad = noisy[name]
        self._optimizer_step()
        for parameter in named.values():
            parameter.grad = None
        if self.average is not None:
            self.average.update_parameters(self.module)

    @property
    def _epoch_steps(self) -> int:
        """The fewest steps that an epoch of shuffled batches can take: a last part is dropped."""
        return int(1 / self.plan.rate + 1e-6)


def _give_back(owner: Any, name: str, before: Any) -> None:
    """Put back what an object had under this name of its own, if anything."""
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _is_batch(value: Any, examples: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == examples


def _noise_like(batch: Tensor) -> Tensor:
    """Three examples: of noise, or, where they are numbers of something, of those there are."""
    if batch.is_floating_point():
        return torch.randn_like(batch[:1].expand(3, *batch.shape[1:]))
    return batch[torch.arange(3, device=batch.device) % len(batch)]
