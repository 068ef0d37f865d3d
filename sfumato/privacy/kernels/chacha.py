"""The ChaCha20 block function (RFC 8439), for kernels that make their own key stream.

Counter mode: a block of sixteen words is a function of the key and the block's number alone, so
every lane of a program makes the block it needs, and nothing is stored.

(Kernels are kept from the tests' type checks, which would wrap them: Triton's interpreter must find
them, and what they call, as they are.)
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def chacha_block(key, block, third=0, fourth=0):
    """The sixteen words of each block, by its number (int64); `key` points at eight words.

    The number fills two words of the state, so past 2^32 blocks the stream goes on and does not
    start again. The rest of the nonce, two words, is zero for a stream, whose key is used once.
    """
    zero = tl.zeros_like(block).to(tl.uint32)
    x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x4, x5, x6, x7 = _keyed(key, 0, zero)
    x8, x9, x10, x11 = _keyed(key, 4, zero)
    x12, x13 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    x14, x15 = zero + third, zero + fourth
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    k4, k5, k6, k7 = _keyed(key, 0, zero)
    k8, k9, k10, k11 = _keyed(key, 4, zero)
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    return (
        x0 + 0x61707865,
        x1 + 0x3320646E,
        x2 + 0x79622D32,
        x3 + 0x6B206574,
        x4 + k4,
        x5 + k5,
        x6 + k6,
        x7 + k7,
        x8 + k8,
        x9 + k9,
        x10 + k10,
        x11 + k11,
        x12 + low,
        x13 + high,
        x14 + third,
        x15 + fourth,
    )


@triton.jit
@no_type_check
def _keyed(key, first: tl.constexpr, zero):
    """Four words of the key, the same in every lane."""
    a = zero + tl.load(key + first).to(tl.uint32, bitcast=True)
    b = zero + tl.load(key + first + 1).to(tl.uint32, bitcast=True)
    c = zero + tl.load(key + first + 2).to(tl.uint32, bitcast=True)
    d = zero + tl.load(key + first + 3).to(tl.uint32, bitcast=True)
    return a, b, c, d


@triton.jit
@no_type_check
def _quarter(a, b, c, d):
    """A quarter round."""
    a += b
    d = _rotate(d ^ a, 16)
    c += d
    b = _rotate(b ^ c, 12)
    a += b
    d = _rotate(d ^ a, 8)
    c += d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
@no_type_check
def _rotate(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))
