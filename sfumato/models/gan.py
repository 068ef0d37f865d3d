"""A generator of class images and the discriminators that teach it.

The residual networks of Miyato and Koyama 2018 ("cGANs with projection discriminator"), which
pseudo-label-guided inversion builds on (Yuan et al. 2023). The class enters the generator only by
the gain and bias after each normalisation, and the discriminator only by an inner product with its
features: so the network learns what a class means beside what any image is.

Pixels lie in [0, 1] on both sides, as they do for the target. Everything runs under autocast:
convolutions in its precision; statistics, spectral norms, heads and the pixels in float32.
"""

from itertools import pairwise
from math import sqrt
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.models.resize import ResizingConv2d
from sfumato.models.spectral import normed

Maps = Float[Tensor, "n maps h w"]
Doubled = Float[Tensor, "n outputs 2*h 2*w"]
Labels = Int[Tensor, " n"]
Head = Literal["projection", "plain", "classes"]

WIDEST = 16
"""Maps are at most this many times as many as at the image: 1024 for a width of 64."""


class Generator(nn.Module):
    """Images of a class from noise: a linear map, blocks that double, and a sigmoid.

    Guarantee: pixels lie in [0, 1], and at most gains and biases tell one class from another. With
    `classes=None` there are no classes, and labels are ignored.
    """

    def __init__(
        self,
        classes: int | None,
        *,
        channels: int = 3,
        size: int = 64,
        width: int = 64,
        latent: int = 128,
    ) -> None:
        super().__init__()
        start, doublings = _start(size)
        widths = _widths(width, doublings)[::-1]
        self.latent = latent
        self.start = (start, start, widths[0])
        self.first = nn.Linear(latent, start * start * widths[0])
        self.blocks = nn.ModuleList(GeneratorBlock(a, b, classes) for a, b in pairwise(widths))
        self.norm = nn.BatchNorm2d(widths[-1])
        self.last = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(
        self, z: Float[Tensor, "n latent"], labels: Labels | None = None
    ) -> Float[Tensor, "n c h w"]:
        """An image for each row of noise, in float32."""
        # Rows, columns, maps: so the maps are channels_last from the start, at no cost.
        x = self.first(z).unflatten(1, self.start).permute(0, 3, 1, 2)
        for block in self.blocks:
            x = block(x, labels)
        return torch.sigmoid(self.last(F.relu(self.norm(x))).float())


class GeneratorBlock(nn.Module):
    """Normalise, activate, double, convolve, and once more, beside a doubled shortcut."""

    def __init__(self, inputs: int, outputs: int, classes: int | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = ClassNorm(inputs, classes), ClassNorm(outputs, classes)
        # A bias before a normalisation, or a second one in a sum, would change nothing.
        self.conv1 = ResizingConv2d(inputs, outputs, 3, "double", bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Maps, labels: Labels | None) -> Doubled:
        """Twice the height and the width. The shortcut is doubled last: the same, for a quarter."""
        inner = self.conv1(F.relu(self.norm1(x, labels)))
        return _doubled(self.shortcut(x)) + self.conv2(F.relu(self.norm2(inner, labels)))


class ClassNorm(nn.Module):
    """Batch norm whose gain and bias are those of the class; one pair for all without classes."""

    def __init__(self, width: int, classes: int | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=classes is None)
        self.gain = self.bias = None
        if classes is not None:
            self.gain, self.bias = nn.Embedding(classes, width), nn.Embedding(classes, width)
            nn.init.ones_(self.gain.weight)
            nn.init.zeros_(self.bias.weight)

    def forward(self, x: Maps, labels: Labels | None) -> Maps:
        """Statistics are of the whole batch, whatever its classes."""
        x = self.norm(x)
        if self.gain is None or self.bias is None:
            return x
        assert labels is not None, "a generator with classes needs labels"
        # In the precision of the maps: float32 gains would make float32 maps of them.
        gain, bias = (
            table(labels).to(x.dtype)[..., None, None] for table in (self.gain, self.bias)
        )
        return torch.addcmul(bias, gain, x)


class Discriminator(nn.Module):
    """How real an image looks (for its class), with every weight matrix of spectral norm 1.

    The heads: "projection" gives one score, w.h + b + <v_y, h> for features h and class y; "plain"
    one score without a class; "classes" a logit for each class, where real means a large sum.

    Weights are divided by an estimate of their largest singular value, which follows them when
    `spectral.update_spectral_norms` is called.
    """

    def __init__(
        self,
        classes: int | None,
        *,
        channels: int = 3,
        size: int = 64,
        width: int = 64,
        head: Head = "projection",
    ) -> None:
        super().__init__()
        count = classes or 0
        if not count and head != "plain":
            raise ConfigError(
                f'a "{head}" head asks for classes, and there are none. Give their number, or use '
                'the head "plain".'
            )
        widths = _widths(width, _halvings(size))
        # The last block keeps its map: the one the generator starts from.
        halved = [True] * (len(widths) - 2) + [False]
        pairs = zip(pairwise(widths), halved, strict=True)
        self.first = FirstBlock(channels, widths[0])
        self.blocks = nn.Sequential(*(DownBlock(a, b, halve) for (a, b), halve in pairs))
        self.head = head
        self.score = normed(nn.Linear(widths[-1], count if head == "classes" else 1))
        projects = head == "projection"
        self.classes = normed(nn.Embedding(count, widths[-1])) if projects else None

    def forward(
        self, x: Float[Tensor, "n c h w"], labels: Labels | None = None
    ) -> Float[Tensor, " n"] | Float[Tensor, "n classes"]:
        """A score for each image, or its logits, in float32; only a projection reads labels."""
        found = self.features(x)
        with torch.autocast(x.device.type, enabled=False):
            scores = self.score(found)
            if self.head == "classes":
                return scores
            if self.classes is None:
                return scores[:, 0]
            assert labels is not None, "a projection needs labels"
            return scores[:, 0] + (self.classes(labels) * found).sum(dim=1)

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n features"]:
        """What the head reads of an image: the last maps, summed over places, in float32."""
        return F.relu(self.blocks(self.first(x))).float().sum(dim=(2, 3))


class FirstBlock(nn.Module):
    """Pixels to maps of half the size. Nothing is activated before: pixels are not negative."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 3)
        self.conv2 = _conv(width, width, 3, "halve")
        self.shortcut = _conv(channels, width, 1, "halve", bias=False)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n outputs h//2 w//2"]:
        """Half the height and the width, rounded down."""
        return self.conv2(F.relu(self.conv1(x))) + self.shortcut(x)


class DownBlock(nn.Module):
    """Activate and convolve, twice, beside a shortcut; perhaps to half the size."""

    def __init__(self, inputs: int, outputs: int, halve: bool) -> None:
        super().__init__()
        resize = "halve" if halve else None
        self.conv1 = _conv(inputs, inputs, 3)
        self.conv2 = _conv(inputs, outputs, 3, resize)
        self.shortcut = _conv(inputs, outputs, 1, resize, bias=False)

    def forward(self, x: Maps) -> Float[Tensor, "n outputs halved_h halved_w"]:
        """Both ways are halved by their last convolution."""
        return self.conv2(F.relu(self.conv1(F.relu(x)))) + self.shortcut(x)


def _conv(inputs: int, outputs: int, side: int, *resize: Any, bias: bool = True) -> nn.Module:
    gain = sqrt(2) if side > 1 else 1.0
    return normed(ResizingConv2d(inputs, outputs, side, *resize, bias=bias), gain)


def _widths(width: int, doublings: int) -> list[int]:
    """Numbers of maps, from the image inwards."""
    return [width * min(2**level, WIDEST) for level in range(doublings + 1)]


def _start(size: int) -> tuple[int, int]:
    """Side of the first map, 4 to 7, and how often it is doubled to reach `size`."""
    doublings = max(1, size.bit_length() - 3)
    step = 2**doublings
    if size >= 8 and size % step == 0:
        return size // step, doublings
    below = max(8, size - size % step)
    raise ConfigError(
        f"images of {size} pixels cannot be drawn by doubling a map of 4 to 7 pixels. Use "
        f"--image-size {below} or {below + step}."
    )


def _halvings(size: int) -> int:
    """How often an image is halved, odd sizes rounded down, until it has 4 to 7 pixels a side."""
    if size < 8:
        raise ConfigError(f"images of {size} pixels are too small to tell: use --image-size 8.")
    return size.bit_length() - 3


def _doubled(x: Maps) -> Float[Tensor, "n maps 2*h 2*w"]:
    with torch.autocast(x.device.type, enabled=False):  # it would go the long way, by float32
        return F.interpolate(x, scale_factor=2.0, mode="bilinear")
