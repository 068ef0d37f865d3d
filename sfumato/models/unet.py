"""A U-Net that is told how noisy its images are, of which class, and how they were augmented.

The "DDPM++" network of Song et al. 2021 as Karras et al. 2022 (EDM) set it up: residual blocks on
maps that are halved and doubled again, with every map of the way down handed to the way up, and
attention where maps are small. With width 128 it is the published network for CIFAR-10.

Every layer works on one image at a time, so that per-example gradients exist. Under autocast the
convolutions run in its precision, and the embedding does not: it tells close noise levels apart.
"""

from math import log, sqrt
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.errors import ConfigError

Maps = Float[Tensor, "n maps h w"]
Resize = Literal["halve", "double"] | None
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

EMBEDDED = 4
"""How many times the width the embedding is."""
SLOWEST = 1e-4
"""The lowest frequency of the noise level's waves; the highest is 1."""
NEARLY_ZERO = 1e-5
"""The gain of last layers at the start: each block begins as its shortcut, the network as zero."""
TOGETHER = sqrt(0.5)
"""Two branches of variance 1 add up to variance 1."""


class UNet(nn.Module):
    """Images of the same shape, from images at a noise level: about zero before training.

    `multipliers` has a number for each size of map, in units of `width`. Each of `attention` is a
    side: the size of map that is nearest to it gets attention, and the smallest always. Without
    `classes` labels are ignored; conditions of zero are the same as none.
    """

    def __init__(
        self,
        *,
        channels: int,
        size: int,
        classes: int | None,
        width: int = 64,
        multipliers: tuple[int, ...] = (2, 2, 2),
        blocks: int = 4,
        attention: tuple[int, ...] = (16,),
        dropout: float = 0.13,
        conditions: int = 9,
    ) -> None:
        super().__init__()
        if width < 4 or width % 4:
            raise ConfigError(
                f"a U-Net of width {width} has no groups of 4 maps: use a multiple of 4."
            )
        self.channels, self.size = channels, size
        self.classes, self.conditions = classes, conditions
        sides = _sides(size, len(multipliers))
        attended = {min(sides, key=lambda side: abs(side - wish)) for wish in attention}
        levels = [(width * m, side in attended) for m, side in zip(multipliers, sides, strict=True)]

        def block(
            inputs: int, outputs: int, attend: bool = False, resize: Resize = None
        ) -> UNetBlock:
            return UNetBlock(inputs, outputs, EMBEDDED * width, dropout, attend, resize)

        self.embedding = Embedding(width, classes, conditions)
        self.first = _scaled(nn.Conv2d(channels, width, 3, padding=1))
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept = [width]
        for level, (outputs, attend) in enumerate(levels):
            if level:
                self.down.append(block(kept[-1], kept[-1], resize="halve"))
                kept.append(kept[-1])
            for _ in range(blocks):
                self.down.append(block(kept[-1], outputs, attend))
                kept.append(outputs)
        inner = kept[-1]
        self.middle = nn.ModuleList([block(inner, inner, attend=True), block(inner, inner)])
        for level, (outputs, attend) in reversed(list(enumerate(levels))):
            if level < len(levels) - 1:
                self.up.append(block(inner, inner, resize="double"))
            for number in range(blocks + 1):
                self.up.append(block(inner + kept.pop(), outputs, attend and number == blocks))
                inner = outputs
        self.norm = _norm(inner)
        self.last = _scaled(nn.Conv2d(inner, channels, 3, padding=1), NEARLY_ZERO)

    def forward(
        self,
        x: Float[Tensor, "n c h w"],
        noise_level: Float[Tensor, " n"],
        labels: Int[Tensor, " n"] | None = None,
        conditions: Float[Tensor, "n conditions"] | None = None,
    ) -> Float[Tensor, "n c h w"]:
        """In the precision of `x`. The noise level is ln(sigma) / 4."""
        told = self.embedding(noise_level, labels, conditions)
        inner = self.first(x.to(told.dtype))
        kept = [inner]
        for block in self.down:
            inner = block(inner, told)
            kept.append(inner)
        for block in self.middle:
            inner = block(inner, told)
        for block in self.up:
            if block.resize is None:
                inner = torch.cat([inner, kept.pop()], dim=1)
            inner = block(inner, told)
        return self.last(F.silu(self.norm(inner))).to(x.dtype)


class Embedding(nn.Module):
    """What a network is told beside the image, as one vector: noise level, class, augmentation."""

    def __init__(self, width: int, classes: int | None, conditions: int) -> None:
        super().__init__()
        steps = torch.linspace(0, 1, width // 2, dtype=torch.float64)
        self.frequencies: Tensor
        waves = torch.exp(log(SLOWEST) * steps).float()
        self.register_buffer("frequencies", waves, persistent=False)
        self.classes = nn.Embedding(classes, width) if classes else None
        if self.classes is not None:
            nn.init.xavier_uniform_(self.classes.weight)
        # Without a bias: nothing done to an image adds nothing to its vector.
        bare = nn.Linear(conditions, width, bias=False) if conditions else None
        self.conditions = None if bare is None else _scaled(bare)
        self.first = _scaled(nn.Linear(width, EMBEDDED * width))
        self.second = _scaled(nn.Linear(EMBEDDED * width, EMBEDDED * width))

    def forward(
        self,
        noise_level: Float[Tensor, " n"],
        labels: Int[Tensor, " n"] | None = None,
        conditions: Float[Tensor, "n conditions"] | None = None,
    ) -> Float[Tensor, "n embedded"]:
        """In the precision of the weights, whatever autocast says."""
        with torch.autocast(noise_level.device.type, enabled=False):
            kind = self.frequencies.dtype
            angles = noise_level.to(kind)[:, None] * self.frequencies
            told = torch.cat([angles.cos(), angles.sin()], dim=1)
            if self.classes is not None:
                assert labels is not None, "a network with classes needs labels"
                # As a one-hot vector of mean square 1 would be mapped.
                told = told + self.classes(labels) * sqrt(self.classes.num_embeddings)
            if conditions is not None:
                assert self.conditions is not None, "this network takes no conditions"
                told = told + self.conditions(conditions.to(kind))
            return F.silu(self.second(F.silu(self.first(told))))


class UNetBlock(nn.Module):
    """Normalise, activate and convolve, twice, beside a shortcut; the embedding is added between.

    May halve or double the maps first, and attend to all places last.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        embedded: int,
        dropout: float = 0.0,
        attend: bool = False,
        resize: Resize = None,
    ) -> None:
        super().__init__()
        self.resize: Resize = resize
        self.norm1, self.norm2 = _norm(inputs), _norm(outputs)
        self.conv1 = _scaled(nn.Conv2d(inputs, outputs, 3, padding=1))
        self.shift = _scaled(nn.Linear(embedded, outputs))
        self.dropout = nn.Dropout(dropout)
        self.conv2 = _scaled(nn.Conv2d(outputs, outputs, 3, padding=1), NEARLY_ZERO)
        same = inputs == outputs and resize is None
        self.shortcut = nn.Identity() if same else _scaled(nn.Conv2d(inputs, outputs, 1))
        self.attention = Attention(outputs) if attend else nn.Identity()

    def forward(
        self, x: Maps, told: Float[Tensor, "n embedded"]
    ) -> Float[Tensor, "n outputs resized_h resized_w"]:
        """The sum is scaled, so that a chain of blocks keeps its variance."""
        inner = self.conv1(_resized(F.silu(self.norm1(x)), self.resize))
        inner = inner + self.shift(told)[:, :, None, None]
        inner = self.conv2(self.dropout(F.silu(self.norm2(inner))))
        # One place at a time: it may as well run on the smaller map of the two.
        if self.resize == "double":
            shortcut = _resized(self.shortcut(x), self.resize)
        else:
            shortcut = self.shortcut(_resized(x, self.resize))
        return self.attention((shortcut + inner) * TOGETHER)


class Attention(nn.Module):
    """Each place takes from all places of its own image, with one head, beside a shortcut."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.norm = _norm(maps)
        self.asked = _scaled(nn.Linear(maps, 3 * maps), sqrt(0.2))
        self.out = _scaled(nn.Linear(maps, maps), NEARLY_ZERO)

    def forward(self, x: Maps) -> Maps:
        """Places as rows: of channels_last maps that is a view."""
        rows = self.norm(x).permute(0, 2, 3, 1).flatten(1, 2)
        query, key, value = self.asked(rows)[:, None].chunk(3, dim=-1)
        taken = F.scaled_dot_product_attention(query, key, value)[:, 0]
        found = self.out(taken).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
        return (x + found) * TOGETHER


def _sides(size: int, levels: int) -> list[int]:
    """Sides of the maps, from the image inwards; the smallest has at least 2 pixels."""
    step = 2 ** (levels - 1)
    if size >= 2 * step and size % step == 0:
        return [size >> level for level in range(levels)]
    below = max(2 * step, size - size % step)
    raise ConfigError(
        f"images of {size} pixels cannot be halved {levels - 1} times, down to at least 2: use "
        f"--image-size {below} or {below + step}."
    )


def _norm(maps: int) -> nn.GroupNorm:
    """At most 32 groups, of at least 4 maps."""
    groups = next(g for g in range(min(32, maps // 4), 0, -1) if maps % g == 0)
    return nn.GroupNorm(groups, maps, eps=1e-6)


def _scaled(layer: Layer, gain: float = 1.0) -> Layer:
    """The layer with Glorot's weights, times a gain, and no bias yet."""
    nn.init.xavier_uniform_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _resized(x: Maps, resize: Resize) -> Float[Tensor, "n maps resized_h resized_w"]:
    """Means of 2 x 2 places, or each place four times."""
    if resize is None:
        return x
    if resize == "halve":
        return F.avg_pool2d(x, 2)
    with torch.autocast(x.device.type, enabled=False):  # it would go the long way, by float32
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
