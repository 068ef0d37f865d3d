"""A network that tells two kinds of images apart under any amount of noise.

The way down of the U-Net, with its blocks and its embedding of noise level and class, and a score
at its end. No image looks at another, so the gradient of a score belongs to its image.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.models.unet import EMBEDDED, Embedding, UNetBlock

WIDEST = 4
"""Maps are at most this many times as many as at the image."""


class NoisyDiscriminator(nn.Module):
    """A logit for each image: large for the first kind, small for the other.

    Reads x / sqrt(sigma^2 + sigma_data^2), which is of about unit size at every sigma. Without
    `classes` labels are ignored. Runs under autocast; the logit is float32.
    """

    def __init__(
        self,
        *,
        channels: int,
        size: int,
        classes: int | None,
        width: int = 64,
        dropout: float = 0.1,
        sigma_data: float = 0.5,
    ) -> None:
        super().__init__()
        if size < 8:
            raise ConfigError(f"images of {size} pixels are too small to tell: use --image-size 8.")
        if width < 4 or width % 4:
            raise ConfigError(f"a width of {width} has no groups of 4 maps: use a multiple of 4.")
        # Halved, odd sides rounded down, until 4 to 7 pixels are left.
        widths = [width * min(2**level, WIDEST) for level in range(size.bit_length() - 2)]
        self.sigma_data = sigma_data
        self.embedding = Embedding(width, classes, 0)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList([UNetBlock(width, width, EMBEDDED * width, dropout)])
        for inputs, outputs in pairwise(widths):
            self.blocks.append(
                UNetBlock(inputs, outputs, EMBEDDED * width, dropout, resize="halve")
            )
        # The last map is small: all of its places may look at each other.
        self.blocks.append(
            UNetBlock(widths[-1], widths[-1], EMBEDDED * width, dropout, attend=True)
        )
        self.score = nn.Linear(widths[-1], 1)

    def forward(
        self,
        x: Float[Tensor, "n c h w"],
        sigma: Float[Tensor, " n"],
        labels: Int[Tensor, " n"] | None = None,
    ) -> Float[Tensor, " n"]:
        """Logits of images with noise of these sigmas."""
        told = self.embedding(sigma.log() / 4, labels)
        x = x * (sigma.square() + self.sigma_data**2).rsqrt()[:, None, None, None]
        inner = self.first(x)
        for block in self.blocks:
            inner = block(inner, told)
        found = F.silu(inner).float().mean(dim=(2, 3))
        with torch.autocast(x.device.type, enabled=False):
            return self.score(found)[:, 0]
