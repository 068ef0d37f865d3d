"""A denoiser of one hidden layer, for small images and a tight budget: quick, and few weights.

Noise of a private step falls on every weight, so what can be told with few is learned sooner. Class
and noise level go in together, as products of one class and one of a few overlapping ranges of
levels, and from there also straight to the pixels: the mean of a class, which decides what a sample
will be, is learned before anything else. Called like a UNet2DModel of diffusers (`--denoiser`).
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

LEVELS = (-0.75, -0.375, 0.0, 0.375)
"""Middles of the ranges of ln(sigma) / 4: sigma of 0.05, 0.22, 1 and 4.5."""
SPREAD = 0.2
"""How far a range reaches."""
LOUD = 2.0
"""How strong what the network is told is: as strong as the pixels together, about."""


class Shallow(nn.Module):
    """Images of the same shape, from images at a noise level: zero before training.

    Beyond the outermost ranges a noise level is told as the nearest of them.
    """

    def __init__(self, *, channels: int, size: int, classes: int, width: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            sample_size=size,
            in_channels=channels,
            out_channels=channels,
            num_class_embeds=classes,
        )
        self.levels: Tensor
        self.register_buffer("levels", torch.tensor(LEVELS), persistent=False)
        pixels, told = channels * size**2, len(LEVELS) * (classes + 1)
        self.first = nn.Linear(pixels, width, bias=False)
        self.told = nn.Linear(told, width)
        self.last = nn.Linear(width, pixels, bias=False)
        self.straight = nn.Linear(told, pixels)
        for weights in (self.last.weight, self.straight.weight, self.straight.bias):
            nn.init.zeros_(weights)

    def forward(
        self,
        sample: Float[Tensor, "n c h w"],
        timestep: Float[Tensor, " n"],
        class_labels: Int[Tensor, " n"],
    ) -> Any:
        """Its `sample` is the answer. The noise level is ln(sigma) / 4."""
        classes = torch.arange(self.config.num_class_embeds, device=class_labels.device)
        near = (-((timestep[:, None] - self.levels) / SPREAD).square() / 2).softmax(dim=1)
        each = (class_labels[:, None] == classes).to(near.dtype)
        both = torch.einsum("nl,nk->nlk", near, each)  # n images, l levels, k classes
        told = LOUD * torch.cat([near, both.flatten(1)], dim=1)
        inner = F.silu(self.first(sample.flatten(1)) + self.told(told))
        return SimpleNamespace(sample=(self.last(inner) + self.straight(told)).reshape_as(sample))


def grey_of_8_pixels(classes: int) -> Shallow:
    """As --denoiser calls it: for grey images of 8 x 8 pixels."""
    return Shallow(channels=1, size=8, classes=classes, width=256)
