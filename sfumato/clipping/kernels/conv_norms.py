"""Squared norms of a 2-D convolution's gradients from Gram matrices that never leave the chip.

With a (T x D) the columns of one example's input and b (T x P) its output gradients, the squared
norm is the sum of (a a') * (b b'), entry by entry. A program computes one tile of both matrices:
the first tap by tap, reading pixels from where the window lies, so that no columns are laid out.
Both are symmetric, so tiles above the diagonal stand for those below. Where examples have so few
positions that a tile would be mostly empty, it holds several of them.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (A Triton kernel is called with a grid in brackets, which type checkers take for a mistake.)

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.clipping.kernels.conv_tiles import div_mod
from sfumato.clipping.kernels.convolution import (
    product_precision,
    tile_side,
    to_channels_last,
    unit_of,
)
from sfumato.clipping.kernels.ghost import above_zero, finished

SIDE = 128
"""The most positions of a tile."""

SHARED = 16
"""Positions of a tile that examples share."""


@triton.jit
@no_type_check
def pair_tile(
    x, g, out, examples, positions, tiles, channels, outputs, groups,
    height, width, out_height, out_width, kernel_h, kernel_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, C: tl.constexpr, E: tl.constexpr, single: tl.constexpr,
    unit: tl.constexpr, precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The sum of products of S x S entries, that of their absolute values, and of lengths.

    With E > 1 the one tile is of E examples, and there are three numbers for each of them.
    """
    channels, outputs = channels // unit * unit, outputs // unit * unit
    program, other = div_mod(tl.program_id(0), tiles)
    program, one = div_mod(program, tiles)
    example, group = div_mod(program.to(tl.int64), groups)
    example *= E
    end = tl.minimum(examples - example, E).to(tl.int32) * positions
    x += example * (positions // (out_height * out_width)) * height * width * groups * channels
    x += group * channels
    g += example * positions * groups * outputs + group * outputs
    s, t = one * S + tl.arange(0, S), other * S + tl.arange(0, S)
    s_row, s_line, s_column = _place(s, out_height, out_width)
    t_row, t_line, t_column = _place(t, out_height, out_width)
    # A tile below the diagonal is its mirror image, and left out.
    rounds = tl.where(other < one, 0, kernel_h * kernel_w)
    inputs = tl.zeros((S, S), dtype=tl.float32)
    for step in range(0, rounds * tl.cdiv(channels, C)):
        tap, tile_c = div_mod(step, tl.cdiv(channels, C))
        c = tile_c * C + tl.arange(0, C)
        above, left = (tap // kernel_w) * dilation_h - pad_h, (tap % kernel_w) * dilation_w - pad_w
        h, w = s_line * stride_h + above, s_column * stride_w + left
        inside = (s < end) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        first = _read(x, (s_row * height + h) * width + w, inside, c, channels, groups)
        second = first
        if not single:
            h, w = t_line * stride_h + above, t_column * stride_w + left
            inside = (t < end) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            second = _read(x, (t_row * height + h) * width + w, inside, c, channels, groups)
        inputs = _add_gram(first, second, inputs, precision, on_gpu)
    rounds = tl.where(other < one, 0, 1)
    gradients = tl.zeros((S, S), dtype=tl.float32)
    for step in range(0, rounds * tl.cdiv(outputs, C)):
        p = step * C + tl.arange(0, C)
        first = _read(g, s, s < end, p, outputs, groups)
        second = first
        if not single:
            second = _read(g, t, t < end, p, outputs, groups)
        gradients = _add_gram(first, second, gradients, precision, on_gpu)
    products = inputs * gradients
    if E > 1:
        products = tl.where((s // positions)[:, None] == (s // positions)[None, :], products, 0.0)
    lengths = tl.where(s[:, None] == t[None, :], tl.sqrt(above_zero(products)), 0.0)
    if E > 1:
        e = tl.arange(0, S)
        out += ((example + e) * groups + group) * 3
        _store_each(out, products, e, s // positions, e * positions < end)
        _store_each(out + 1, tl.abs(products), e, s // positions, e * positions < end)
        _store_each(out + 2, lengths, e, s // positions, e * positions < end)
    else:
        times = tl.where(other > one, 2.0, 1.0)
        out += tl.program_id(0).to(tl.int64) * 3
        tl.store(out, times * tl.sum(products))
        tl.store(out + 1, times * tl.sum(tl.abs(products)))
        tl.store(out + 2, tl.sum(lengths))


@triton.jit
@no_type_check
def _store_each(out, entries, e, owner, real):
    """The sum of each example's entries."""
    mine = e[:, None] == owner[None, :]
    tl.store(out, tl.sum(tl.where(mine, tl.sum(entries, axis=0)[None, :], 0.0), axis=1), mask=real)


@triton.jit
@no_type_check
def _place(t, height, width):
    """The image, line and column of position t."""
    place = t % (height * width)
    return t // (height * width), place // width, place % width


@triton.jit
@no_type_check
def _read(tensor, places, inside, c, channels, groups):
    """Channels c at these places, zero outside."""
    at = places.to(tl.int64)[:, None] * (groups * channels) + c[None, :]
    return tl.load(tensor + at, mask=inside[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit
@no_type_check
def _add_gram(first, second, found, precision: tl.constexpr, on_gpu: tl.constexpr):
    """The products found so far, and those over C more channels."""
    if not on_gpu:  # Triton's interpreter cannot multiply bfloat16
        first, second = first.to(tl.float32), second.to(tl.float32)
    return tl.dot(first, tl.trans(second), found, input_precision=precision)


@torch.library.custom_op("sfumato::conv_ghost_norm", mutates_args=())
def conv_ghost_norm(
    x: Tensor, g: Tensor, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int, examples: int,
) -> Tensor:  # fmt: skip
    """For the gradients of a 2-D convolution, in float32: squared norms, and sums of |a| |b| (2 n).

    As in `arithmetic.sum_from_above`, what rounding may have taken away is added.
    """
    x, g = to_channels_last(x, g)
    channels, outputs = x.shape[1] // groups, g.shape[1] // groups
    positions = g.shape[0] * g.shape[2] * g.shape[3] // max(1, examples)
    unit = unit_of(channels, outputs)
    side, depth, each, warps, stages = _tiling(x, positions, unit)
    tiles = triton.cdiv(positions, side)
    found = x.new_empty((examples, groups * tiles * tiles, 3), dtype=torch.float32)
    if found.numel():
        pair_tile[(triton.cdiv(examples, each) * groups * tiles * tiles,)](
            x, g, found, examples, positions, tiles, channels, outputs, groups, *x.shape[2:],
            *g.shape[2:], *kernel, *stride, *padding, *dilation, side, depth, each, tiles == 1,
            unit, product_precision(), x.is_cuda, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return finished(found)


def _tiling(x: Tensor, positions: int, unit: int) -> tuple[int, int, int, int, int]:
    """A tile's side, channels of a step and examples; a program's warps and stages."""
    depth = 32 if x.dtype == torch.float32 or unit == 1 else 64
    if positions <= SHARED:
        return SHARED, depth, SHARED // max(1, positions), 2, 5
    # What lies askew takes more registers.
    side = tile_side(positions, SIDE if unit > 1 else SIDE // 2)
    return side, depth, 1, 8 if side == SIDE else 4, 3


@conv_ghost_norm.register_fake
def _conv_ghost_norm_shapes(x, g, kernel, stride, padding, dilation, groups, examples):
    return x.new_empty((2, examples), dtype=torch.float32)
