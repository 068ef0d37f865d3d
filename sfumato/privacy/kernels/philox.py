"""Research noise on a GPU: one kernel reads the sum and writes what is released in its place.

Philox 4x32-10 (Salmon et al. 2011) in counter mode: a block of four words is a function of the key
and the block's number alone. Two words make two normal deviates, in float32, off by a few units of
their last place. Logarithm, sine and cosine are the polynomials of Moshier's Cephes, without the
branches of a library that must take any angle.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.privacy.kernels import require_flat

WIDTH = tl.constexpr(128)
"""Numbers in a row that get one word each of several blocks; then come their next words."""


@torch.library.custom_op("sfumato::philox_flat", mutates_args=("total",))
def philox_flat(total: Tensor, key: Tensor, scale: float, deviation: float) -> None:
    """Multiply the flat sum (float32) by `scale`, and add noise of this deviation.

    The noise is a function of the first four words of the key (int32) and of a number's place. If
    the ninth is not zero, the sum is not finite, and nothing of it is shown: all becomes NaN.
    """
    require_flat(total)
    # Parts of a program share what is made of the key alone; the interpreter likes few.
    lanes, parts = (128, 4) if total.is_cuda else (8192, 1)
    programs = triton.cdiv(total.numel(), 4 * lanes * parts)
    if programs:
        with torch.cuda.device_of(total):
            _philox[(programs,)](
                total, key, total.numel(), scale, deviation, lanes, parts, num_warps=4
            )


@philox_flat.register_fake
def _philox_flat_shapes(total, key, scale, deviation):
    return None


@triton.jit
@no_type_check
def _philox(total, key, count, scale, deviation, LANES: tl.constexpr, PARTS: tl.constexpr):
    """The numbers of one program."""
    low, high = _half(key), _half(key + 2)
    scale = tl.where(tl.load(key + 8) == 0, scale, float("nan"))
    lane = tl.arange(0, LANES)
    first = lane // WIDTH * (4 * WIDTH) + lane % WIDTH
    second, third, fourth = first + WIDTH, first + 2 * WIDTH, first + 3 * WIDTH
    for part in tl.static_range(PARTS):
        stretch = tl.program_id(0).to(tl.int64) * PARTS + part
        start = stretch * 4 * LANES
        left = tl.minimum(count - start, 4 * LANES).to(tl.int32)
        # All are read before any is written, so that nothing waits while words are made.
        w = tl.load(total + start + first, mask=first < left)
        x = tl.load(total + start + second, mask=second < left)
        y = tl.load(total + start + third, mask=third < left)
        z = tl.load(total + start + fourth, mask=fourth < left)
        a, b, c, d = philox_block(low, high, stretch * LANES + lane)
        one, other = normal_pair(a, b, deviation)
        tl.store(total + start + first, w * scale + one, mask=first < left)
        tl.store(total + start + second, x * scale + other, mask=second < left)
        one, other = normal_pair(c, d, deviation)
        tl.store(total + start + third, y * scale + one, mask=third < left)
        tl.store(total + start + fourth, z * scale + other, mask=fourth < left)


@triton.jit
@no_type_check
def _half(words):
    """Two words as one of 64 bits, the low one first."""
    low, high = tl.load(words).to(tl.uint32, bitcast=True), tl.load(words + 1)
    return high.to(tl.int64) << 32 | low.to(tl.int64)


@triton.jit
@no_type_check
def philox_block(low, high, block):
    """The four words of each block, by its number (int64).

    `low` is Philox's key. It has but 64 bits, and the number needs only half of the counter: `high`
    is the other half. Under one key other counters make other blocks, so all 128 bits count.
    """
    zero = tl.zeros_like(block).to(tl.uint32)
    low, high = tl.cast(low, tl.int64), tl.cast(high, tl.int64)
    k0, k1 = low.to(tl.uint32), (low >> 32).to(tl.uint32)
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = zero + high.to(tl.uint32), zero + (high >> 32).to(tl.uint32)
    # As `tl.philox` does; but one wide product is one instruction, where its halves are two.
    for _ in tl.static_range(10):
        p, q = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (q >> 32).to(tl.uint32) ^ c1 ^ k0, (p >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = q.to(tl.uint32), p.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
@no_type_check
def normal_pair(a, b, deviation):
    """Two independent normal numbers in float32 from two words (Box and Muller 1958).

    The length is that of a uniform number of 32 bits, between 2^-33 and 1 - 2^-33: it reaches 6.76
    deviations, and is never zero. The angle is at most an eighth of a turn from an axis, which two
    bits choose, so that small deviates have all their digits.
    """
    radius = deviation * 1.4142135623730951 * tl.sqrt(_minus_log(a))
    # 30 bits with their sign; a quarter of pi is 2^31.
    angle = (b << 2).to(tl.int32, bitcast=True).to(tl.float32)
    angle = angle * 3.657295198167899e-10 + 7.314590396335798e-10
    z = angle * angle
    sine = (-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1
    sine = radius * (angle + angle * z * sine)
    cosine = (2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2
    cosine = radius * ((cosine * z - 0.5) * z + 1.0)
    cosine = tl.where((b >> 31) != 0, -cosine, cosine)
    swap = (b & 0x40000000) != 0
    return tl.where(swap, sine, cosine), tl.where(swap, cosine, sine)


@triton.jit
@no_type_check
def _minus_log(a):
    """Minus the logarithm of a uniform number: x or 1 - x, where x is at most a half."""
    x = (a & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * 2.0**-32 + 2.0**-33
    bits = tl.where((a >> 31) != 0, 1.0 - x, x).to(tl.int32, bitcast=True)
    # The number is 2^power times something between the roots of a half and of two.
    power = (bits - 0x3F3504F3) >> 23
    f = (bits - (power << 23)).to(tl.float32, bitcast=True) - 1.0
    f = tl.where(power == 0, -x, f)  # of 1 - x near 1, x keeps the digits
    r = (7.0376836292e-2 * f - 1.1514610310e-1) * f + 1.1676998740e-1
    r = (r * f - 1.2420140846e-1) * f + 1.4249322787e-1
    r = (r * f - 1.6668057665e-1) * f + 2.0000714765e-1
    r = (r * f - 2.4999993993e-1) * f + 3.3333331174e-1
    return ((0.5 - r * f) * f - 1.0) * f - 0.6931471805599453 * power.to(tl.float32)
