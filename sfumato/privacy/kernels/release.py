"""Secure noise on a GPU: one kernel reads the sum and writes what is released in its place.

Every lane makes one block of the key stream, turns it into eight normal deviates, and releases the
eight numbers that belong to them: round to the grid, add whole steps of noise, divide. It reads
the sum once and writes the result once. Words, deviates and their places are those of `secure`,
which is the oracle; deviates agree to rounding in float64. The polynomials for logarithm, sine and
cosine are those of Sun's fdlibm, good to the last bit or two.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.privacy.kernels import require_flat
from sfumato.privacy.kernels.chacha import chacha_block


@torch.library.custom_op("sfumato::release_flat", mutates_args=("total",))
def release_flat(total: Tensor, key: Tensor, numbers: Tensor) -> None:
    """Round the flat sum to the grid, add noise, divide.

    `key` has eight words (int32), and a ninth: if that is not zero, the sum is not finite, and
    nothing of it is shown: all becomes NaN. `numbers`, in float64, are what the sum is multiplied
    by to count grid steps, the deviation of the noise in grid steps, and what a step is worth in
    the result.
    """
    require_flat(total)
    blocks = triton.cdiv(total.numel(), 8)
    if blocks:
        # The interpreter, where kernels are tested, likes few programs.
        lanes = 128 if total.is_cuda else 8192
        with torch.cuda.device_of(total):
            _release[(triton.cdiv(blocks, lanes),)](
                total, key, numbers, total.numel(), blocks, lanes, num_warps=4
            )


@release_flat.register_fake
def _release_flat_shapes(total, key, numbers):
    return None


@triton.jit
@no_type_check
def _release(total, key, numbers, count, blocks, LANES: tl.constexpr):
    """The numbers of one stretch of blocks."""
    blocks, first = tl.cast(blocks, tl.int64), tl.program_id(0).to(tl.int64) * LANES
    lane = tl.arange(0, LANES)
    total += first
    # Lanes beyond the last block would write where another block's numbers are.
    end = tl.where(lane < blocks - first, count - first, 0)
    # All are read before any is written, so that nothing waits while words are made.
    t0, t1 = _read_pair(total, lane, 0, blocks, end)
    t2, t3 = _read_pair(total, lane, 2, blocks, end)
    t4, t5 = _read_pair(total, lane, 4, blocks, end)
    t6, t7 = _read_pair(total, lane, 6, blocks, end)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = chacha_block(
        key, first + lane
    )
    worth = tl.where(tl.load(key + 8) == 0, tl.load(numbers + 2), float("nan"))
    numbers = (tl.load(numbers), tl.load(numbers + 1), worth)
    # All pairs take a step before any takes the next: so they share the constants.
    m0, m1 = _mantissa(w0, w1, w2), _mantissa(w4, w5, w6)
    m2, m3 = _mantissa(w8, w9, w10), _mantissa(w12, w13, w14)
    q0, q1, q2, q3 = _square(m0), _square(m1), _square(m2), _square(m3)
    q0, q1, q2, q3 = tl.sqrt(q0), tl.sqrt(q1), tl.sqrt(q2), tl.sqrt(q3)
    r0, r1 = _release_pair(t0, t1, numbers, q0, w2, w3)
    r2, r3 = _release_pair(t2, t3, numbers, q1, w6, w7)
    r4, r5 = _release_pair(t4, t5, numbers, q2, w10, w11)
    r6, r7 = _release_pair(t6, t7, numbers, q3, w14, w15)
    released = (r0, r1, r2, r3, r4, r5, r6, r7)
    for number in tl.static_range(8):
        at = number * blocks
        tl.store(total + at + lane, released[number], mask=lane < end - at)


@triton.jit
@no_type_check
def _read_pair(total, lane, number: tl.constexpr, blocks, end):
    """The sums of this number of every block, and of the next."""
    at, then = number * blocks, (number + 1) * blocks
    one = tl.load(total + at + lane, mask=lane < end - at, other=0.0)
    return one, tl.load(total + then + lane, mask=lane < end - then, other=0.0)


@triton.jit
@no_type_check
def _release_pair(this, that, numbers, radius, c, d):
    """The two numbers that four words of a block belong to."""
    one, other = _normal_pair(radius, c, d)
    return _release_one(this, numbers, one), _release_one(that, numbers, other)


@triton.jit
@no_type_check
def _release_one(total, numbers, normal):
    per_grid, deviation, worth = numbers
    # Halves of noise, once in 2^32 numbers, go up.
    whole = _nearest(total.to(tl.float64) * per_grid) + tl.floor(normal * deviation + 0.5)
    return (whole * worth).to(total.dtype)


@triton.jit
@no_type_check
def _nearest(x):
    """The nearest whole number, halves to even; beyond 2^52 float64 has no others."""
    sign = x.to(tl.int64, bitcast=True) & (-1 << 63)
    large = (sign | 0x4330000000000000).to(tl.float64, bitcast=True)  # 2^52 with the sign of x
    return tl.where(tl.abs(x) < 4503599627370496.0, (x + large) - large, x)


@triton.jit
@no_type_check
def _normal_pair(radius, c, d):
    """Two independent normal deviates in float64 (Box and Muller 1958), by length and angle."""
    place = (d.to(tl.int64) << 32 | c.to(tl.int64)) >> 12
    quarter = (place + (1 << 49)) >> 50
    # At most an eighth of a turn from the nearest quarter: exact, as a whole number is.
    angle = ((place - (quarter << 50)).to(tl.float64) + 0.5) * (1.5707963267948966 * 2.0**-50)
    z = angle * angle
    sine = 1.58969099521155010221e-10 * z - 2.50507602534068634195e-8
    sine = (sine * z + 2.75573137070700676789e-6) * z - 1.98412698298579493134e-4
    sine = (sine * z + 8.33333333332248946124e-3) * z - 1.66666666666666324348e-1
    sine = angle + angle * z * sine
    cosine = -1.13596475577881948265e-11 * z + 2.08757232129817482790e-9
    cosine = (cosine * z - 2.75573143513906633035e-7) * z + 2.48015872894767294178e-5
    cosine = (cosine * z - 1.38888888888741095749e-3) * z + 4.16666666666666019037e-2
    cosine = 1.0 - (0.5 * z - z * z * cosine)
    odd = (quarter & 1) != 0
    first, second = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    first = tl.where(((quarter + 1) & 2) != 0, -first, first)
    second = tl.where((quarter & 2) != 0, -second, second)
    return radius * first, radius * second


@triton.jit
@no_type_check
def _mantissa(a, b, c):
    """A uniform number, x or 1 - x where x has 75 bits and is at most a half, for its logarithm.

    It is (1 + f) 2^power; these two, and f / (2 + f).
    """
    x = ((b & 0x7FFFFFFF).to(tl.int64) << 32 | a.to(tl.int64)).to(tl.float64)
    x = (x + ((c & 0xFFF).to(tl.float64) + 0.5) * 2.0**-12) * 2.0**-64
    bits = tl.where((b >> 31) != 0, 1.0 - x, x).to(tl.int64, bitcast=True)
    # So that 1 + f is between the roots of a half and of two.
    power = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = (bits - (power << 52)).to(tl.float64, bitcast=True) - 1.0
    f = tl.where(power == 0, -x, f)  # of 1 - x near 1, x keeps the digits
    return power.to(tl.float64), f, f / (2.0 + f)


@triton.jit
@no_type_check
def _square(mantissa):
    """The squared length of a pair, minus two logarithms of its uniform number."""
    power, f, s = mantissa
    z = s * s
    r = 1.479819860511658591e-1 * z + 1.531383769920937332e-1
    r = (r * z + 1.818357216161805012e-1) * z + 2.222219843214978396e-1
    r = (r * z + 2.857142874366239149e-1) * z + 3.999999999940941908e-1
    r = (r * z + 6.666666666666735130e-1) * z
    half = 0.5 * f * f
    log = power * 0.6931471805599453 + (f - (half - s * (half + r)))
    return -2.0 * log
