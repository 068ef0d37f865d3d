"""Gradients of 2-D convolutions, for each example or all together, without laying out columns.

Both are the same sums over positions (see `conv_tiles` and `depthwise`): those of one example, or
of a share of the batch. The shares of a batch are added in a second step, always in the same order.
Input and output gradient are read as they are, in bfloat16 or float32; sums are float32.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (A Triton kernel is called with a grid in brackets, which type checkers take for a mistake.)

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sfumato.clipping.kernels.conv_depthwise import depthwise_tile
from sfumato.clipping.kernels.conv_tiles import column_tile, tap_tile

MANY, NARROW = 16, 64
"""Channels of a group from which on a program reads one tap at a time, and those up to which it
reads the three taps of a line."""

TAPS, NUMBERS, AHEAD, WARPS, REGISTERS = 8, 512, 1, 4, 128
"""The taps of a depthwise kernel that a program has along each side at most, the numbers of its
tiles, the columns that it reads before they are used, its warps, and the registers of a thread."""

PROGRAMS, SHARE = 2 * 132, 1024
"""Programs that an H200 runs at once, and the fewest positions of a share."""


@torch.library.custom_op("sfumato::conv_gradients", mutates_args=())
def conv_gradients(
    x: Tensor, g: Tensor, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int, examples: int,
) -> Tensor:  # fmt: skip
    """The gradients (n P C h w, in float32) of a 2-D convolution, one for each example."""
    x, g = to_channels_last(x, g)
    share = x.shape[0] // max(1, examples)
    return _sums(x, g, share, kernel, stride, padding, dilation, groups)


@conv_gradients.register_fake
def _conv_gradients_shapes(x, g, kernel, stride, padding, dilation, groups, examples):
    return _new_sums(x, examples, g.shape[1], kernel, groups)


@torch.library.custom_op("sfumato::conv_total", mutates_args=())
def conv_total(
    x: Tensor, g: Tensor, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    """The sum (P C h w, in float32) of the gradients of all images."""
    x, g = to_channels_last(x, g)
    tiles = _tiling(x, g, x.shape[0], kernel, groups).tiles
    # What fills the device more than half would leave much of it idle at the end.
    shares = PROGRAMS // tiles if 2 * tiles <= PROGRAMS else 3
    shares = max(1, min(shares, g.numel() // g.shape[1] // SHARE))
    share = triton.cdiv(x.shape[0], shares)
    found = _sums(x, g, share, kernel, stride, padding, dilation, groups)
    if len(found) == 1:
        return found[0]
    return torch.sum(found, dim=0, out=_new_sums(x, 1, g.shape[1], kernel, groups)[0])


@conv_total.register_fake
def _conv_total_shapes(x, g, kernel, stride, padding, dilation, groups):
    return _new_sums(x, 1, g.shape[1], kernel, groups)[0]


def to_channels_last(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output gradient in one type, with channels last."""
    last = torch.channels_last
    return x.contiguous(memory_format=last), g.to(x.dtype).contiguous(memory_format=last)


def product_precision() -> str:
    """How the products of float32 numbers are taken."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def tile_side(size: int, most: int) -> int:
    """A power of two that holds `size` if it can."""
    return max(16, min(most, triton.next_power_of_2(size)))


class Tiling(NamedTuple):
    """Which kernel forms the sums, the sides of its tiles, how many numbers lie together,
    how many tiles make a gradient, and the warps and (at most) registers of a program."""

    kernel: Any
    sides: dict[str, int]
    unit: int
    tiles: int
    warps: int = 4
    registers: int | None = None


def _tiling(x: Tensor, g: Tensor, share: int, kernel: list[int], groups: int) -> Tiling:
    channels, outputs, taps = x.shape[1] // groups, g.shape[1] // groups, kernel[0] * kernel[1]
    if channels == 1 and groups > 1:
        sides = _depthwise_sides(g, kernel)
        tiles = triton.cdiv(kernel[0], sides["H"]) * triton.cdiv(kernel[1], sides["W"])
        tiles *= triton.cdiv(g.shape[1], sides["P"])
        return Tiling(depthwise_tile, sides, unit_of(groups), tiles, WARPS, REGISTERS)
    size = g.shape[2] * g.shape[3]
    step = tile_side(size * share, 32 if x.dtype == torch.float32 else 64)
    steps = {"T": step, "steady": size > 0 and step % size == 0}
    if channels < MANY:
        inputs = channels * taps
        sides = {"P": tile_side(outputs, 64), "D": tile_side(inputs, 64), **steps}
        tiles = triton.cdiv(outputs, sides["P"]) * triton.cdiv(inputs, sides["D"])
        return Tiling(column_tile, sides, unit_of(outputs), tiles * groups)
    unit = unit_of(channels, outputs)
    most = 128 if unit > 1 else 32  # what lies askew takes more registers
    line = 3 if kernel[1] == 3 and channels <= NARROW else 1
    sides = {"P": tile_side(outputs, most), "C": tile_side(channels, most), **steps, "taps": line}
    tiles = triton.cdiv(outputs, sides["P"]) * triton.cdiv(channels, sides["C"]) * taps // line
    large = sides["P"] * sides["C"] * line >= 128 * 128
    return Tiling(tap_tile, sides, unit, tiles * groups, 8 if large else 4)


def _depthwise_sides(g: Tensor, kernel: list[int]) -> dict[str, int]:
    """Tiles of few taps, and of the lines and channels that leave the least of them empty."""
    lines = max(1, min(TAPS, triton.next_power_of_2(kernel[0])) // 2)
    taps = triton.cdiv(kernel[1], triton.cdiv(kernel[1], TAPS))
    room = NUMBERS // lines

    def filled(side: int) -> int:
        rows = room // side
        return triton.cdiv(g.shape[2], rows) * rows * triton.cdiv(g.shape[1], side) * side

    outputs = min((side for side in (16, 32, 64, 128) if side <= room), key=filled)
    return {"P": outputs, "R": room // outputs, "H": lines, "W": taps, "ahead": AHEAD}


def unit_of(*sizes: int) -> int:
    """How many channels lie side by side at least, for one read."""
    return 1 if any(size % 8 for size in sizes) else 8


def _sums(
    x: Tensor, g: Tensor, share: int, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    """The sums (stretches P C h w) over each stretch of as many images as its share."""
    tiling = _tiling(x, g, share, kernel, groups)
    stretches = triton.cdiv(x.shape[0], max(1, share))
    found = _new_sums(x, stretches, g.shape[1], kernel, groups)
    if not found.numel():
        return found
    options = (tiling.unit, product_precision(), x.is_cuda)
    tiling.kernel[(stretches * tiling.tiles,)](
        x, g, found, x.shape[0], share, x.shape[1] // groups, g.shape[1] // groups, groups,
        *x.shape[2:], *g.shape[2:], *kernel, *stride, *padding, *dilation, *tiling.sides.values(),
        *options, num_warps=tiling.warps, num_stages=3, maxnreg=tiling.registers,
    )  # fmt: skip
    return found


def _new_sums(x: Tensor, count: int, outputs: int, kernel: list[int], groups: int) -> Tensor:
    """Room for sums, in the order in which their kernel writes them."""
    channels = x.shape[1] // groups
    if channels == 1 and groups > 1:
        rows = x.new_empty((count, 1, *kernel, outputs), dtype=torch.float32)
        return rows.movedim(-1, 1)
    return x.new_empty((count, outputs, *kernel, channels), dtype=torch.float32).movedim(-1, 2)
