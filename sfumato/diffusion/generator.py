"""Training a class-conditional diffusion model on few public images, and when to stop.

The loss of Karras et al. 2022 (`denoise`) on images that were moved in ways the network is told of
(`geometry`). A model of a few thousand images first learns what such images have in common and then
the images themselves. So some are held out, and at every look copies are counted: of the weights
that do not copy, those that denoise held-out images best are kept. No private image and no test
image is asked.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from sfumato.data.example_rng import seed_of
from sfumato.diffusion.denoise import Denoiser, denoising_losses, draw_sigma
from sfumato.diffusion.generator_data import (
    GeneratorData,
    copies_too_much,
    evaluate_denoiser,
    score_of,
)
from sfumato.diffusion.geometry import GeometricChange
from sfumato.errors import ConfigError, SfumatoError
from sfumato.models.ema import new_half_life_average
from sfumato.models.unet import UNet
from sfumato.runs import Run
from sfumato.settings.diffusion import Diffusion
from sfumato.training.cuda_graph import Replay
from sfumato.training.fit import load_optimizer, whole_steps
from sfumato.training.process_group import ProcessGroup
from sfumato.training.progress import progress, stale
from sfumato.training.setup import move_to_device

AT_ONCE = 64
"""Images of a batch that a CPU takes at once: all of a large one would not fit its memory."""
CHECKPOINT_SECONDS = 60.0
"""At most so much is lost when training is killed; Ctrl-C loses nothing."""


@dataclass
class GeneratorTrainState:
    """A generator while it learns: what a checkpoint holds."""

    denoiser: Denoiser
    optimizer: torch.optim.Adam
    average: AveragedModel
    step: int = 0
    looks: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)

    @property
    def scores(self) -> list[float]:
        """What each look brought, more being better: one that copies brought nothing."""
        return [
            -math.inf if copies_too_much(found) else -found["held_out_loss"] for found in self.looks
        ]

    @property
    def best_look(self) -> dict[str, float]:
        """The look at the weights that are kept, the first of those that are equal."""
        return max(self.looks, key=score_of)

    def state(self) -> dict[str, Any]:
        """Everything that a later `load` needs."""
        pieces = {"denoiser": self.denoiser, "optimizer": self.optimizer, "average": self.average}
        found: dict[str, Any] = {name: piece.state_dict() for name, piece in pieces.items()}
        return {**found, "step": self.step, "looks": list(self.looks), "best": dict(self.best)}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go back to a state; to stay here, with None."""
        if state is None:
            return
        for name in ("denoiser", "average"):
            getattr(self, name).load_state_dict(state[name])
        load_optimizer(self.optimizer, state["optimizer"])
        self.step, self.looks, self.best = state["step"], state["looks"], state["best"]


def new_denoiser(
    settings: Diffusion, shape: tuple[int, int, int], classes: int, *, told: bool = True
) -> Denoiser:
    """A denoiser with our network, untrained; it can be `told` how an image was moved."""
    channels, height, width = shape
    if height != width:
        raise ConfigError(
            f"a generator draws squares, and these images have {width} x {height} pixels. Give "
            "--image-size N."
        )
    return Denoiser(
        UNet(
            channels=channels,
            size=height,
            classes=classes,
            width=settings.gen_width,
            multipliers=settings.gen_multipliers,
            blocks=settings.gen_blocks,
            dropout=settings.gen_dropout,
            conditions=9 if told else 0,
        )
    )


def new_train_state(
    denoiser: Denoiser, settings: Diffusion, device: torch.device
) -> GeneratorTrainState:
    """A generator at its start."""
    gpu = device.type == "cuda"
    denoiser = move_to_device(denoiser, device)
    rate: Any = torch.tensor(settings.gen_lr, device=device) if gpu else settings.gen_lr
    adam = torch.optim.Adam(denoiser.parameters(), lr=rate, fused=gpu, capturable=gpu)
    average = new_half_life_average(
        denoiser, batch_size=settings.gen_batch, half_life=settings.gen_half_life, ramp=0.1
    )
    assert average is not None
    return GeneratorTrainState(denoiser, adam, average)


def train_generator(
    train_state: GeneratorTrainState,
    data: GeneratorData,
    settings: Diffusion,
    run: Run | None,
    *,
    seed: int = 0,
    precision: torch.dtype = torch.float32,
    show: Callable[[int, Tensor], None] = lambda *_: None,
    processes: ProcessGroup | None = None,
    compiled: bool = False,
) -> Denoiser:
    """Train until held-out images are denoised no better; the average of weights at its best.

    A look that finds too many copies is no better, whatever the loss, and its weights are not kept,
    unless all looks are such: then those with the fewest copies are, and that is said. At each look
    there is a checkpoint, a line of numbers, and samples for `show`, which gets the number of
    images seen and 8 samples of each class. A run that was cut goes on, also with another number of
    processes. Of several the leader alone has a run and looks, and the weights at their best are
    its own.
    """
    processes = ProcessGroup() if processes is None else processes
    if settings.gen_batch < processes.size:
        raise ConfigError(f"--gen-batch {settings.gen_batch} is no image for some processes.")
    start = train_state.denoiser.state_dict()  # a network that was brought may be made by chance
    processes.broadcast({name: part for name, part in start.items() if part.is_floating_point()})
    train_state.load(processes.agree(run and run.load_checkpoint()))
    if compiled:
        train_state.denoiser.compile()
    turn = new_turn(train_state, data, settings, precision, processes)
    every = math.ceil(settings.steps / settings.gen_looks)
    tell = log_progress(train_state, settings, run)
    saved = time.monotonic()
    with whole_steps() as interrupted:
        while train_state.step < settings.steps and not stale(
            train_state.scores, settings.gen_patience
        ):
            set_rate(train_state.optimizer, settings.rate(train_state.step))
            rng = (seed, train_state.step, *([processes.rank] if processes.size > 1 else []))
            torch.manual_seed(seed_of(*rng))  # for dropout, which has no dice
            with generator_memory_advice(settings):
                turn(*rng)
            train_state.average.update_parameters(train_state.denoiser)
            train_state.step += 1
            due = not train_state.step % every or train_state.step == settings.steps
            if due:
                evaluate_average(train_state, data, settings, run, precision, show, processes)
            cut = processes.any(interrupted())
            late = time.monotonic() - saved > CHECKPOINT_SECONDS
            if run is not None and (due or cut or late):
                run.save_checkpoint(
                    train_state.state()
                )  # last: what is written after it is forgotten
                saved = time.monotonic()
            if cut:
                raise KeyboardInterrupt
            tell(train_state.step, {"batch": settings.gen_batch})
    if run is not None:
        log_end(train_state, settings, run)
    train_state.denoiser.load_state_dict(train_state.best)
    return train_state.denoiser.eval().requires_grad_(False)


@contextmanager
def generator_memory_advice(settings: Diffusion) -> Iterator[None]:
    """Say out of memory in words that help."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise ConfigError(
            f"out of memory with --gen-batch {settings.gen_batch} and --gen-width "
            f"{settings.gen_width}. Lower one of them, with another --out."
        ) from problem


def log_progress(
    train_state: GeneratorTrainState, settings: Diffusion, run: Run | None
) -> Callable[[int, dict[str, float]], None]:
    """Say where a run that was cut goes on; what then says every few seconds how far it is."""
    if run is not None and train_state.step:
        run.log(f"going on after {train_state.step * settings.gen_batch} images")
    return progress(settings.steps, train_state.step, None, run.say if run else None, unit="images")


def evaluate_average(
    train_state: GeneratorTrainState,
    data: GeneratorData,
    settings: Diffusion,
    run: Run | None,
    precision: torch.dtype,
    show: Callable[[int, Tensor], None],
    processes: ProcessGroup,
) -> None:
    """Look at the average, remember it if it was never better, and let the leader tell."""
    found, samples = None, None
    if processes.leads:
        found, samples = evaluate_denoiser(train_state.average.module, data, precision)
    found = processes.agree(found)
    if not math.isfinite(found["held_out_loss"]):
        raise SfumatoError("the generator diverged. Lower --gen-lr, with another --out.")
    seen = train_state.step * settings.gen_batch
    record_evaluation(train_state, {"images": seen, **found})
    if run is None or samples is None:
        return
    run.measure(train_state.step, private=False, images=seen, **found)
    told = (
        f"{seen} of {settings.steps * settings.gen_batch} images  held-out loss "
        f"{found['held_out_loss']:.4f}  {describe_copies(found)}"
    )
    if copies_too_much(found):
        run.log(f"{told}: too many, so it learns by heart, and this look does not count")
    else:
        run.say(told)
    show(seen, samples)


def record_evaluation(train_state: GeneratorTrainState, found: dict[str, float]) -> None:
    """Remember what was seen, and the weights if they were never better."""
    train_state.looks.append(found)
    if train_state.best_look is found:
        state = train_state.average.module.state_dict()
        train_state.best = {name: value.clone() for name, value in state.items()}


def describe_copies(found: Mapping[str, float]) -> str:
    """Copies among samples, beside those among images that no model was trained on."""
    return f"copies {found['copies']:.1%} (of held-out images {found['held_out_copies']:.1%})"


def log_end(train_state: GeneratorTrainState, settings: Diffusion, run: Run) -> None:
    """Say that training stopped early, and whether what is left of it copies."""
    best, seen = train_state.best_look, train_state.step * settings.gen_batch
    if train_state.step < settings.steps:
        run.log(
            f"stopped after {seen} images: {settings.gen_patience} looks brought nothing better "
            f"than the weights after {best['images']:.0f}, which are kept"
        )
    if copies_too_much(best):
        run.log(
            "WARNING: this generator COPIES the images it was trained on, at every look. The "
            f"weights with the fewest are kept, after {best['images']:.0f} images: "
            f"{describe_copies(best)}. Give it more public images (--public-share), a smaller "
            "network (--gen-width), or look sooner (--gen-looks), with another --out."
        )


def new_turn(
    train_state: GeneratorTrainState,
    data: GeneratorData,
    settings: Diffusion,
    precision: torch.dtype,
    processes: ProcessGroup,
) -> Callable[..., None]:
    """One step of Adam on the loss of a batch, whose chance is a function of numbers.

    Each of several processes takes a part of the batch, and all step along the whole gradient. What
    they tell each other stands between two captures.
    """
    device, step = data.pixels.device, train_state.optimizer.step

    def gradient(rng: torch.Generator) -> None:
        accumulate_gradient(train_state, data, settings, precision, rng, processes)

    def advance(_: torch.Generator) -> None:
        step()

    def both(rng: torch.Generator) -> None:
        gradient(rng)
        step()

    if processes.size == 1:
        return Replay(both, device)
    first, second = Replay(gradient, device), Replay(advance, device)

    def turn(*seed: int) -> None:
        first(*seed)
        found = {name: weight.grad for name, weight in train_state.denoiser.named_parameters()}
        processes.all_reduce({name: grad for name, grad in found.items() if grad is not None})
        second(*seed)

    return turn


def accumulate_gradient(
    train_state: GeneratorTrainState,
    data: GeneratorData,
    settings: Diffusion,
    precision: torch.dtype,
    rng: torch.Generator,
    processes: ProcessGroup,
) -> None:
    """Leave the gradient of the mean loss of a batch: what this process's part adds to it."""
    device = data.pixels.device
    count = len(range(settings.gen_batch)[processes.rank :: processes.size])
    where = torch.randint(len(data.pixels), (count,), generator=rng, device=device)
    images = data.pixels[where].float() / 127.5 - 1
    conditions = None
    if (
        train_state.denoiser.network.conditions
    ):  # a network that cannot be told is not misled either
        images, conditions = GeometricChange(
            probability=settings.gen_moves, mirror=settings.gen_mirror
        )(images, rng)
    sigma = draw_sigma(count, rng, device)
    noise = torch.randn(images.shape, generator=rng, device=device)
    labels = data.labels[where]
    train_state.optimizer.zero_grad(set_to_none=True)
    piece = count if device.type == "cuda" else AT_ONCE
    for some in (slice(first, first + piece) for first in range(0, count, piece)):
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            losses = denoising_losses(
                train_state.denoiser,
                images[some],
                labels[some],
                None if conditions is None else conditions[some],
                sigma=sigma[some],
                noise=noise[some],
            )
        (losses.sum() / settings.gen_batch).backward()


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate, in place where a capture reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
