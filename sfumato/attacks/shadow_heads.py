"""An endless sequence of heads, each a function of one seed and its own number.

Each class is permuted and cut into consecutive sets of `class_size` images; head k takes the k-th
set of every class. When a class is used up, a new permutation begins. So heads of one permutation
share no image, and nothing of a head needs to be stored: not its images, not its weights.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.attacks.batched_heads import train_primal
from sfumato.attacks.batched_linear_heads import can_use_dual, train_dual
from sfumato.attacks.head_randomness import BLOCK, HeadRandomness, draw_chance
from sfumato.attacks.heads import HeadRecipe, labels_of
from sfumato.config import dumps
from sfumato.data.example_rng import seed_of
from sfumato.errors import ConfigError, DataError
from sfumato.metrics.features import hash_of

ROOM = {"cpu": 2**26, "cuda": 2**32}
"""Bytes that training takes at a time: on a CPU little, since what fits its cache is faster."""


@dataclass(frozen=True)
class Heads:
    """Trained heads, the images of each, and the kind of head they are."""

    weights: Float[Tensor, "m p"] = field(repr=False)
    members: Int[Tensor, "m n"] = field(repr=False)
    """Rows of the table of features that a head was trained on, class by class."""
    kind: str
    """The `ShadowHeads.kind` that they come from. Statistics serve heads of one kind only."""

    def __len__(self) -> int:
        return len(self.weights)


@dataclass(frozen=True, eq=False)
class ShadowHeads:
    """Heads of one recipe on one table of features. The device of the table trains them."""

    features: Float[Tensor, "rows d"] = field(repr=False)
    labels: Int[Tensor, " labels"] = field(repr=False)
    recipe: HeadRecipe
    seed: int
    source: str = ""
    """The body that the features come from. Heads of one source and recipe, on train and on test
    images for instance, are of one kind and share statistics. Empty: these very features."""

    def __post_init__(self) -> None:
        _check(self.features, self.labels, self.recipe)

    @property
    def dimension(self) -> int:
        """d, the number of features."""
        return self.features.shape[1]

    @property
    def per_permutation(self) -> int:
        """How many heads share no image with each other: as many as the smallest class allows."""
        return min(len(places) for places in self._rows_by_class) // self.recipe.class_size

    @cached_property
    def hash_of_table(self) -> str:
        """A hash of the features and labels."""
        return hash_of(self.features, self.labels)

    @cached_property
    def kind(self) -> str:
        """A hash of the recipe and of where the features come from."""
        parts = [self.recipe, self.dimension, self.source or self.hash_of_table]
        return hashlib.sha256(dumps(parts).encode()).hexdigest()

    def batch(self, number: int, count: int) -> Heads:
        """Batch `number` of the sequence, cut into batches of `count` heads."""
        return self.heads(number * count, count)

    def heads(self, first: int, count: int, room: int | None = None) -> Heads:
        """The heads numbered `first` to `first + count - 1`.

        Guarantee: a head is a function of the features, labels, recipe and seed and of its number:
        on a CPU bit for bit, however it is asked for. Training takes about `room` bytes, beside
        what is returned, or as many as a block of 256 heads needs if that is more.
        """
        if first < 0 or count < 0:
            raise ConfigError(f"there are no heads {first} to {first + count - 1}: count from 0.")
        weights = self.features.new_empty(count, self.recipe.num_parameters(self.dimension))
        members = self.members(first, count)
        for blocks in self._chunks(first, count, room):
            # Whole blocks are trained, so that no bit depends on where a batch begins.
            begin, end = blocks.start * BLOCK, blocks.stop * BLOCK
            low, high = max(first, begin), min(first + count, end)
            whole = (low, high) == (begin, end)
            rows = members[low - first : high - first] if whole else self.members(begin, BLOCK)
            chance = draw_chance(self.recipe, self.dimension, self.seed, blocks, self.features)
            x = self.features[rows]
            made = train_heads(self.recipe, x, labels_of(self.recipe), chance)
            weights[low - first : high - first] = made[low - begin : high - begin]
        return Heads(weights, members, self.kind)

    def members(self, first: int, count: int) -> Int[Tensor, "m n"]:
        """The images of these heads, class by class."""
        size, per = self.recipe.class_size, self.per_permutation
        parts = [np.empty((0, self.recipe.images), dtype=np.int64)]
        while count > 0:
            turn, slot = divmod(first, per)
            taken = min(count, per - slot)
            generator = np.random.default_rng((seed_of("members", self.seed), turn))
            sets = [
                generator.permutation(places)[slot * size : (slot + taken) * size]
                for places in self._rows_by_class
            ]
            parts.append(np.concatenate([rows.reshape(taken, size) for rows in sets], axis=1))
            first, count = first + taken, count - taken
        return torch.from_numpy(np.concatenate(parts)).to(self.features.device)

    @cached_property
    def _rows_by_class(self) -> list[np.ndarray]:
        labels = self.labels.cpu().numpy()
        return [np.flatnonzero(labels == label) for label in range(self.recipe.classes)]

    def _chunks(self, first: int, count: int, room: int | None) -> Iterator[range]:
        """Blocks that hold these heads, in runs that fit; a block that is cut comes alone."""
        room = ROOM.get(self.features.device.type, ROOM["cpu"]) if room is None else room
        bytes_each = bytes_per_head(self.recipe, self.dimension, self.features.element_size())
        most = max(1, room // (BLOCK * bytes_each))
        at, end = first, first + count
        while at < end:
            block, inside = divmod(at, BLOCK)
            blocks = 1 if inside else max(1, min(most, (end - at) // BLOCK))
            yield range(block, block + blocks)
            at = (block + blocks) * BLOCK


def train_heads(
    recipe: HeadRecipe,
    x: Float[Tensor, "m n d"],
    y: Int[Tensor, " n"],
    chance: HeadRandomness,
) -> Float[Tensor, "m p"]:
    """Heads trained by `recipe`, the k-th on features `x[k]` of classes `y`.

    Guarantee: the heads of `train_primal`, with the same distribution of noise, found by the dual
    where that is exact: for linear heads and SGD. Products are never rounded to TF32.
    """
    if x.shape[1] != recipe.images:
        raise DataError(
            f"heads of this recipe have {recipe.images} images ({recipe.classes} classes of "
            f"{recipe.class_size}), and were given {x.shape[1]}. Set class_size to suit."
        )
    with _full_precision():
        train = train_dual if can_use_dual(recipe) else train_primal
        return train(recipe, x, y, chance)


def bytes_per_head(recipe: HeadRecipe, d: int, item: int) -> int:
    """About what training takes for one head, with numbers of `item` bytes."""
    n, p, t = recipe.images, recipe.num_parameters(d), recipe.steps
    noisy = recipe.noise_multiplier > 0
    masks = t * n * (item + 1) if recipe.rate < 1 else 0
    if can_use_dual(recipe):
        # The noise is found in float64, next to the features as they are.
        noise = 2 * t * recipe.classes * n * item + (n * d + 3 * n * n + p) * 8 + p * item
        return (n * d + 3 * p + n * n + 4 * n * recipe.classes) * item + masks + noisy * noise
    wide = max(recipe.hidden, recipe.classes)
    return (n * d + 8 * p + 8 * n * wide) * item + masks


@contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check(features: Tensor, labels: Tensor, recipe: HeadRecipe) -> None:
    if len(features) != len(labels):
        raise DataError(
            f"there are features of {len(features)} images and {len(labels)} labels: each image "
            "needs one."
        )
    if features.dtype not in (torch.float32, torch.float64):
        raise DataError(f"features are {features.dtype}. Give them in float32 or float64.")
    if not bool(torch.isfinite(features).all()):
        row = int((~torch.isfinite(features)).any(1).nonzero()[0])
        raise DataError(
            f"the features of image {row} are not finite. Leave it out, or repair them."
        )
    outside = (labels < 0) | (labels >= recipe.classes)
    if bool(outside.any()):
        raise DataError(
            f"label {int(labels[outside][0])} lies outside the recipe's {recipe.classes} classes. "
            "Leave out other images, or raise classes."
        )
    counts = torch.bincount(labels.cpu(), minlength=recipe.classes)
    if int(counts.min()) < recipe.class_size:
        raise DataError(
            f"class {int(counts.argmin())} has {int(counts.min())} images, and each head takes "
            f"{recipe.class_size} of a class. Give more images, or lower class_size."
        )
