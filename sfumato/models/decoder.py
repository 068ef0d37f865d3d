"""From the weights of a head to a picture: networks that reconstruct training images.

Both take standardised weights, flat as the head has them (a matrix of K rows, then K biases), and
the class that is wanted, and give an image between -1 and 1 (while training, about there).

`PublishedDecoder` is that of Maciazek and Allison 2025: one large linear map of all weights, then
residual up-blocks. `RowDecoder` knows that a head is a matrix with a row a class: one encoder reads
the row of the wanted class and, on average, the other rows. It has a fraction of the weights, and
what it learns of one class serves all.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.errors import ConfigError

Weights = Float[Tensor, "heads weights"]
Classes = Int[Tensor, "heads wanted"]
Pictures = Float[Tensor, "heads wanted c h w"]


class PublishedDecoder(nn.Module):
    """All weights through one matrix to a small map, then residual blocks that double it."""

    def __init__(
        self, weights: int, shape: tuple[int, int, int], classes: int = 0, width: int = 256
    ) -> None:
        super().__init__()
        channels, size, _ = shape
        start, blocks = _start(size)
        self.first = nn.Linear(weights, 4 * width * start * start)
        # A one-hot input is a row of a table: found once for all classes of a head.
        self.classes = nn.Embedding(classes, self.first.out_features) if classes else None
        self.start = (4 * width, start, start)
        widths = [4 * width, 2 * width, *[width] * (blocks - 1)]
        self.blocks = nn.Sequential(*(UpBlock(a, b) for a, b in pairwise(widths)))
        self.last = nn.Sequential(
            nn.BatchNorm2d(widths[-1]),
            nn.ReLU(),
            nn.Conv2d(widths[-1], channels, 3, padding=1),
        )

    def forward(self, weights: Weights, wanted: Classes) -> Pictures:
        """An image of each wanted class; a decoder without classes gives one, whatever is asked."""
        found = self.first(weights)[:, None]
        if self.classes is not None:
            found = found + self.classes(wanted)
        maps = found.flatten(0, 1).unflatten(1, self.start)
        images = torch.tanh(self.last(self.blocks(maps)).float())
        return images.unflatten(0, found.shape[:2])


class UpBlock(nn.Module):
    """Normalise, activate, double, convolve, and once more, beside a doubled shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Twice the height and the width. The shortcut is doubled last: the same, for a quarter."""
        inner = self.conv1(_doubled(F.relu(self.norm1(x))))
        return _doubled(self.shortcut(x)) + self.conv2(F.relu(self.norm2(inner)))


class RowDecoder(nn.Module):
    """The row of the wanted class, and the mean of the others, by one encoder for all classes."""

    def __init__(
        self, weights: int, shape: tuple[int, int, int], classes: int, width: int = 64
    ) -> None:
        super().__init__()
        if classes < 2 or weights % classes:
            raise ConfigError(
                f"a head of {weights} weights has no row for each of {classes} classes. Use "
                "--decoder published."
            )
        channels, size, wide = shape
        if size != wide or size % 4:
            raise ConfigError(
                f"images of {size} x {wide} pixels cannot be drawn four by four: use --image-size "
                "28, 32 or 64."
            )
        inner, place = 8 * width, size // 4
        self.num_classes, self.place = classes, (width, place, place)
        row = weights // classes
        self.own, self.others = nn.Linear(row, inner), nn.Linear(row, inner)
        self.classes = nn.Embedding(classes, inner)
        self.mix = nn.Sequential(nn.LayerNorm(inner), nn.GELU(), nn.Linear(inner, inner))
        self.map = nn.Sequential(
            nn.LayerNorm(inner), nn.GELU(), nn.Linear(inner, width * place * place)
        )
        self.blocks = nn.Sequential(FlatBlock(width), FlatBlock(width))
        self.last = nn.Conv2d(width, 16 * channels, 3, padding=1)
        # Most of a picture is linear in the weights of its row; the rest is trained on top of it.
        self.skip = nn.Linear(row, channels * size * size)

    def forward(self, weights: Weights, wanted: Classes) -> Pictures:
        """An image of each wanted class."""
        matrix, bias = weights.split([weights.shape[1] - self.num_classes, self.num_classes], dim=1)
        rows = torch.cat([matrix.unflatten(1, (self.num_classes, -1)), bias[..., None]], dim=2)
        index = wanted[..., None].expand(-1, -1, rows.shape[2])
        own = rows.gather(1, index)
        others = (rows.sum(dim=1, keepdim=True) - own) / (self.num_classes - 1)
        found = self.own(own) + self.others(others) + self.classes(wanted)
        found = found + self.mix(found)
        maps = self.map(found).flatten(0, 1).unflatten(1, self.place)
        picture = F.pixel_shuffle(self.last(self.blocks(maps)), 4).unflatten(0, wanted.shape)
        picture = (picture + self.skip(own).view_as(picture)).float()
        # No tanh: most pixels are black, and it would soon stick there.
        return picture if self.training else picture.clamp(-1, 1)


class FlatBlock(nn.Module):
    """A residual block that keeps its size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8 if width % 8 == 0 else 1, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The input, and what two convolutions add to it."""
        return x + self.conv2(F.gelu(self.conv1(F.gelu(self.norm(x)))))


def _start(size: int) -> tuple[int, int]:
    """Side of the first map, and how often it is doubled to reach `size`."""
    for start in (4, 7):
        blocks = (size // start).bit_length() - 1
        if start << blocks == size and blocks >= 1:
            return start, blocks
    raise ConfigError(f"images of {size} pixels cannot be reached by doubling: use 28, 32 or 64.")


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")
