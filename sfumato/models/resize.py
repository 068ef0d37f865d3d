"""Convolutions that also halve or double their maps, as one convolution each.

The mean over 2 x 2 places of a convolution is a convolution with a kernel one wider that moves by
two. Bilinear doubling before a convolution of 3 x 3 is four such convolutions of the small map: one
for each quarter of the places of the large one. So there is nothing to pool or to interpolate,
which on a GPU costs more than to convolve; and to halve takes less than half of the work.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Maps = Float[Tensor, "n maps h w"]


class ResizingConv2d(nn.Conv2d):
    """`avg_pool2d(conv2d(x), 2)`, or `conv2d(interpolate(x, 2, "bilinear"))`, or neither.

    Padding keeps the size: beyond the border of the input are zeros. The weight is worked out in
    float32, whatever precision it then runs in.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        side: int,
        resize: Literal["halve", "double"] | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(inputs, outputs, side, padding=side // 2, bias=bias)
        assert resize != "double" or (side == 3 and not bias)
        self.resize = resize
        both_ways = {"halve": halving, "double": doubling}.get(resize or "", torch.eye)(side)
        self.spread: Tensor
        self.register_buffer("spread", both_ways, persistent=False)

    def forward(self, input: Maps) -> Float[Tensor, "n outputs resized_h resized_w"]:
        """Maps of half the size (rounded down), twice the size, or the same."""
        edge = self.kernel_size[0] // 2
        with torch.autocast(input.device.type, enabled=False):
            weight = self.weight if self.resize is None else self.wider()
        if self.resize == "double":
            return interleave(F.conv2d(input, weight.flatten(0, 1), padding=edge))
        return F.conv2d(input, weight.squeeze(0), self.bias, 2 if self.resize else 1, edge)

    def wider(self) -> Float[Tensor, "kernels outputs inputs wide wide"]:
        """The one kernel, or four, that do the resizing as well."""
        kernels = self.spread @ self.weight.permute(0, 2, 3, 1).flatten(1, 2)[:, None]
        side = round(kernels.shape[2] ** 0.5)
        return kernels.unflatten(2, (side, side)).permute(1, 0, 4, 2, 3)


def interleave(x: Float[Tensor, "n maps h w"]) -> Float[Tensor, "n quarter 2*h 2*w"]:
    """Put four maps together: even and odd rows of even and odd columns."""
    n, maps, height, width = x.shape
    parts = x.permute(0, 2, 3, 1).unflatten(3, (2, 2, maps // 4)).permute(0, 1, 3, 2, 4, 5)
    return parts.reshape(n, 2 * height, 2 * width, maps // 4).permute(0, 3, 1, 2)


def halving(side: int) -> Float[Tensor, "1 wide_places places"]:
    """Place by place of the wider kernel, how much it has of each place of the kernel."""
    one_way = (torch.eye(side + 1, side) + torch.eye(side + 1, side).roll(1, 0)) / 2
    return torch.kron(one_way, one_way)[None]


def doubling(side: int) -> Float[Tensor, "4 places places"]:
    """The same for each of the four."""
    # A place of the large map is 3/4 of one place of the small map and 1/4 of the next.
    even = torch.tensor([[3, 1, 0], [1, 3, 3], [0, 0, 1]]) / 4
    one_way = torch.stack([even, even.flip(0, 1)])
    assert side == len(even)
    return torch.stack([torch.kron(rows, columns) for rows in one_way for columns in one_way])
