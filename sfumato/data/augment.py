"""Augmentations on batches of tensors, on the device the batch is on.

Each example draws its own change, and no example looks at another, so that per-example gradients
keep their meaning. Every function takes float images n c h w between 0 and 1 and dice with a stream
for each, and returns the same shape.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sfumato.data.example_rng import ExampleRng
from sfumato.errors import ConfigError

Pixels = Float[Tensor, "n c h w"]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which changes to make, and how strongly. The default makes none."""

    crop: int = 0
    """Reflect-pad by this many pixels and cut out a random window."""
    flip: bool = False
    """Mirror left and right, half of the time."""
    cutout: int = 0
    """Side of a grey square put at a random place, half of the time."""
    colour: float = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    affine: float = 0.0
    """Largest turn in units of 90 degrees, shift in sides and scaling: 0.1 is mild."""

    def __call__(self, images: Pixels, rng: ExampleRng) -> Pixels:
        """The changed images, each changed in its own way."""
        if self.affine:
            images = random_affine(images, self.affine, rng)
        if self.crop:
            images = random_crop(images, self.crop, rng)
        if self.flip:
            images = random_flip(images, rng)
        if self.colour:
            images = random_colour(images, self.colour, rng)
        if self.cutout:
            images = cutout(images, self.cutout, rng)
        return images


def random_crop(images: Pixels, padding: int, rng: ExampleRng) -> Pixels:
    """Pad by reflection and cut out a window of the old size, anywhere."""
    n, _, height, width = images.shape
    if padding >= min(height, width):
        raise ConfigError(f"crop={padding} must be less than a side of {height} x {width} images.")
    padded = F.pad(images, [padding] * 4, mode="reflect")
    top, left = rng.integers(2 * padding + 1, 2)[..., None]
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    example = torch.arange(n, device=images.device)[:, None, None]
    # Indexing puts the channels last: n h w c.
    windows = padded[example, :, rows[:, :, None], columns[:, None, :]]
    return windows.permute(0, 3, 1, 2)


def random_flip(images: Pixels, rng: ExampleRng) -> Pixels:
    """Mirror each image left and right with probability one half."""
    mirrored = rng.throw(1).reshape(-1, 1, 1, 1) < 0.5
    return torch.where(mirrored, images.flip(-1), images)


def cutout(images: Pixels, side: int, rng: ExampleRng) -> Pixels:
    """Cover a square around a random pixel with grey, half of the time (DeVries, Taylor 2017)."""
    height, width = images.shape[2:]
    chosen = rng.throw(1).reshape(-1, 1, 1, 1) < 0.5
    row, column = rng.integers(height, 1).T, rng.integers(width, 1).T

    def covered(centre: Tensor, length: int) -> Tensor:
        place = torch.arange(length, device=images.device)
        first = centre - side // 2
        return (place >= first) & (place < first + side)

    square = covered(row, height)[:, None, :, None] & covered(column, width)[:, None, None, :]
    return images.masked_fill(square & chosen, 0.5)


def random_colour(images: Pixels, strength: float, rng: ExampleRng) -> Pixels:
    """Scale brightness, contrast and saturation by factors in 1 +- strength."""
    drawn = rng.throw(3, images.dtype).reshape(3, -1, 1, 1, 1)
    factors = 1 + strength * (2 * drawn - 1)
    brightness, contrast, saturation = factors
    images = images * brightness
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + contrast * (images - mean)
    grey = images.mean(dim=1, keepdim=True)
    return (grey + saturation * (images - grey)).clamp(0, 1)


def random_affine(images: Pixels, strength: float, rng: ExampleRng) -> Pixels:
    """Turn, shift and scale each image a little; what comes in from outside is reflected."""
    if len(images) == 0:
        return images
    turn, scale, right, down = strength * (2 * rng.throw(4, images.dtype) - 1)
    angle = turn * (torch.pi / 2)
    cosine, sine = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    # Rows of the 2 x 3 matrices; one side of the image is 2 units long.
    first = torch.stack([cosine, -sine, 2 * right], dim=1)
    second = torch.stack([sine, cosine, 2 * down], dim=1)
    matrices = torch.stack([first, second], dim=1)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
