"""A digest of many words where they lie, by additions and multiplications under a secret key.

Multilinear hashing (Wegman and Carter 1981; Lemire and Kaser 2014): the hash of words w_i under
random keys k_i of 64 bits is the sum of k_i w_i modulo 2^64. Sums of whole numbers are exact, so
the digest is the same in whatever order they are added.

Why two sums hardly ever have the same digest: say two columns of words differ, by d in some word.
Their hashes agree for the one value in 2^(64 - t) that k d can take, where 2^t is the largest power
of two in d. Words have 32 bits, so t is at most 31: a chance of at most 2^-33, for whoever does not
know the keys. Three hashes with keys of their own agree with a chance of 2^-99. Hashes are words
again and are hashed again, with other keys, until few are left: each time adds 2^-99 to the chance.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from collections.abc import Callable
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.privacy.kernels import to_device

ROWS, COLUMNS, HASHES = 256, 512, 3
FEW = 2**12
"""So many words are quickly copied from a GPU and hashed there."""


def digest(flat: Tensor, draw: Callable[[int, int], bytes]) -> bytes:
    """At most 2^12 words that stand for the bits of a flat vector, as bytes on the CPU.

    `draw(level, count)` are `count` secret bytes for a level. Whoever calls tells vectors of
    different lengths apart: a shorter one counts as filled up with zeros.
    """
    words, level = flat.view(torch.int32), 0
    while words.numel() > FEW:
        keys = torch.frombuffer(bytearray(draw(level, 8 * ROWS * HASHES)), dtype=torch.int64)
        words, level = (
            hash_columns(words, to_device(keys, flat.device)).view(torch.int32),
            level + 1,
        )
    return words.cpu().numpy().tobytes()


@torch.library.custom_op("sfumato::hash_columns", mutates_args=())
def hash_columns(words: Tensor, keys: Tensor) -> Tensor:
    """Three hashes (int64) of each column of 256 words (int32); columns of a tile lie abreast."""
    tiles = triton.cdiv(words.numel(), ROWS * COLUMNS)
    found = keys.new_empty(tiles * HASHES * COLUMNS)
    with torch.cuda.device_of(words):
        _hash_tile[(tiles,)](words, keys, found, words.numel(), ROWS, COLUMNS, num_warps=4)
    return found


@hash_columns.register_fake
def _(words, keys):  # pyright: ignore
    tiles = triton.cdiv(words.numel(), ROWS * COLUMNS)
    return keys.new_empty(tiles * HASHES * COLUMNS)


@triton.jit
@no_type_check
def _hash_tile(words, keys, out, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The hashes of one tile's columns; of a tile that is not full, the rest counts as zeros."""
    tile = tl.program_id(0).to(tl.int64)
    out += 3 * tile * COLUMNS
    left = count - tile * ROWS * COLUMNS
    words += tile * ROWS * COLUMNS
    # What is full is read four words at a time, which a test of each would prevent.
    if left >= ROWS * COLUMNS:
        _hash_rows(words, keys, out, left, True, ROWS, COLUMNS)
    else:
        _hash_rows(words, keys, out, left, False, ROWS, COLUMNS)


@triton.jit
@no_type_check
def _hash_rows(
    words, keys, out, left, full: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The same, where it is known. Rows are on their way in eights; each has its keys."""
    column = tl.arange(0, COLUMNS)
    first = tl.zeros((COLUMNS,), dtype=tl.int64)
    second = tl.zeros((COLUMNS,), dtype=tl.int64)
    third = tl.zeros((COLUMNS,), dtype=tl.int64)
    for start in range(0, ROWS, 8):
        for row in tl.static_range(8):
            at = (start + row) * COLUMNS + column
            word = tl.load(words + at, mask=(at < left) | full, other=0)
            word = word.to(tl.uint32, bitcast=True).to(tl.int64)
            key = keys + 3 * (start + row)
            first += word * tl.load(key)
            second += word * tl.load(key + 1)
            third += word * tl.load(key + 2)
    tl.store(out + column, first)
    tl.store(out + COLUMNS + column, second)
    tl.store(out + 2 * COLUMNS + column, third)
