"""A digest of many words where they lie, by additions and multiplications under a secret key.

Multilinear hashing (Wegman and Carter 1981; Lemire and Kaser 2014): the hash of words w_i under
random keys k_i of 64 bits is the sum of k_i w_i modulo 2^64. Sums of whole numbers are exact, so
the digest is the same in whatever order they are added.

Why two sums hardly ever have the same digest: say two columns of words differ, by d in some word.
Their hashes agree for the one value in 2^(64 - t) that k d can take, where 2^t is the largest power
of two in d. Words have 32 bits, so t is at most 31: a chance of at most 2^-33, for anyone who does
not know the keys. Three hashes with keys of their own agree with a chance of 2^-99. Hashes are
words again and are hashed again, with other keys, until few are left: each time adds 2^-99 to the
chance.

All numbers are read for that, so it is also seen here whether all of them are finite.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from collections.abc import Callable
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.device_transfer import to_device

ROWS, COLUMNS, HASHES = 256, 512, 3
FEW = 2**12
"""So many words are left at the most."""


def digest(flat: Tensor, draw: Callable[[int, int], bytes], broken: Tensor) -> Tensor:
    """At most 2^12 words (int32) that stand for the bits of a flat vector; they lie where it does.

    `draw(level, count)` are `count` secret bytes for a level. Whoever calls tells vectors of
    different lengths apart: a shorter one counts as filled up with zeros. `broken`, one word
    (int32), becomes 1 if one of the numbers is not finite.
    """
    words, level, width = flat.view(torch.int32), 0, flat.element_size()
    while level == 0 or words.numel() > FEW:
        drawn = bytearray(draw(level, 8 * ROWS * HASHES))
        keys = to_device(torch.frombuffer(drawn, dtype=torch.int64), flat.device)
        words = hash_columns(words, keys, broken, width).view(torch.int32)
        level, width = level + 1, 0
    return words


@torch.library.custom_op("sfumato::hash_columns", mutates_args=("broken",))
def hash_columns(words: Tensor, keys: Tensor, broken: Tensor, width: int) -> Tensor:
    """Three hashes (int64) of each column of 256 words (int32); columns of a tile lie abreast.

    `width` is 4 or 8 where the words are numbers of that many bytes: `broken` becomes 1 if one of
    them is not finite. Where they are hashes, it is 0.
    """
    tiles = triton.cdiv(words.numel(), ROWS * COLUMNS)
    found = keys.new_empty(tiles * HASHES * COLUMNS)
    if tiles:
        with torch.cuda.device_of(words):
            _hash_tile[(tiles,)](
                words, keys, found, broken, words.numel(), ROWS, COLUMNS, width, num_warps=4
            )
    return found


@hash_columns.register_fake
def _hash_columns_shapes(words, keys, broken, width):
    tiles = triton.cdiv(words.numel(), ROWS * COLUMNS)
    return keys.new_empty(tiles * HASHES * COLUMNS)


@triton.jit
@no_type_check
def _hash_tile(
    words, keys, out, broken, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):
    """The hashes of one tile's columns; of a tile that is not full, the rest counts as zeros."""
    tile = tl.program_id(0).to(tl.int64)
    out += 3 * tile * COLUMNS
    left = count - tile * ROWS * COLUMNS
    words += tile * ROWS * COLUMNS
    # What is full is read four words at a time, which a test of each would prevent.
    if left >= ROWS * COLUMNS:
        largest = _hash_rows(words, keys, out, left, True, ROWS, COLUMNS)
    else:
        largest = _hash_rows(words, keys, out, left, False, ROWS, COLUMNS)
    # Not finite is whatever has all bits of its exponent, which are in the last word of a number.
    if WIDTH == 4:
        tl.atomic_max(broken, (tl.max(largest, axis=0) >= 0x7F800000).to(tl.int32))
    if WIDTH == 8:
        largest = tl.where(tl.arange(0, COLUMNS) % 2 == 1, largest, 0)
        tl.atomic_max(broken, (tl.max(largest, axis=0) >= 0x7FF00000).to(tl.int32))


@triton.jit
@no_type_check
def _hash_rows(
    words, keys, out, left, full: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The same, where it is known. Rows are on their way in eights; each has its keys.

    Returns the largest word of each column, without its first bit, which is a number's sign.
    """
    column = tl.arange(0, COLUMNS)
    first = tl.zeros((COLUMNS,), dtype=tl.int64)
    second = tl.zeros((COLUMNS,), dtype=tl.int64)
    third = tl.zeros((COLUMNS,), dtype=tl.int64)
    largest = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in range(0, ROWS, 8):
        for row in tl.static_range(8):
            at = (start + row) * COLUMNS + column
            word = tl.load(words + at, mask=(at < left) | full, other=0)
            largest = tl.maximum(largest, word & 0x7FFFFFFF)
            word = word.to(tl.uint32, bitcast=True).to(tl.int64)
            key = keys + 3 * (start + row)
            first += word * tl.load(key)
            second += word * tl.load(key + 1)
            third += word * tl.load(key + 2)
    tl.store(out + column, first)
    tl.store(out + COLUMNS + column, second)
    tl.store(out + 2 * COLUMNS + column, third)
    return largest
