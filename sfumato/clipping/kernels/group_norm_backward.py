"""The backward pass of GroupNorm with channels last, and what scale and shift get from each row.

As on the way forward: sums over chunks of positions channel by channel, a small kernel that adds up
the chunks and says what of g merely moves or stretches a group, and a pass that writes the gradient
of the input. The sums of a row are those scale and shift want, so they cost nothing more.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (A Triton kernel is called with a grid in brackets, which type checkers take for a mistake.)

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.clipping.kernels.group_norm_forward import (
    Grid,
    Sides,
    flattened,
    plan,
    room,
    small_plan,
)
from sfumato.clipping.kernels.layer_norm import dense, warps


@triton.jit
@no_type_check
def _sums(
    g, x, mean, rstd, by_weight, by_bias, positions, chunk, channels, size, stat_row,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Sums over a chunk of g times the normalised x, and of g: place (row, chunk, block)."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * W + tl.arange(0, W)
    stat = row * stat_row + c // size
    middle = tl.load(mean + stat, mask=c < channels, other=0.0)
    inverse = tl.load(rstd + stat, mask=c < channels, other=0.0)
    with_x = tl.zeros((R, W), dtype=tl.float32)
    alone = tl.zeros((R, W), dtype=tl.float32)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, positions)
    for start in range(first, last, R):
        t = start + tl.arange(0, R)
        inside = (t < last)[:, None] & (c < channels)[None, :]
        at = (row * positions + t)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        with_x += above * (value - middle[None, :])
        alone += above
    at = (row * tl.num_programs(1) + tl.program_id(1)) * channels + c
    tl.store(by_weight + at, tl.sum(with_x, axis=0) * inverse, mask=c < channels)
    tl.store(by_bias + at, tl.sum(alone, axis=0), mask=c < channels)


@triton.jit
@no_type_check
def _of_rows(
    part_weight, part_bias, weight, by_weight, by_bias, along, chunks, channels, groups, numbers,
    K: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The sums of a row, and what of g moves or stretches its groups: place (row, block)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    size = channels // groups
    s = tl.arange(0, S)
    known = (group < groups)[:, None] & (s < size)[None, :]
    c = group[:, None] * size + s[None, :]
    with_x = tl.zeros((K, B, S), dtype=tl.float32)
    alone = tl.zeros((K, B, S), dtype=tl.float32)
    for start in range(0, chunks, K):
        k = start + tl.arange(0, K)
        inside = (k < chunks)[:, None, None] & known[None, :, :]
        at = (row * chunks + k)[:, None, None] * channels + c[None, :, :]
        with_x += tl.load(part_weight + at, mask=inside, other=0.0)
        alone += tl.load(part_bias + at, mask=inside, other=0.0)
    by_x, by_1 = tl.sum(with_x, axis=0), tl.sum(alone, axis=0)
    tl.store(by_weight + row * channels + c, by_x, mask=known)
    tl.store(by_bias + row * channels + c, by_1, mask=known)
    if weight is not None:
        factor = tl.load(weight + c, mask=known, other=0.0)
        by_x *= factor
        by_1 *= factor
    at = (row * groups + group) * 2
    tl.store(along + at, tl.sum(by_1, axis=1) / numbers, mask=group < groups)
    tl.store(along + at + 1, tl.sum(by_x, axis=1) / numbers, mask=group < groups)


@triton.jit
@no_type_check
def _apply_backward(
    g, x, mean, rstd, weight, along, grad_x, positions, chunk, channels, groups,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradient of the input for a chunk: place (row, chunk, block of channels)."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * W + tl.arange(0, W)
    known = c < channels
    stat = row * groups + c // (channels // groups)
    middle = tl.load(mean + stat, mask=known, other=0.0)[None, :]
    inverse = tl.load(rstd + stat, mask=known, other=0.0)[None, :]
    along_1 = tl.load(along + 2 * stat, mask=known, other=0.0)[None, :]
    along_x = tl.load(along + 2 * stat + 1, mask=known, other=0.0)[None, :]
    factor = tl.full((1, W), 1.0, tl.float32)
    if weight is not None:
        factor = tl.load(weight + c, mask=known, other=0.0)[None, :]
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, positions)
    for start in range(first, last, R):
        t = start + tl.arange(0, R)
        inside = (t < last)[:, None] & known[None, :]
        at = (row * positions + t)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        normal = (value - middle) * inverse
        found = (above * factor - along_1 - normal * along_x) * inverse
        tl.store(grad_x + at, found, mask=inside)


@torch.library.custom_op("sfumato::group_norm_backward", mutates_args=())
def group_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of the input, and what scale and shift get from each row (2 rows C)."""
    above, flat, weight = flattened(g), flattened(x), dense(weight)
    rows, positions, channels = flat.shape
    groups = mean.shape[1]
    size = channels // groups
    parts, (grid, chunk, sides) = _partial_sums(above, flat, mean, rstd, size, groups)
    sums = x.new_empty((2, rows, channels), dtype=torch.float32)
    along = x.new_empty((rows, groups, 2), dtype=torch.float32)
    grad_x = room(x, x.dtype)
    blocks, small = small_plan(grid[1], channels, groups)
    _of_rows[(rows, blocks)](
        *parts, weight, *sums, along, grid[1], channels, groups, float(positions * size), *small,
        num_warps=warps(*small),
    )  # fmt: skip
    _apply_backward[grid](
        above, flat, mean, rstd, weight, along, flattened(grad_x), positions, chunk, channels,
        groups, *sides, num_warps=warps(*sides),
    )  # fmt: skip
    return grad_x, sums


@group_norm_backward.register_fake
def _group_norm_backward_shapes(g, x, mean, rstd, weight):
    sums = x.new_empty((2, *x.shape[:2]), dtype=torch.float32)
    return room(x, x.dtype), sums


@torch.library.custom_op("sfumato::channel_sums", mutates_args=())
def channel_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Sums over each row's positions (2 rows C) of g (x - mean) rstd and of g.

    Here mean and rstd are one number a channel: those of a BatchNorm that is frozen.
    """
    parts, _ = _partial_sums(flattened(g), flattened(x), mean.contiguous(), rstd.contiguous(), 1, 0)
    return parts[:, :, 0] if parts.shape[2] == 1 else parts.sum(dim=2)


@channel_sums.register_fake
def _channel_sums_shapes(g, x, mean, rstd):
    return x.new_empty((2, *x.shape[:2]), dtype=torch.float32)


def _partial_sums(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, size: int, stat_row: int
) -> tuple[Tensor, tuple[Grid, int, Sides]]:
    """Sums of each chunk (2 rows chunks C); statistics of a row begin `stat_row` after the last."""
    rows, positions, channels = x.shape
    grid, chunk, sides = plan(x)
    parts = x.new_empty((2, rows, grid[1], channels), dtype=torch.float32)
    _sums[grid](
        g, x, mean, rstd, *parts, positions, chunk, channels, size, stat_row, *sides,
        num_warps=warps(*sides),
    )  # fmt: skip
    return parts, (grid, chunk, sides)
