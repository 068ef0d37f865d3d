"""Augmentation that does not leak: images are moved, and the network is told how.

A diffusion model of few images learns them by heart unless they are varied; but a model of varied
images draws varied images. So what was done to an image goes into the network beside it as nine
numbers, and all nine are zero when images are drawn (Karras et al. 2020; 2022, appendix F.2).

What is done is a function of these numbers alone, so they cannot fail to tell it. An image whose
numbers are zero is the image, bit for bit: had it gone through the resampling of the others, drawn
images would be as soft as that. All movements but flips are one affine map, sampled once, bicubic,
from the image reflected at its edges. Nothing more is done against aliasing: an image that is made
smaller is rarely below two thirds of its size, where bicubic weights still cover every pixel.
"""

from dataclasses import dataclass
from math import log, pi

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sfumato.errors import ConfigError

SIZE = 0.2
"""Spread of the binary logarithm of sizes, and of stretches: conditions are in units of it."""
SHIFT = 0.125
"""Spread of shifts, in sides of the image: conditions are in units of it."""

Pixels = Float[Tensor, "n c h w"]
Conditions = Float[Tensor, "n 9"]
"""Mirrored; upside down; size; turn (cosine less one, sine); stretch (two); shift right; down."""


@dataclass(frozen=True, kw_only=True)
class GeometricChange:
    """Which images are moved. Each movement is drawn apart from the others."""

    probability: float = 0.12
    """How often each movement is drawn. Half the images are mirrored besides; at 0 none is."""
    mirror: bool = True
    """Whether images are mirrored left and right: not for digits."""

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability:g} must lie between 0 and 1.")

    def __call__(self, images: Pixels, generator: torch.Generator) -> tuple[Pixels, Conditions]:
        """The images, in [-1, 1], each moved in its own way, and what was done to each."""
        conditions = self.draw(len(images), generator).to(images.device)
        return apply_geometry(images, conditions), conditions

    def draw(self, count: int, generator: torch.Generator) -> Conditions:
        """Movements for a number of images, on the generator's device."""
        device = generator.device
        chance = torch.rand(8, count, generator=generator, device=device)
        normal = torch.randn(4, count, generator=generator, device=device)
        # A drawn flip is one in half of all cases: the other half is the image as it was.
        mirrored = chance[0] < (0.5 if self.mirror and self.probability > 0 else 0.0)
        inverted = chance[1] < self.probability / 2
        resized, turned, stretched, shifted = (chance[2:6] < self.probability).float()
        angle = 2 * pi * chance[6] - pi
        # Half of the stretches are along the sides. The other half are anywhere; its axis turns by
        # half this angle, since a stretch along an axis is one along the axis reversed.
        axis = torch.where(chance[7] < 0.5, 4 * pi * chance[7], 0.0)
        rows = [
            mirrored.float(),
            inverted.float(),
            resized * normal[0],
            turned * (angle.cos() - 1),
            turned * angle.sin(),
            stretched * normal[1] * axis.cos(),
            stretched * normal[1] * axis.sin(),
            shifted * normal[2],
            shifted * normal[3],
        ]
        return torch.stack(rows, dim=1)


def apply_geometry(images: Pixels, conditions: Conditions) -> Pixels:
    """The images after what their conditions say: flipped, resized, turned, stretched, shifted.

    Size 1 makes an image 2^0.2 times as large. A turn goes from right to down. Stretch (1, 0) makes
    it 2^0.2 wider and lower, (0, 1) the same along the falling diagonal. Shift 1 is an eighth of
    the side. An image with no condition but flips is exact; others are clamped to [-1, 1].
    """
    if len(images) == 0:
        return images
    flags = conditions[:, :2, None, None, None] > 0.5
    images = torch.where(flags[:, 0], images.flip(3), images)
    images = torch.where(flags[:, 1], images.flip(2), images)
    moved = F.grid_sample(
        images.float(),
        _origins(conditions, images.shape[2], images.shape[3]),
        mode="bicubic",
        padding_mode="reflection",
        align_corners=False,
    )
    still = (conditions[:, 2:] == 0).all(dim=1)[:, None, None, None]
    return torch.where(still, images, moved.clamp(-1, 1).to(images.dtype))


def _origins(conditions: Conditions, height: int, width: int) -> Float[Tensor, "n h w 2"]:
    """Where each pixel comes from, in the units of `grid_sample`: the movements, undone."""
    size, cosine, sine, along, across, right, down = conditions.float()[:, 2:].unbind(dim=1)
    shrink, cosine = torch.exp2(-SIZE * size), cosine + 1
    # exp(-k [[a, b], [b, -a]]) = cosh(k r) - sinh(k r) / r [[a, b], [b, -a]], with r = |(a, b)|.
    k, radius = SIZE * log(2), torch.hypot(along, across).clamp(min=1e-6)
    even, odd = (k * radius).cosh(), (k * radius).sinh() / radius
    wide, high, mixed = even - odd * along, even + odd * along, -odd * across
    # Rows of turn^-1 stretch^-1 / size.
    matrix = shrink[:, None, None] * torch.stack(
        [
            torch.stack([cosine * wide + sine * mixed, cosine * mixed + sine * high], dim=1),
            torch.stack([cosine * mixed - sine * wide, cosine * high - sine * mixed], dim=1),
        ],
        dim=1,
    )
    # Pixels from the middle of the image: turns keep distances in pixels, whatever its sides.
    columns = torch.arange(width, device=size.device) - (width - 1) / 2
    rows = torch.arange(height, device=size.device) - (height - 1) / 2
    x = columns - SHIFT * width * right[:, None]
    y = rows - SHIFT * height * down[:, None]
    column, row = matrix[..., 0, None, None], matrix[..., 1, None, None]
    places = column * x[:, None, None, :] + row * y[:, None, :, None]
    # From pixels to halves of a side.
    return torch.stack([places[:, 0] * (2 / width), places[:, 1] * (2 / height)], dim=3)
