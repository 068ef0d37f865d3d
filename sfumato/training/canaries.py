"""Canaries: examples that are in the data or not by the toss of a coin, so that leaks can be heard.

Whoever trains tosses a fair coin for each canary, keeps the coins to themselves, and leaves those
out whose coin says so. Afterwards an attack guesses the coins: how well it can is a lower bound on
epsilon (Steinke et al. 2023; `sfumato.privacy.audit.lower`). Three kinds:

    natural       images of the data
    mislabelled   images of the data that are given another class, which only memory can tell
    gradient      nobody's examples, added to the data. Each has its own coordinate in a parameter
                  that the model never uses, and a huge gradient along it: after clipping it adds
                  exactly the norm bound there. It is the worst example there can be, and the noisy
                  sum at its coordinate is all that anybody can learn about it (Nasr et al. 2023).

A canary goes through the same sampling, clipping, noise and ledger as any example. Leaving one out
is what add-or-remove hides: size and rate of the plan stay those of all, and so does the guarantee.
"""

import copy
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Images
from sfumato.errors import ConfigError
from sfumato.files import atomic, naming
from sfumato.privacy.budget import Plan
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.training.hooks import StepHook
from sfumato.training.inputs import Inputs, Losses

Kind = Literal["gradient", "mislabelled", "natural"]
HUGE = 1e6
"""The length of a canary's gradient: far beyond any norm bound, and its square fits float32."""


@dataclass(frozen=True, kw_only=True)
class CanaryInclusion:
    """Which examples are canaries, and how their coins fell. As secret as the data."""

    kind: Kind
    places: tuple[int, ...]
    """Where they are in the data."""
    labels: tuple[int, ...]
    """The class that each is given."""
    included: tuple[bool, ...]
    """Whether it takes part in training."""

    def __len__(self) -> int:
        return len(self.places)

    def place_in(self, images: Images) -> Images:
        """The data with its canaries: blank images at the end, or other labels."""
        if self.kind == "gradient":
            blank = images.pixels.new_zeros(len(self), *images.shape)
            labels = torch.cat([images.labels, images.labels.new_tensor(self.labels)])
            return replace(images, pixels=torch.cat([images.pixels, blank]), labels=labels)
        labels = images.labels.clone()
        labels[torch.tensor(self.places)] = labels.new_tensor(self.labels)
        return replace(images, labels=labels)

    def keep_out(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches without the canaries whose coin said out."""
        pairs = zip(self.places, self.included, strict=True)
        out = torch.tensor([place for place, included in pairs if not included])
        for batch in batches:
            chunks = (Chunk(c.indices, c.mask & ~torch.isin(c.indices, out)) for c in batch.chunks)
            yield replace(batch, chunks=tuple(chunks))


def draw_canaries(kind: Kind, count: int, images: Images) -> CanaryInclusion:
    """Choose canaries and toss their coins, with the operating system's randomness."""
    chance = np.random.Generator(np.random.PCG64(secrets.randbits(128)))
    coins = [bool(secrets.randbits(1)) for _ in range(count)]
    if kind == "gradient":
        places = range(len(images), len(images) + count)
        labels = [0] * count
    else:
        if count > len(images):
            raise ConfigError(
                f'--canaries {count}: "{images.name}" has {len(images)} images to choose from.'
            )
        places = chance.permutation(len(images))[:count].tolist()
        labels = images.labels[torch.tensor(places)].tolist()
    if kind == "mislabelled":
        classes = len(images.classes)
        if classes < 2:
            raise ConfigError("--canary-kind mislabelled needs a second class to name.")
        turns = chance.integers(1, classes, count).tolist()
        labels = [(label + turn) % classes for label, turn in zip(labels, turns, strict=True)]
    return CanaryInclusion(
        kind=kind, places=tuple(places), labels=tuple(labels), included=tuple(coins)
    )


def with_coordinates(model: nn.Module, count: int) -> nn.Module:
    """The model with a parameter `canaries` beside its own, which it shares: one entry a canary.

    The model that was given is left as it is, so the parameter is in no checkpoint, no optimizer
    and no artefact.
    """
    if hasattr(model, "canaries"):
        raise ConfigError('the model has something called "canaries" already: rename it.')
    device = next(iter(model.parameters())).device
    twin = copy.copy(model)
    twin._parameters = dict(model._parameters)
    twin.register_parameter("canaries", nn.Parameter(torch.zeros(count, 1, device=device)))
    return twin


def canary_losses(losses: Losses) -> Losses:
    """The losses of images; and of canaries a loss whose gradient is their coordinate, and huge.

    Inputs end with the number of each unit's canary, -1 for an image.
    """

    def changed(model: nn.Module, *inputs: Tensor) -> Tensor:
        *others, numbers = inputs
        own = HUGE * F.embedding(numbers.clamp(min=0), model.canaries)[:, 0]  # pyright: ignore
        ordinary = losses(model, *others)
        return torch.where(numbers >= 0, own.to(ordinary.dtype), ordinary)

    return changed


def inputs_with_canaries(inputs: Inputs, count: int) -> Inputs:
    """The reading, of whose images the last `count` are canaries."""
    return replace(inputs, canaries=count, wrap_loss=canary_losses)


class Observations:
    """What every step let be seen of each canary, in a file with a row a step.

    A row is written to its own place: a step that is taken again after a cut writes the same row
    again. Rows of steps whose effect was lost stay as they are, NaN at first.
    """

    def __init__(self, path: Path, steps: int, canaries: int) -> None:
        self.path = path
        self.row = row_type(canaries)
        if not path.exists():
            empty = np.zeros(steps, self.row)
            empty["seen"] = np.nan
            with atomic(path, mode=0o600) as file:
                file.write(empty.tobytes())

    def write(self, step: int, seen: np.ndarray, present: np.ndarray, size: int) -> None:
        """Keep the row of a step; it is on disk when this returns."""
        row = np.zeros(1, self.row)
        row["seen"], row["present"], row["size"] = seen, present, size
        with naming(self.path), self.path.open("r+b") as file:
            file.seek(step * self.row.itemsize)
            file.write(row.tobytes())
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(path: Path, canaries: int) -> np.ndarray:
        """All rows, in the order of steps."""
        return np.fromfile(path, row_type(canaries))


def row_type(canaries: int) -> np.dtype:
    """What is seen of each canary, in norm bounds; whether it was in the batch; the batch size."""
    return np.dtype([("seen", "<f4", (canaries,)), ("present", "?", (canaries,)), ("size", "<i8")])


class CanaryHook(StepHook):
    """Keeps the noisy sum at the canaries' coordinates.

    It was in the noisy sum, but beside the coins it tells who was in the batch: it is private.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, canaries: CanaryInclusion, kept: Observations | None
    ) -> None:
        self.parameter: nn.Parameter = model.canaries  # pyright: ignore
        self.plan, self.canaries, self.kept = plan, canaries, kept

    @contextmanager
    def around(self, batch: Batch) -> Iterator[None]:
        """Take the canaries' gradient away from the optimizer, and write it down."""
        yield
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None or self.kept is None:
            return
        unit = self.plan.at(batch.step).max_norm / self.plan.expected_batch
        indices, first = batch.indices.numpy(), self.canaries.places[0]
        present = np.zeros(len(self.canaries), dtype=bool)
        present[indices[indices >= first] - first] = True
        seen = gradient.double().cpu().numpy()[:, 0] / unit
        self.kept.write(batch.step, seen, present, len(indices))
