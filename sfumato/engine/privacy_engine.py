"""`PrivacyEngine`: the familiar cover over `clipper` and `privacy`.

For people who know private_vision (or Opacus): attach it to an optimizer, and give the per-example
losses to `optimizer.step(loss=...)`. What is different is that it cannot be used to lie. It knows
how batches were drawn: from its own Poisson `loader`, or from an ordinary one that it goes through
(`shuffled`), and then the epsilon it reports is the honest one for shuffling. Batches of which it
knows nothing are charged in full, each step by itself. It refuses steps beyond the plan, optimizers
whose parameters it does not govern, and gradients that something else has written.

Here it is decided how batches are drawn, what a step costs, and when it is taken. What the model
does in the meantime, its `Recorder` follows and clips.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from sfumato.clipping.checks import check_model
from sfumato.clipping.clip import Clipped, GradientClipper
from sfumato.config import differences, to_json
from sfumato.engine import compat
from sfumato.engine.checks import (
    FiniteLossCheck,
    add_releases,
    check_drawn,
    check_guarantee,
    check_length,
    check_settings,
    check_turn,
    refuse_foreign_gradients,
    refuse_second_loader,
    refuse_several_processes,
    refuse_ungoverned,
)
from sfumato.engine.epochs import LOOP, EpochTracker, size_of, sizes_of
from sfumato.engine.recorder import Recorder, clip_statistics, give_back
from sfumato.errors import ConfigError, PrivacyError
from sfumato.models.ema import new_average
from sfumato.privacy.budget import Budget, check_delta, default_delta, make_plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import poisson_batches
from sfumato.privacy.session_key import SessionKey
from sfumato.training.noisy_gradient import NoisyGradient


class PrivacyEngine:
    """Private training with an ordinary loop.

    `batch_size` is the logical (expected) batch and divides the noisy sum; `sample_size` is the
    number of examples. Give `target_epsilon` or `noise_multiplier`, not both, and `epochs` or
    `steps`. `noise_decay` and `clip_decay` are schedules: what noise multiplier and norm bound have
    been multiplied by at the end. With `ema` (0.999, say), `average` holds the moving average of
    the weights. `alphas`, `record_snr` and `eps_error` are taken for compatibility: accounting is
    PLD.
    """

    taken = 0
    """Steps so far."""
    _last: Clipped | None = None
    _drawn: tuple[int, bool] | None = None
    """How many examples were drawn and not used yet, and whether they complete a batch."""
    _uses_loader = False
    _gathered = 0
    """Examples in the sum of this logical batch."""
    _pass: object = None
    """The pass over an ordinary loader that is under way."""
    _known = True
    """Whether all of this logical batch was drawn in that pass."""

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
        secret: SessionKey | None = None,
    ) -> None:
        check_model(module)
        refuse_several_processes(module)
        length: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "steps": steps}
        length["noise_multiplier"] = noise_multiplier
        decay: dict[str, Any] = {"noise_decay": noise_decay, "clip_decay": clip_decay}
        guarantee = {"target_epsilon": target_epsilon, "target_delta": target_delta}
        stability = {"numerical_stability_constant": numerical_stability_constant}
        whole = {"sample_size": sample_size, "max_grad_norm": max_grad_norm, "ema": ema}
        check_settings(secret, **whole, **length, **decay, **guarantee, **stability)
        clipping = compat.clipping(clip_function, max_grad_norm, numerical_stability_constant)
        compat.accountants(accounting_mode)
        check_length(epochs, steps)
        check_guarantee(target_epsilon, noise_multiplier)
        if named_params is not None:
            refuse_ungoverned(module, dict(named_params))
        delta = default_delta(sample_size) if target_delta is None else target_delta
        check_delta(delta, sample_size)
        budget = None if target_epsilon is None else Budget(epsilon=target_epsilon, delta=delta)
        self.plan = make_plan(budget, size=sample_size, max_norm=max_grad_norm, **length, **decay)
        self.average = new_average(module, ema)
        self.secret = SessionKey.draw() if secret is None else secret
        self.ledger = self._new_ledger(delta, noise)
        self.module = module
        self.clipper = GradientClipper(
            module, compat.mode(ghost_clipping, mixed), clipping=clipping
        )
        self.recorder = Recorder(self.clipper)
        self.accounting_mode = accounting_mode
        self._passes = EpochTracker(self.plan, sample_size)
        self._noisy = NoisyGradient(lambda: self.clipper.parameters)
        self._finite = FiniteLossCheck()

    def _new_ledger(self, delta: float, noise: Literal["philox", "chacha20"]) -> Ledger:
        header = LedgerHeader(
            data="the engine's data set",
            delta=delta,
            noise=noise,
            fixed_seed=self.secret.fixed,
            secret=self.secret.commitment,
        )
        return Ledger(header)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer private: `step(loss=...)` and `virtual_step(loss=...)`."""
        refuse_several_processes(self.module)
        self.recorder.start(optimizer)
        self._optimizer_step, self._own_step = optimizer.step, vars(optimizer).get("step")

        @wraps(optimizer.step)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            self.step(*args, **kwargs)

        # A method of the optimizer: schedules wrap it, and expect to find it bound to that.
        optimizer.step = MethodType(step, optimizer)
        optimizer.virtual_step = self.virtual_step  # pyright: ignore
        optimizer.get_privacy_spent = self.get_privacy_spent  # pyright: ignore
        optimizer.get_training_stats = self.get_training_stats  # pyright: ignore

    def detach(self) -> None:
        """Give module and optimizer back as they were."""
        optimizer = self.recorder.optimizer
        if optimizer is None:
            return
        self.recorder.stop()
        give_back(optimizer, "step", self._own_step)
        for name in ("virtual_step", "get_privacy_spent", "get_training_stats"):
            delattr(optimizer, name)

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        physical_batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> Iterator[Any]:
        """Poisson batches of the data set, in pieces of at most `physical_batch_size`.

        Call `optimizer.step(loss=...)` on every piece: the real step is taken when the logical
        batch is complete. A batch that comes out empty is stepped here, with noise alone. A step
        on more examples than were drawn, or fewer, is refused: views are no examples. Examples are
        read here, one after the other, and made a piece by `collate`.
        """
        refuse_second_loader(self.taken, self.plan)
        self._uses_loader = True
        # A batch that an abandoned loader left in part is drawn again: its pieces count once.
        self._forget()
        size = size_of(dataset)
        batches = poisson_batches(
            self.plan,
            size,
            self.ledger,
            self.secret,
            stage="train",
            start=self.taken,
            chunk_size=physical_batch_size,
            round_to=1,
        )
        for batch in batches:
            for place, chunk in enumerate(batch.chunks):
                before = place * len(batch.chunks[0].indices)
                check_turn(batch.step, before, self.taken, self._gathered)
                self._drawn = (len(chunk.indices), place == len(batch.chunks) - 1)
                yield collate([dataset[i] for i in chunk.indices.tolist()])
                if self._drawn is not None:
                    raise PrivacyError("a batch was drawn and not used: call step(loss=...).")
            if not batch.chunks:
                check_turn(batch.step, 0, self.taken, self._gathered)
                self._refuse_others()
                self._take_step()

    def shuffled(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """One pass over an ordinary `DataLoader`, each of whose examples comes once.

        Call `optimizer.step(loss=...)` or `virtual_step` on every batch, and `step` on the last: a
        sum that is left over is refused. The steps of a pass cost together what one of them does,
        with nothing amplified.
        """
        sizes = sizes_of(loader, self._passes.size)
        if self._uses_loader:
            raise ConfigError("batches were drawn by engine.loader: go on with that.")
        self._forget()
        self._passes.begin(self.taken)
        self._pass = this = object()
        for size, batch in zip(sizes, loader, strict=True):
            self._drawn = (size, False)
            yield batch
            if self._pass is not this:
                raise PrivacyError("another pass was begun: go on with that.")
        self._drawn = self._pass = None
        if self._gathered:
            raise PrivacyError(
                f"the pass is over, and {self._gathered} examples are in a sum without a step. In "
                f"the next pass they would come again. {LOOP}"
            )

    @torch._disable_dynamo  # pyright: ignore
    def step(self, *_: Any, loss: Tensor | None = None, **others: Any) -> None:
        """Add the batch's clipped gradients, and take a noisy step when the batch is complete."""
        if others:
            raise ConfigError(f"step() has no argument {min(others)}: there is loss.")
        complete = self._add(loss)
        if complete:
            self._take_step()

    @torch._disable_dynamo  # pyright: ignore
    def virtual_step(self, *_: Any, loss: Tensor | None = None) -> None:
        """Add the batch's clipped gradients, and wait for more of the same logical batch."""
        if self._uses_loader:
            raise ConfigError("with engine.loader, call step(loss=...) on every piece.")
        self._add(loss)

    def get_privacy_spent(
        self, accounting_mode: str | None = None, delta: float | None = None
    ) -> dict[str, Any]:
        """Epsilon so far, derived from the ledger; `not_for_release` says why it does not hold."""
        names = compat.accountants(
            self.accounting_mode if accounting_mode is None else accounting_mode
        )
        delta = self.ledger.header.delta if delta is None else delta
        found = {f"epsilon_{name}": self.ledger.epsilon(delta, name) for name in names}
        objections = {"not_for_release": self.ledger.objections} if self.ledger.objections else {}
        return {"epsilon": found[f"epsilon_{names[0]}"], "delta": delta, **found, **objections}

    def get_training_stats(self) -> dict[str, float]:
        """Clip statistics of the last batch. They are private: noise does not cover them."""
        return {} if self._last is None else clip_statistics(self._last)

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
        """Go on where `state_dict` was taken. Another plan is refused, and `ema` on one side.

        What this engine has released stays paid for: a step that is taken again, with another sum,
        is another release. Of a new engine the state is all that is known, so it must be of the
        last step whose weights survive.
        """
        before = {**state["plan"], "ema": state["average"] is not None}
        changed = differences(before, {**to_json(self.plan), "ema": self.average is not None})
        if changed:
            raise ConfigError("the state is of an engine with another plan: " + "; ".join(changed))
        self.ledger = add_releases(Ledger.from_records(state["ledger"]), self.ledger)
        self.secret = SessionKey(bytes.fromhex(state["secret"]), state["fixed"])
        self._uses_loader = state["uses_loader"]
        self.taken = state["taken"]
        self._passes.begin(self.taken)
        self._pass, self._finite = None, FiniteLossCheck()
        self._forget()
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def _add(self, loss: Tensor | None) -> bool:
        """Clip and add one physical batch; returns whether its logical batch is complete."""
        if loss is None:
            raise ConfigError(
                "step() needs the per-example losses: optimizer.step(loss=losses), one number for "
                "each example, and no loss.backward(), whose gradients are not private."
            )
        self._refuse_others()
        tape = self.recorder.take()
        complete = self._is_complete_with(tape.examples)
        max_norm = self.plan.at(self.taken).max_norm
        self.clipper.clipping = replace(self.clipper.clipping, max_norm=max_norm)
        clipped = self.recorder.clip(tape, loss)
        self._finite.add(clipped.losses)
        self._noisy.add(clipped.total)
        self._last = replace(clipped, total={})
        self._known &= self._drawn is not None
        self._gathered, self._drawn = self._gathered + tape.examples, None
        self._passes.add(tape.examples)
        return complete

    def _refuse_others(self) -> None:
        """Refuse a step in which something else would move the weights as well."""
        refuse_several_processes(self.module)
        refuse_foreign_gradients(self.module, self.recorder.optimizer)

    def _is_complete_with(self, examples: int) -> bool:
        """Whether this many examples end the logical batch; numbers that are not paid for raise."""
        if self._uses_loader:
            return check_drawn(examples, self._drawn)
        if self._drawn is not None:
            check_drawn(examples, self._drawn)
        self._passes.check(examples, self._gathered)
        return True

    def _forget(self) -> None:
        """Begin a logical batch."""
        self._noisy.begin()
        self._drawn, self._gathered, self._known = None, 0, True

    def _take_step(self) -> None:
        plan, family = self.plan, ""
        if not self._uses_loader:
            delta = self.ledger.header.delta
            plan, family = self._passes.price(self.taken, delta, known=self._known)
        self._finite.check()
        self._noisy.release(self.taken, plan, self.ledger, self.secret, family=family)
        self._forget()
        self.taken += 1
        self._optimizer_step()
        for parameter in self.clipper.parameters.values():
            parameter.grad = None
        if self.average is not None:
            self.average.update_parameters(self.module)
