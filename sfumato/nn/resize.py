"""Convolutions that also halve or double their maps, as one convolution each.

The mean over 2 x 2 places of a convolution is a convolution with a kernel one wider that moves by
two. Bilinear doubling before a convolution is a transposed one, three wider. So there is nothing to
pool or to interpolate, which on a GPU costs more than to convolve; and to halve takes less than
half of the work.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Maps = Float[Tensor, "n maps h w"]


class ResizingConv2d(nn.Conv2d):
    """`avg_pool2d(conv2d(x), 2)`, or `conv2d(interpolate(x, 2, "bilinear"))`, or neither.

    Padding keeps the size; when maps are doubled it continues them, and is 0 otherwise. The weight
    is worked out in float32, whatever precision it then runs in.
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
        self.resize = resize
        one_way = {"halve": halving, "double": doubling}.get(resize or "", torch.eye)(side)
        self.spread: Tensor
        self.register_buffer("spread", torch.kron(one_way, one_way), persistent=False)

    def forward(self, input: Maps) -> Float[Tensor, "n outputs resized_h resized_w"]:
        """Maps of half the size (rounded down), twice the size, or the same."""
        with torch.autocast(input.device.type, enabled=False):
            weight = self.weight if self.resize is None else self.wider()
        edge = self.kernel_size[0] // 2
        if self.resize == "double":
            input = F.pad(input, (1, 1, 1, 1), mode="replicate")
            return F.conv_transpose2d(input, weight.transpose(0, 1), self.bias, 2, edge + 3)
        return F.conv2d(input, weight, self.bias, 2 if self.resize else 1, edge)

    def wider(self) -> Float[Tensor, "outputs inputs wide wide"]:
        """The kernel together with the means, or shares, of the resizing."""
        found = self.spread @ self.weight.permute(0, 2, 3, 1).flatten(1, 2)
        side = round(found.shape[1] ** 0.5)
        return found.unflatten(1, (side, side)).permute(0, 3, 1, 2)


def halving(side: int) -> Float[Tensor, "wide side"]:
    """Row m, column k: how much place m of the wider kernel has of place k."""
    return (torch.eye(side + 1, side) + torch.eye(side + 1, side).roll(1, 0)) / 2


def doubling(side: int) -> Float[Tensor, "wide side"]:
    """The same for a transposed convolution, which reads kernels from their end."""
    found = torch.zeros(side + 3, side)
    for k in range(side):
        found[side - 1 - k : side + 3 - k, k] = torch.tensor([0.25, 0.75, 0.75, 0.25])
    return found
