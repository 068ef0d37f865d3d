"""Tag and noise keys of sums, made where the sums lie: nothing waits for the host.

Three hashes of the digest's words, 32 bits each, are the nonce of ChaCha20 under a key of the step:
without the key nobody can tell its blocks from chance, and other sums have other blocks.

Why other sums have another nonce: multilinear hashing with an addend, of which the upper half is
kept, is strongly universal (Lemire and Kaser 2014): two lists of words have the same three hashes
with a chance of 2^-96. Its keys are a ChaCha20 stream too, a block a word, under another key.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.privacy.kernels.chacha import chacha_block

ROWS = tl.constexpr(16)
"""Rows that there can be: one for the tag, one for each flat vector."""


@torch.library.custom_op("sfumato::seal_words", mutates_args=())
def seal_words(words: Tensor, key: Tensor, broken: Tensor, rows: int) -> Tensor:
    """So many rows of nine words (int32): eight of secret chance that is the words' own, `broken`.

    `key` has sixteen words (int32) that are used for nothing else: eight to hash the words by, and
    eight to make rows of the hashes.
    """
    if rows > ROWS.value:
        raise ValueError(f"{rows} rows were asked for, and there are {ROWS.value} at the most.")
    found = words.new_empty(rows, 9)
    # The interpreter, where kernels are tested, likes few parts.
    part = 1024 if words.is_cuda else 4096
    with torch.cuda.device_of(words):
        _seal[(1,)](words, key, broken, found, words.numel(), rows, part, num_warps=16)
    return found


@seal_words.register_fake
def _seal_words_shapes(words, key, broken, rows):
    return words.new_empty(rows, 9)


@triton.jit
@no_type_check
def _seal(words, key, broken, out, count, rows, PART: tl.constexpr):
    """One program does it all: there are few words."""
    lane = tl.arange(0, PART)
    first = tl.zeros((PART,), dtype=tl.int64)
    second = tl.zeros((PART,), dtype=tl.int64)
    third = tl.zeros((PART,), dtype=tl.int64)
    for start in range(0, count + 1, PART):
        at = start + lane
        word = tl.load(words + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
        # The addend is what a last word of 1 brings.
        word = tl.where(at == count, 1, word.to(tl.int64))
        k = chacha_block(key, at.to(tl.int64))
        first += word * _wide(k[0], k[1])
        second += word * _wide(k[2], k[3])
        third += word * _wide(k[4], k[5])
    row = tl.arange(0, ROWS)
    block = (_upper(first).to(tl.int64) << 32) + row
    found = chacha_block(key + 8, block, _upper(second), _upper(third))
    for column in tl.static_range(8):
        value = found[column].to(tl.int32, bitcast=True)
        tl.store(out + 9 * row + column, value, mask=row < rows)
    tl.store(out + 9 * row + 8, tl.zeros((ROWS,), dtype=tl.int32) + tl.load(broken), row < rows)


@triton.jit
@no_type_check
def _wide(low, high):
    return high.to(tl.int64) << 32 | low.to(tl.int64)


@triton.jit
@no_type_check
def _upper(products):
    """The upper half of their sum."""
    return (tl.sum(products, axis=0) >> 32).to(tl.uint32)
