"""`fit`: the one training loop.

It takes batches and a step that leaves gradients, and does everything around them: optimizer,
schedule, average of weights, progress, metrics, checkpoints. A run cut anywhere goes on from its
last checkpoint and ends with the same model, because batches, noise and augmentations are
functions of the step. (On a GPU the step that was under way may be lost: see
`private_step.is_lost`.)
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from sfumato.errors import ConfigError
from sfumato.privacy.sampling import Batch
from sfumato.runs import Run
from sfumato.training.hooks import Step
from sfumato.training.process_group import ProcessGroup
from sfumato.training.sharpness import LastGradient

LOOK_EVERY = 5
"""Steps between two looks at whether training has diverged."""


@dataclass
class TrainState:
    """What changes while a model learns, and so what a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    average: AveragedModel | None = None
    last: LastGradient | None = None
    step: int = 0
    whole: bool = True
    """Whether weights and number of steps belong together: not in the middle of a step."""

    @property
    def best(self) -> nn.Module:
        """The model to use: the average of weights if there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def _pieces(self) -> dict[str, Any]:
        pieces = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        more = {"average": self.average, "last": self.last}
        return {**pieces, **{name: piece for name, piece in more.items() if piece is not None}}

    def state(self) -> dict[str, Any]:
        """Everything that a later `load` needs."""
        states = {name: piece.state_dict() for name, piece in self._pieces.items()}
        return {"step": self.step, **states}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go back to a state; to stay here, with None."""
        if state is None:
            return
        self.step = state["step"]
        for name, piece in self._pieces.items():
            if piece is self.optimizer:
                load_optimizer(self.optimizer, state[name])
            else:
                piece.load_state_dict(state[name])

    def advance(self) -> None:
        """One optimizer step with the gradients that are there, and all that goes with it."""
        self.whole = False
        if self.last is not None:
            self.last.keep(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.step += 1
        self.whole = True


@contextmanager
def whole_steps() -> Iterator[Callable[[], bool]]:
    """Put Ctrl-C off until asked: a step is taken whole, or its weights and its number disagree."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def press(number: int, _: Any) -> None:
        if pressed:
            raise KeyboardInterrupt  # asked twice: a step that hangs is not waited for
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def fit(
    train_state: TrainState,
    batches: Iterable[Batch],
    step: Step,
    run: Run | None,
    *,
    processes: ProcessGroup | None = None,
    checkpoint_seconds: float = 30.0,
    before_saving: Callable[[], None] = lambda: None,
    diverged: Callable[[], bool] = lambda: False,
    tell: Callable[[int, dict[str, float]], None] = lambda *_: None,
) -> None:
    """Train until the batches end. They must begin with batch number `train_state.step`.

    Losses, clip rates and times are private: they go to private/metrics.jsonl. Ctrl-C leaves a
    checkpoint of the last whole step before it goes on its way. Without a run nothing is written:
    that is how all processes but the leader train. `before_saving` may object to what is there:
    then the checkpoint before stays. Every few steps `diverged` says whether going on is of use; it
    must not look at private data. If not, no further batch is drawn, or paid for.
    """
    processes = ProcessGroup() if processes is None else processes
    saved = last = time.monotonic()
    pause = min(1.0, checkpoint_seconds)  # the first ones come early, for what a crash would lose
    with whole_steps() as interrupted, _kept(train_state, run, before_saving):
        _refuse_diverged(
            train_state, diverged, processes
        )  # before: a repeated command pays for nothing
        for batch in batches:
            numbers = step(batch)
            rate = train_state.optimizer.param_groups[0]["lr"]
            train_state.advance()
            if run is not None:
                run.measure(batch.step, lr=rate)
                # Larger batches take longer, so how long a step took is as private as its batch.
                now = time.monotonic()
                run.measure(batch.step, private=True, **numbers, seconds=round(now - last, 6))
                if time.monotonic() - saved > pause:
                    before_saving()
                    run.save_checkpoint(train_state.state())
                    saved, pause = time.monotonic(), min(2 * pause, checkpoint_seconds)
            if processes.any(interrupted()):
                raise KeyboardInterrupt
            tell(train_state.step, numbers)
            if train_state.step % LOOK_EVERY == 0:
                _refuse_diverged(train_state, diverged, processes)
            last = time.monotonic()


def _refuse_diverged(
    train_state: TrainState, diverged: Callable[[], bool], processes: ProcessGroup
) -> None:
    """Stop a training that no longer learns anything, before it pays for another step."""
    if processes.any(diverged()):
        raise ConfigError(
            f"training has diverged: after {train_state.step} steps the model's answers are not "
            "finite any more, even to noise. It stops here, and the remaining steps are not paid "
            "for. Lower --lr, and start again with another --out."
        )


@contextmanager
def _kept(
    train_state: TrainState, run: Run | None, before_saving: Callable[[], None]
) -> Iterator[None]:
    """A checkpoint of the last whole step, however training ends.

    Steps that are taken again, with sums that were added in another order, would be paid again.
    """
    try:
        yield
    finally:
        if run is not None and train_state.whole:
            before_saving()
            run.save_checkpoint(train_state.state())


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state, with moments laid out in memory as the parameters are, and rates in place.

    A file keeps numbers and not their order in memory, and fused optimizers refuse moments that lie
    otherwise than a channels-last parameter. A rate that is a tensor stays the tensor it was: it
    may be read by a capture on a GPU, and a file's lies on the CPU.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):
            group["lr"] = rate.copy_(torch.as_tensor(group["lr"]))
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
