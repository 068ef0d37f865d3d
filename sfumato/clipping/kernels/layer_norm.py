"""LayerNorm, and its backward pass with a sum for each example.

Forward, a program takes a few rows whole: one read, one write, and the variance is taken around the
mean. Backward, it goes through a chunk of one example's rows, writes the gradient of the input, and
adds up what scale and shift get: g times the normalised input, and g. Chunks are added in the end,
in a fixed order, so the same batch gives the same bits. Inputs may be rounded, everything computed
is float32.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (A Triton kernel is called with a grid in brackets, which type checkers take for a mistake.)

from math import prod
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024
"""Programs that keep a GPU busy: eight for each of the 132 processors of an H200."""


@triton.jit
@no_type_check
def _forward(
    x, weight, bias, out, mean, rstd, rows, width, eps, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """R rows of at most W numbers."""
    row, w = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, W)
    inside = (row < rows)[:, None] & (w < width)[None, :]
    at = row[:, None] * width + w[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(value, axis=1) / width
    # Once more around the first mean, which has lost bits if it is large.
    middle += tl.sum(tl.where(inside, value - middle[:, None], 0.0), axis=1) / width
    value = tl.where(inside, value - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / width + eps)
    tl.store(mean + row, middle, mask=row < rows)
    tl.store(rstd + row, inverse, mask=row < rows)
    value *= inverse[:, None]
    if weight is not None:
        value *= tl.load(weight + w, mask=w < width, other=0.0)[None, :]
    if bias is not None:
        value += tl.load(bias + w, mask=w < width, other=0.0)[None, :]
    tl.store(out + at, value, mask=inside)


@triton.jit
@no_type_check
def _backward(
    g, x, mean, rstd, weight, grad_x, by_weight, by_bias, positions, chunk, width,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One chunk of one example's rows, R at a time; the program's place is (example, chunk)."""
    example, w = tl.program_id(0).to(tl.int64), tl.arange(0, W)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, positions)
    factor = tl.full((W,), 1.0, tl.float32)
    if weight is not None:
        factor = tl.load(weight + w, mask=w < width, other=0.0)
    with_normal = tl.zeros((R, W), dtype=tl.float32)
    alone = tl.zeros((R, W), dtype=tl.float32)
    for start in range(first, last, R):
        t = start + tl.arange(0, R)
        row = example * positions + t
        inside = (t < last)[:, None] & (w < width)[None, :]
        at = row[:, None] * width + w[None, :]
        middle = tl.load(mean + row, mask=t < last, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=t < last, other=0.0)[:, None]
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - middle) * inverse
        above = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        with_normal += above * normal
        alone += above
        above *= factor[None, :]
        # What moves a row as a whole, or stretches it, has no effect.
        along_1 = tl.sum(above, axis=1)[:, None] / width
        along_normal = tl.sum(above * normal, axis=1)[:, None] / width
        found = (above - along_1 - normal * along_normal) * inverse
        tl.store(grad_x + at, found, mask=inside)
    at = (example * tl.num_programs(1) + tl.program_id(1)) * width + w
    tl.store(by_weight + at, tl.sum(with_normal, axis=0), mask=w < width)
    tl.store(by_bias + at, tl.sum(alone, axis=0), mask=w < width)


@torch.library.custom_op("sfumato::layer_norm", mutates_args=())
def layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, width: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and `rstd` (1 / deviation) of each row of `width` numbers, all in float32."""
    x, weight, bias = x.contiguous(), dense(weight), dense(bias)
    rows = x.numel() // width
    out = torch.empty_like(x, dtype=torch.float32)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    R, W = tile(rows, width)
    settings = (out, mean, rstd, rows, width, eps)
    _forward[(triton.cdiv(rows, R),)](x, weight, bias, *settings, R, W, num_warps=warps(R, W))
    return out, mean, rstd


@layer_norm_forward.register_fake
def _layer_norm_forward_shapes(x, weight, bias, width, eps):
    wide = x.new_empty(x.shape, dtype=torch.float32)
    rows = x.numel() // width
    return wide, *(x.new_empty(rows, dtype=torch.float32) for _ in range(2))


@torch.library.custom_op("sfumato::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, width: int,
    examples: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the input, and what scale and shift get from each example (2 n width)."""
    g, x, weight = g.contiguous(), x.contiguous(), dense(weight)
    grad_x, positions = torch.empty_like(x), x.numel() // max(1, examples * width)
    R, W = tile(positions, width)
    chunk, chunks = cut(positions, examples, R)
    sums = x.new_empty((2, examples, chunks, width), dtype=torch.float32)
    _backward[(examples, chunks)](
        g, x, mean, rstd, weight, grad_x, *sums, positions, chunk, width, R, W,
        num_warps=warps(R, W),
    )  # fmt: skip
    return grad_x, sums[:, :, 0] if chunks == 1 else sums.sum(dim=2)


@layer_norm_backward.register_fake
def _layer_norm_backward_shapes(g, x, mean, rstd, weight, width, examples):
    return x.new_empty(x.shape), x.new_empty((2, examples, width), dtype=torch.float32)


def dense(parameter: Tensor | None) -> Tensor | None:
    """The same without gaps: a scale may have been expanded, or cut from another."""
    return None if parameter is None else parameter.contiguous()


def tile(rows: int, width: int) -> tuple[int, int]:
    """The sides of a tile of about 4096 numbers, powers of two, that covers a row."""
    W = max(16, triton.next_power_of_2(width))
    return max(1, min(4096 // W, triton.next_power_of_2(max(1, rows)))), W


def warps(*sides: int) -> int:
    """As many as leave a thread 16 numbers of a tile, or a little more."""
    return max(1, min(16, prod(sides) // 512))


def cut(positions: int, examples: int, step: int) -> tuple[int, int]:
    """The length of a chunk of positions, a multiple of `step`, and how many chunks there are.

    Sums of a chunk are written and read again: chunks of eight steps make that a small part.
    """
    wanted = triton.cdiv(positions, triton.cdiv(PROGRAMS, max(1, examples)))
    chunk = max(8 * step, triton.cdiv(wanted, step) * step)
    return chunk, max(1, triton.cdiv(positions, chunk))
