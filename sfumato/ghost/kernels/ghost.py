"""Ghost norms: the squared norm of b'a from a (T x D) and b (T x P), with no matrix ever written.

The norm is the sum over pairs of positions of (a a') * (b b'). One program takes one tile of such
pairs: it adds up the tile of a a' over D and that of b b' over P, both in float32, multiplies them
entry by entry and keeps three numbers: the sum, the sum of absolute values, and the sum over
positions of |a| |b|, by which rounding is bounded. Both matrices are symmetric, so tiles above the
diagonal count twice and those below are left out. Where the last few positions would fill a
fraction of a tile (197 = 3 x 64 + 5), they get narrow tiles of their own. Legend as in `contract`.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (A Triton kernel is called with a grid in brackets, which type checkers take for a mistake.)

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

NARROW = 16
"""Positions of the narrow tiles."""


@triton.jit
@no_type_check
def _gram_tile(
    rows, positions, depth, step, t, s,
    R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, kind: tl.constexpr,
    precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The products of positions t and s, added up over the depth."""
    found = tl.zeros((R, S), dtype=tl.float32)
    for start in range(0, depth, K):
        k = start + tl.arange(0, K)
        at = t[:, None] * step + k[None, :]
        one = tl.load(rows + at, mask=(t < positions)[:, None] & (k < depth)[None, :], other=0.0)
        if not on_gpu:  # Triton's interpreter cannot multiply bfloat16
            one = one.to(tl.float32)
        other = one
        if kind > 0:
            at = s[:, None] * step + k[None, :]
            inside = (s < positions)[:, None] & (k < depth)[None, :]
            other = tl.load(rows + at, mask=inside, other=0.0)
            if not on_gpu:
                other = other.to(tl.float32)
        found = tl.dot(one, tl.trans(other), found, input_precision=precision)
    return found


@triton.jit
@no_type_check
def _pairs(
    x, g, out, positions, depth_x, depth_g, x_example, x_step, g_example, g_step, whole, count,
    place, R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, kind: tl.constexpr,
    precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """One tile of pairs of one example; the program's place is (tile, example).

    Its kind: 0 on the diagonal, 1 above it, 2 one of the narrow tiles beside the whole ones.
    """
    pid, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if kind == 0:
        first, second, weight = pid * R, pid * R, 1.0
    elif kind == 1:
        line, column = 0, pid + 1
        while column >= whole - line:
            column -= whole - line - 1
            line += 1
        first, second, weight = line * R, (line + column) * R, 2.0
    else:
        first, second, weight = pid * R, whole * R, tl.where(pid < whole, 2.0, 1.0)
    t = first + tl.arange(0, R)
    s = second + tl.arange(0, S)
    x += example * x_example
    g += example * g_example
    a = _gram_tile(x, positions, depth_x, x_step, t, s, R, S, K, kind, precision, on_gpu)
    b = _gram_tile(g, positions, depth_g, g_step, t, s, R, S, K, kind, precision, on_gpu)
    products = a * b
    lengths = tl.where(t[:, None] == s[None, :], tl.sqrt(tl.maximum(products, 0.0)), 0.0)
    at = out + (example * count + place + pid) * 3
    tl.store(at, weight * tl.sum(tl.sum(products, axis=1), axis=0))
    tl.store(at + 1, weight * tl.sum(tl.sum(tl.abs(products), axis=1), axis=0))
    tl.store(at + 2, tl.sum(tl.sum(lengths, axis=1), axis=0))


@torch.library.custom_op("sfumato::ghost_norm", mutates_args=())
def ghost_norm(x: Tensor, g: Tensor) -> Tensor:
    """For x (n T D) and g (n T P), in float32: squared norms, and sums of |a| |b| (2 n)."""
    x, g = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, g.to(x.dtype)))
    examples, positions = x.shape[:2]
    side, depth, warps = _tiles(positions, x.dtype)
    whole, rest = divmod(positions, side)
    narrow = 0 < rest <= NARROW < side and whole > 0
    whole += bool(rest) and not narrow
    counts = (whole, whole * (whole - 1) // 2, whole + 1 if narrow else 0)
    found = x.new_empty((examples, sum(counts), 3), dtype=torch.float32)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    settings = (
        x, g, found, positions, x.shape[2], g.shape[2], x.stride(0), x.stride(1), g.stride(0),
        g.stride(1), whole, sum(counts),
    )  # fmt: skip
    for kind, count in enumerate(counts):
        if count:
            width = NARROW if kind == 2 else side
            _pairs[(count, examples)](
                *settings, sum(counts[:kind]), side, width, depth, kind, precision, x.is_cuda,
                num_warps=warps, num_stages=3,
            )  # fmt: skip
    return finished(found)


@ghost_norm.register_fake
def _(x, g):  # pyright: ignore
    return x.new_empty((2, x.shape[0]), dtype=torch.float32)


@triton.jit
@no_type_check
def _finish(tiles, out, examples, count, rounding, E: tl.constexpr):
    """Add up the tiles of E examples."""
    example = tl.program_id(0) * E + tl.arange(0, E)
    inside = example < examples
    at = tiles + example.to(tl.int64) * count * 3
    signed = tl.zeros((E,), dtype=tl.float32)
    absolute, lengths = signed, signed
    for _ in range(0, count):
        signed += tl.load(at, mask=inside, other=0.0)
        absolute += tl.load(at + 1, mask=inside, other=0.0)
        lengths += tl.load(at + 2, mask=inside, other=0.0)
        at += 3
    tl.store(out + example, tl.maximum(signed, 0.0) + rounding * absolute, mask=inside)
    tl.store(out + examples + example, lengths, mask=inside)


@triton.jit
@no_type_check
def _scale(rows, factors, out, each, B: tl.constexpr):
    """B numbers of one example times its factor; the program's place is (block, example)."""
    example = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(rows + example * each + at, mask=at < each, other=0.0).to(tl.float32)
    value *= tl.load(factors + example)
    tl.store(out + example * each + at, value.to(out.dtype.element_ty), mask=at < each)


@torch.library.custom_op("sfumato::scaled", mutates_args=())
def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """All numbers of each example times its factor, in the type that they have."""
    rows, found = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    each = rows.numel() // max(1, len(factors))
    if each:
        block = max(128, min(4096, triton.next_power_of_2(each)))
        grid = (triton.cdiv(each, block), len(factors))
        _scale[grid](rows, factors.float(), found, each, block, num_warps=max(1, block // 512))
    return found


@scaled.register_fake
def _(rows, factors):  # pyright: ignore
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def finished(tiles: Float[Tensor, "n tiles 3"]) -> Float[Tensor, "2 n"]:
    """Squared norms and sums of lengths from those of tiles, in one launch.

    As in `contract.sum_from_above`: rounding is a small part of the absolute sum.
    """
    examples, count, _ = tiles.shape
    found = tiles.new_empty((2, examples))
    if examples:
        rounding = 8 * torch.finfo(torch.float32).eps
        _finish[(triton.cdiv(examples, 32),)](tiles, found, examples, count, rounding, 32)
    return found


def _tiles(positions: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Side of a tile, numbers of the depth at a time, warps."""
    depth = 32 if dtype == torch.float32 else 64
    side = max(16, min(64, triton.next_power_of_2(positions)))
    return side, depth, 4
