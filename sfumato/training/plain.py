"""Ordinary training on images that may be seen: shuffled epochs, Adam, a cosine."""

from collections.abc import Iterator

import torch
from torch import nn

from sfumato.data.augment import Augmentation
from sfumato.data.images import Images
from sfumato.models.zoo import pixel_statistics
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.runs import Run
from sfumato.training.fit import TrainState, fit
from sfumato.training.hooks import Step
from sfumato.training.inputs import Inputs
from sfumato.training.progress import progress
from sfumato.training.setup import make_optimizer, make_schedule


def train_plainly(
    model: nn.Module,
    size: int,
    step: Step,
    run: Run,
    *,
    epochs: float,
    lr: float,
    batch_size: int = 64,
    weight_decay: float = 0.0,
    warmup: int = 0,
    optimizer: str = "adamw",
    seed: int = 0,
) -> nn.Module:
    """Take `epochs` over `size` images, by steps that leave gradients; a run that was cut goes on.

    Nothing here is private: the caller answers for the images that `step` reads.
    """
    batch_size = min(batch_size, size)
    steps = max(1, round(epochs * size / batch_size))
    rule = make_optimizer(model, optimizer, lr=lr, momentum=0.9, weight_decay=weight_decay)
    train_state = TrainState(model, rule, make_schedule(rule, "cosine", steps, warmup))
    train_state.load(run.load_checkpoint())
    if train_state.step:
        run.log(f"going on after step {train_state.step}")
    tell = progress(steps, train_state.step, None, run.say)
    fit(
        train_state,
        shuffled_batches(size, batch_size, train_state.step, steps, seed),
        step,
        run,
        tell=tell,
    )
    return train_state.best.eval()


def inputs_of(
    model: nn.Module,
    images: Images,
    device: torch.device,
    *,
    seed: int = 0,
    shift: int = 0,
    precision: torch.dtype = torch.float32,
) -> Inputs:
    """How a model reads images, moved by up to `shift` pixels while it learns."""
    statistics = pixel_statistics(model, images.shape[0])
    moved = Augmentation(crop=shift)
    return Inputs(images.to(device), device, *statistics, moved, precision=precision, seed=seed)


def shuffled_batches(
    size: int, batch_size: int, start: int, steps: int, seed: int
) -> Iterator[Batch]:
    """Batches of public images, epoch by epoch in another order; a function of the step."""
    each = max(1, size // min(batch_size, size))
    order, known = torch.empty(0), -1
    for step in range(start, steps):
        epoch, place = divmod(step, each)
        if epoch != known:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch))
            known = epoch
        indices = order[place * batch_size : (place + 1) * batch_size]
        yield Batch(step, (Chunk(indices, torch.ones(len(indices), dtype=torch.bool)),))
