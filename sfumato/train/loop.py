"""`fit`: the one training loop.

It takes batches and a step that leaves gradients, and does everything around them: optimizer,
schedule, average of weights, progress, metrics, checkpoints. A run cut anywhere goes on from its
last checkpoint and ends with the same model, because batches and noise are functions of the step.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sfumato.privacy.sampling import Batch
from sfumato.runs import Run
from sfumato.train.steps import restore, state_of

Step = Callable[[Batch, torch.Generator], dict[str, float]]


@dataclass
class Learner:
    """What changes while a model learns, and so what a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator
    average: AveragedModel | None = None
    step: int = 0

    @property
    def best(self) -> nn.Module:
        """The model to use: the average of weights if there is one."""
        return self.model if self.average is None else self.average.module

    def _pieces(self) -> dict[str, Any]:
        pieces = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        pieces["generator"] = self.generator
        return pieces if self.average is None else {**pieces, "average": self.average}

    def save(self, run: Run) -> None:
        """Write a checkpoint."""
        states = {name: state_of(piece) for name, piece in self._pieces().items()}
        run.save_checkpoint({"step": self.step, "random": _random_state(), **states})

    def load(self, run: Run) -> None:
        """Go back to the last checkpoint, if there is one."""
        state = run.load_checkpoint()
        if state is None:
            return
        self.step = state["step"]
        for name, piece in self._pieces().items():
            restore(piece, state[name])
        torch.set_rng_state(state["random"]["cpu"])
        for number, each in enumerate(state["random"]["cuda"]):
            torch.cuda.set_rng_state(each, number)


def _random_state() -> dict[str, Any]:
    """torch's own generators, which dropout draws from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


@contextmanager
def whole_steps() -> Iterator[Callable[[], bool]]:
    """Put Ctrl-C off until asked: a step is taken whole, or its weights and its number disagree."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def new_average(model: nn.Module, decay: float) -> AveragedModel | None:
    """An exponential moving average of the weights, updated once an optimizer step."""
    if decay == 0:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


def fit(
    learner: Learner,
    batches: Iterable[Batch],
    step: Step,
    run: Run,
    *,
    steps: int,
    spent: Callable[[int], float] | None = None,
    checkpoint_seconds: float = 30.0,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Train until the batches end. They must begin with batch number `learner.step`.

    Losses and clip rates are private: they go to private/metrics.jsonl. Ctrl-C leaves a checkpoint
    of the last whole step before it goes on its way.
    """
    saved = started = time.monotonic()
    first, seen = learner.step, 0.0
    with whole_steps() as interrupted:
        for batch in batches:
            numbers = step(batch, learner.generator)
            rate = learner.optimizer.param_groups[0]["lr"]
            learner.optimizer.step()
            learner.optimizer.zero_grad(set_to_none=True)
            learner.schedule.step()
            if learner.average is not None:
                learner.average.update_parameters(learner.model)
            learner.step, seen = batch.step + 1, seen + numbers["batch"]
            run.measure(batch.step, lr=rate)
            run.measure(batch.step, private=True, **numbers)
            now = time.monotonic()
            if interrupted() or now - saved > checkpoint_seconds:
                learner.save(run)
                saved = now
            if interrupted():
                raise KeyboardInterrupt
            say(_progress(learner.step, steps, numbers, seen, now - started, first, spent))


def _progress(
    done: int,
    steps: int,
    numbers: dict[str, float],
    seen: float,
    seconds: float,
    first: int,
    spent: Callable[[int], float] | None,
) -> str:
    left = seconds / max(1, done - first) * (steps - done)
    budget = "" if spent is None else f"  epsilon {spent(done):.2f}"
    return (
        f"step {done}/{steps}  {seen / max(seconds, 1e-9):.0f} examples/s  loss "
        f"{numbers['loss']:.3f}{budget}  {left:.0f} s left"
    )
