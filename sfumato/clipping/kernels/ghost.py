"""Ghost norms: the squared norm of b'a from a (T x D) and b (T x P), with no matrix ever written.

The norm is the sum over pairs of positions of (a a') * (b b'). One program takes a few tiles of
such pairs that lie beside each other: it adds up those of a a' over D and those of b b' over P, all
in float32, multiplies them entry by entry and keeps three numbers: the sum, the sum of absolute
values, and the sum over positions of |a| |b|, by which rounding is bounded. Both matrices are
symmetric, so tiles above the diagonal count twice and those below are left out. Where the last few
positions would fill a fraction of a tile (197 = 3 x 64 + 5), they get narrow tiles of their own.

What it waits for are rows from the cache, not products: with tiles of 64 x 64 alone each is read
4.5 times at 197 positions. Tiles beside each other share their rows; that makes it 2. Legend as in
`layer_algebra`.
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
def above_zero(x):
    """At least zero; what is no number stays none, or an example with it would seem short."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
@no_type_check
def _read(rows, positions, depth, step, t, k, on_gpu: tl.constexpr):
    """The numbers k of the positions t."""
    inside = (t < positions)[:, None] & (k < depth)[None, :]
    found = tl.load(rows + t[:, None] * step + k[None, :], mask=inside, other=0.0)
    if not on_gpu:  # Triton's interpreter cannot multiply bfloat16
        found = found.to(tl.float32)
    return found


@triton.jit
@no_type_check
def _gram_tiles(
    rows, positions, depth, step, t, s, last,
    columns: tl.constexpr, narrow: tl.constexpr, diagonal: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, N: tl.constexpr, precision: tl.constexpr,
    on_gpu: tl.constexpr,
):  # fmt: skip
    """The products of positions t with those of up to three tiles from s on, and with the last."""
    first = tl.zeros((R, R), dtype=tl.float32)
    second, third, rest = first, first, tl.zeros((R, N), dtype=tl.float32)
    for start in range(0, depth, K):
        k = start + tl.arange(0, K)
        one = _read(rows, positions, depth, step, t, k, on_gpu)
        other = one
        if not diagonal:
            other = _read(rows, positions, depth, step, s, k, on_gpu)
        first = tl.dot(one, tl.trans(other), first, input_precision=precision)
        if columns > 1:
            other = _read(rows, positions, depth, step, s + R, k, on_gpu)
            second = tl.dot(one, tl.trans(other), second, input_precision=precision)
        if columns > 2:
            other = _read(rows, positions, depth, step, s + 2 * R, k, on_gpu)
            third = tl.dot(one, tl.trans(other), third, input_precision=precision)
        if narrow:
            other = _read(rows, positions, depth, step, last, k, on_gpu)
            rest = tl.dot(one, tl.trans(other), rest, input_precision=precision)
    return first, second, third, rest


@triton.jit
@no_type_check
def _add(a, b, weight, signed, absolute):
    """The sum of the products of two tiles, and that of their absolute values, added."""
    products = weight * a * b
    signed += tl.sum(tl.sum(products, axis=1), axis=0)
    return signed, absolute + tl.sum(tl.sum(tl.abs(products), axis=1), axis=0)


@triton.jit
@no_type_check
def _stretch(
    x, g, at, positions, depth_x, depth_g, x_step, g_step, t, s, last,
    columns: tl.constexpr, narrow: tl.constexpr, diagonal: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, N: tl.constexpr, precision: tl.constexpr,
    on_gpu: tl.constexpr,
):  # fmt: skip
    """The three numbers of tiles beside each other, and of the narrow one behind them."""
    a0, a1, a2, a3 = _gram_tiles(
        x, positions, depth_x, x_step, t, s, last, columns, narrow, diagonal, R, K, N, precision,
        on_gpu,
    )  # fmt: skip
    b0, b1, b2, b3 = _gram_tiles(
        g, positions, depth_g, g_step, t, s, last, columns, narrow, diagonal, R, K, N, precision,
        on_gpu,
    )  # fmt: skip
    signed, absolute = _add(a0, b0, 1.0 if diagonal else 2.0, 0.0, 0.0)
    if columns > 1:
        signed, absolute = _add(a1, b1, 2.0, signed, absolute)
    if columns > 2:
        signed, absolute = _add(a2, b2, 2.0, signed, absolute)
    if narrow:
        signed, absolute = _add(a3, b3, 2.0, signed, absolute)
    tl.store(at, signed)
    tl.store(at + 1, absolute)
    if diagonal:
        own = tl.where(t[:, None] == s[None, :], tl.sqrt(above_zero(a0 * b0)), 0.0)
        tl.store(at + 2, tl.sum(tl.sum(own, axis=1), axis=0))
    else:
        tl.store(at + 2, 0.0)


@triton.jit
@no_type_check
def _pairs(
    x, g, out, positions, depth_x, depth_g, x_example, x_step, g_example, g_step, begin, whole,
    stretches, count, place, C: tl.constexpr, narrow: tl.constexpr, diagonal: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, N: tl.constexpr, precision: tl.constexpr,
    on_gpu: tl.constexpr,
):  # fmt: skip
    """Up to C tiles of one example; the program's place is (line and stretch of it, example).

    A line of tiles begins on the diagonal. The first stretches of all lines are one launch, the
    others another; some of these are beyond the end of their lines.
    """
    pid, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    line = pid // stretches
    column = line
    if not diagonal:
        column += C * (pid % stretches + 1)
    t, s = begin + line * R + tl.arange(0, R), begin + column * R + tl.arange(0, R)
    last = begin + whole * R + tl.arange(0, N)
    x += example * x_example
    g += example * g_example
    at, left = out + (example * count + place + pid) * 3, whole - column
    # Narrow tiles stand at the ends of lines, so what has more than C tiles to go has none.
    if left > C:
        _stretch(
            x, g, at, positions, depth_x, depth_g, x_step, g_step, t, s, last, C, False,
            diagonal, R, K, N, precision, on_gpu,
        )  # fmt: skip
    elif left == 3 and C >= 3:
        _stretch(
            x, g, at, positions, depth_x, depth_g, x_step, g_step, t, s, last, 3, narrow, diagonal,
            R, K, N, precision, on_gpu,
        )  # fmt: skip
    elif left == 2 and C >= 2:
        _stretch(
            x, g, at, positions, depth_x, depth_g, x_step, g_step, t, s, last, 2, narrow, diagonal,
            R, K, N, precision, on_gpu,
        )  # fmt: skip
    elif left == 1:
        _stretch(
            x, g, at, positions, depth_x, depth_g, x_step, g_step, t, s, last, 1, narrow, diagonal,
            R, K, N, precision, on_gpu,
        )  # fmt: skip
    else:
        tl.store(at + tl.arange(0, 4), 0.0, mask=tl.arange(0, 4) < 3)


@torch.library.custom_op("sfumato::ghost_norm", mutates_args=())
def ghost_norm_kernel(x: Tensor, g: Tensor) -> Tensor:
    """For x (n T D) and g (n T P), in float32: squared norms, and sums of |a| |b| (2 n)."""
    x, g = (_within_reach(t) for t in (x, g.to(x.dtype)))
    examples, positions = x.shape[:2]
    side = max(NARROW, min(64, triton.next_power_of_2(positions)))
    whole, rest = divmod(positions, side)
    narrow = 0 < rest <= NARROW < side and whole > 0
    whole += bool(rest) and not narrow
    most, stages = _pace(whole, x.device)
    more = triton.cdiv(whole, most) - 1  # stretches of the longest line, less the first
    counts = (whole, whole * more, int(narrow))
    found = x.new_empty((examples, sum(counts), 3), dtype=torch.float32)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    depth = 32 if x.dtype == torch.float32 else 64

    def launch(kind: int, begin: int, lines: int, stretches: int, side: int, narrow: bool) -> None:
        columns = min(most, lines)
        _pairs[(lines * stretches, examples)](
            x, g, found, positions, x.shape[2], g.shape[2], x.stride(0), x.stride(1), g.stride(0),
            g.stride(1), begin, lines, stretches, sum(counts), sum(counts[:kind]), columns, narrow,
            kind != 1, side, depth, NARROW, precision, x.is_cuda,
            num_warps=4, num_stages=stages,
        )  # fmt: skip

    launch(0, 0, whole, 1, side, narrow)
    if more:
        launch(1, 0, whole, more, side, narrow)
    if narrow:
        launch(2, whole * side, 1, 1, NARROW, False)
    return finished(found)


def _within_reach(rows: Tensor) -> Tensor:
    """As the kernel reads them: numbers side by side, places of an example that 32 bits can tell.

    (Models that have positions first and examples second hand over rows that lie far apart.)
    """
    near = rows.stride(-1) == 1 and rows.shape[1] * rows.stride(1) < 2**31
    return rows if near else rows.contiguous()


def _pace(whole: int, device: torch.device) -> tuple[int, int]:
    """Tiles in a row, and steps along the depth that are on their way at once.

    What was quickest of many on an H200, for 197, 256 and 577 positions. All that is on its way
    lies in shared memory, of which smaller cards have 100 KB and less.
    """
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if room < 160 * 1024:
            return 2, 3
    return (3, 5) if whole <= 3 else (2, 4)


@ghost_norm_kernel.register_fake
def _ghost_norm_kernel_shapes(x, g):
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
    tl.store(out + example, above_zero(signed) + rounding * absolute, mask=inside)
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
def _scaled_shapes(rows, factors):
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def finished(tiles: Float[Tensor, "n tiles 3"]) -> Float[Tensor, "2 n"]:
    """Squared norms and sums of lengths from those of tiles, in one launch.

    As in `arithmetic.sum_from_above`: rounding is a small part of the absolute sum.
    """
    examples, count, _ = tiles.shape
    found = tiles.new_empty((2, examples))
    if examples:
        rounding = 8 * torch.finfo(torch.float32).eps
        _finish[(triton.cdiv(examples, 32),)](tiles, found, examples, count, rounding, 32)
    return found
