"""GroupNorm of maps whose channels come last in memory.

A row is an image: T positions times C channels, side by side, in groups of neighbouring channels.
A group's numbers lie scattered, so programs take chunks of positions with all channels, reduce them
channel by channel, and a small kernel puts channels and chunks of a group together; then one more
pass writes the result. So x is read twice. No program waits for another, and sums are taken in a
fixed order. Inputs may be rounded, everything computed is float32.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (A Triton kernel is called with a grid in brackets, which type checkers take for a mistake.)

from math import prod
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.clipping.kernels.layer_norm import cut, dense, warps

TILE = 4096
"""Numbers a program holds at a time."""

Grid = tuple[int, int, int]
Sides = tuple[int, int]


@triton.jit
@no_type_check
def _moments(
    x, mean, squares, positions, chunk, channels, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Mean, and sum of squares around it, of each channel of a chunk: place (row, chunk, block).

    Each of R x W lanes follows its own mean (Welford 1962); in the end the lanes of a channel are
    put together (Chan et al. 1983). So a mean far from zero takes nothing from the squares.
    """
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * W + tl.arange(0, W)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, positions)
    middle = tl.zeros((R, W), dtype=tl.float32)
    around = tl.zeros((R, W), dtype=tl.float32)
    count = tl.zeros((R,), dtype=tl.float32)
    for start in range(first, last, R):
        t = start + tl.arange(0, R)
        inside = (t < last)[:, None] & (c < channels)[None, :]
        at = (row * positions + t)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        count += (t < last).to(tl.float32)
        step = value - middle
        middle += tl.where(inside, step * (1.0 / tl.maximum(count, 1.0))[:, None], 0.0)
        around += tl.where(inside, step * (value - middle), 0.0)
    whole = tl.sum(middle * count[:, None], axis=0) / (last - first)
    # Once more around the first mean, which has lost bits if it is large.
    whole += tl.sum((middle - whole[None, :]) * count[:, None], axis=0) / (last - first)
    apart = middle - whole[None, :]
    around += count[:, None] * apart * apart
    at = (row * tl.num_programs(1) + tl.program_id(1)) * channels + c
    tl.store(mean + at, whole, mask=c < channels)
    tl.store(squares + at, tl.sum(around, axis=0), mask=c < channels)


@triton.jit
@no_type_check
def _of_groups(
    part_mean, part_squares, mean, rstd, positions, chunk, chunks, channels, groups, numbers, eps,
    K: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Mean and `rstd` of B groups, from their channels and chunks: place (row, block)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    size = channels // groups
    s = tl.arange(0, S)
    known = (group < groups)[:, None] & (s < size)[None, :]
    c = group[:, None] * size + s[None, :]
    middle = tl.zeros((K, B, S), dtype=tl.float32)
    around = tl.zeros((K, B, S), dtype=tl.float32)
    before = tl.zeros((K,), dtype=tl.float32)
    for start in range(0, chunks, K):
        k = start + tl.arange(0, K)
        inside = (k < chunks)[:, None, None] & known[None, :, :]
        at = (row * chunks + k)[:, None, None] * channels + c[None, :, :]
        count = tl.where(k < chunks, tl.minimum(chunk, positions - k * chunk), 0).to(tl.float32)
        after = before + count
        part = count / tl.maximum(after, 1.0)
        apart = tl.load(part_mean + at, mask=inside, other=0.0) - middle
        middle += tl.where(inside, apart * part[:, None, None], 0.0)
        around += tl.load(part_squares + at, mask=inside, other=0.0)
        around += tl.where(inside, apart * apart * (part * before)[:, None, None], 0.0)
        before = after
    count = before[:, None, None]
    whole = tl.sum(tl.sum(middle * count, axis=0), axis=1) / numbers
    apart = tl.where(known[None, :, :], middle - whole[None, :, None], 0.0)
    whole += tl.sum(tl.sum(apart * count, axis=0), axis=1) / numbers
    apart = tl.where(known[None, :, :], middle - whole[None, :, None], 0.0)
    around += count * apart * apart
    variance = tl.sum(tl.sum(around, axis=0), axis=1) / numbers
    tl.store(mean + row * groups + group, whole, mask=group < groups)
    tl.store(rstd + row * groups + group, 1.0 / tl.sqrt_rn(variance + eps), mask=group < groups)


@triton.jit
@no_type_check
def _apply(
    x, mean, rstd, weight, bias, out, positions, chunk, channels, groups,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The output for a chunk of positions: place (row, chunk, block of channels)."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(2) * W + tl.arange(0, W)
    known = c < channels
    stat = row * groups + c // (channels // groups)
    middle = tl.load(mean + stat, mask=known, other=0.0)
    factor = tl.load(rstd + stat, mask=known, other=0.0)
    shift = tl.zeros((W,), dtype=tl.float32)
    if weight is not None:
        factor *= tl.load(weight + c, mask=known, other=0.0)
    if bias is not None:
        shift = tl.load(bias + c, mask=known, other=0.0)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, positions)
    for start in range(first, last, R):
        t = start + tl.arange(0, R)
        inside = (t < last)[:, None] & known[None, :]
        at = (row * positions + t)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = (value - middle[None, :]) * factor[None, :] + shift[None, :]
        tl.store(out + at, value, mask=inside)


@torch.library.custom_op("sfumato::group_norm", mutates_args=())
def group_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and `rstd` (1 / deviation) of each row's groups, all in float32."""
    flat, weight, bias = flattened(x), dense(weight), dense(bias)
    rows, positions, channels = flat.shape
    grid, chunk, sides = plan(flat)
    parts = x.new_empty((2, rows, grid[1], channels), dtype=torch.float32)
    mean, rstd = (x.new_empty((rows, groups), dtype=torch.float32) for _ in range(2))
    out = room(x, torch.float32)
    _moments[grid](flat, *parts, positions, chunk, channels, *sides, num_warps=warps(*sides))
    blocks, small = small_plan(grid[1], channels, groups)
    numbers = float(positions * (channels // groups))
    _of_groups[(rows, blocks)](
        *parts, mean, rstd, positions, chunk, grid[1], channels, groups, numbers, eps, *small,
        num_warps=warps(*small),
    )  # fmt: skip
    _apply[grid](
        flat, mean, rstd, weight, bias, flattened(out), positions, chunk, channels, groups, *sides,
        num_warps=warps(*sides),
    )  # fmt: skip
    return out, mean, rstd


@group_norm_forward.register_fake
def _group_norm_forward_shapes(x, weight, bias, groups, eps):
    stats = (x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2))
    return room(x, torch.float32), *stats


def flattened(x: Tensor) -> Tensor:
    """Rows, positions, channels: of maps with channels last that is a view."""
    return x.movedim(1, -1).contiguous().reshape(x.shape[0], -1, x.shape[1])


def room(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for numbers in the shape of x, with channels last in memory.

    It is no view: what an autograd Function gives may be changed in place only if it is none.
    """
    channels, *sides = x.shape[1:]
    steps = [channels * prod(sides[i + 1 :]) for i in range(len(sides))]
    return x.new_empty_strided(x.shape, (channels * prod(sides), 1, *steps), dtype=dtype)


def plan(flat: Tensor) -> tuple[Grid, int, Sides]:
    """Programs, positions in a chunk, and the sides of a tile."""
    rows, positions, channels = flat.shape
    W = max(16, min(256, triton.next_power_of_2(channels)))
    R = min(TILE // W, triton.next_power_of_2(positions))
    blocks = triton.cdiv(channels, W)
    chunk, chunks = cut(positions, rows * blocks, R)
    return (rows, chunks, blocks), chunk, (R, W)


def small_plan(chunks: int, channels: int, groups: int) -> tuple[int, tuple[int, int, int]]:
    """Blocks of groups for the small kernels, and the sides of a tile: chunks, groups, channels."""
    S = triton.next_power_of_2(channels // groups)
    K = max(1, min(16, triton.next_power_of_2(chunks), TILE // 2 // S))
    B = max(1, min(triton.next_power_of_2(groups), TILE // 2 // (K * S)))
    return triton.cdiv(groups, B), (K, B, S)
