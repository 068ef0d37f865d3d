"""Gaussian noise that stands up to an adversary who reads every bit of the output.

Two things go wrong with ordinary noise. A statistical generator can be inverted from its outputs;
so the bits here are a ChaCha20 stream. And `sum + noise` in floating point leaves gaps between the
values it can produce, and the gaps depend on the secret sum (Mironov 2012; Jin et al. 2022); so
here the sum is first rounded to a grid, and the noise is a whole number of grid steps.

Why that is the Gaussian mechanism: for t on the grid, t + round(x) = round(t + x). The output is a
rounding of the sum plus Gaussian noise, hence post-processing of what the ledger records. Rounding
the sum moves it by at most half a step in each of d coordinates, so two neighbours may differ by
max_norm + step * sqrt(d) instead of max_norm: the noise grows by that factor.

How exact it is: the normal deviates are float64, in pairs, off by up to 5e-16 of the pair's length:
3e-15 deviations far out, which moves the edge of a grid cell by 2^-27 of its width. The length has
76 bits, so that out to 9 deviations (beyond lies a chance of 2e-19) cells have their probability to
one per cent or far better; the largest deviate is 10.3. That is no exact discrete Gaussian (Canonne
et al. 2020). The sum itself was added up in floating point, with a relative error of about 1e-7 a
term, and timing is not constant.

On a GPU one kernel does all of it (`kernels.release`), from the same words of the stream and with
deviates in float64 too; so all of this is true there. Deviates of CPU and GPU differ by rounding,
which leads to another grid step about once in 10^9 numbers.
"""

import math

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.device_transfer import to_device
from sfumato.privacy.budget import Plan
from sfumato.privacy.kernels import has_noise_kernels
from sfumato.privacy.seal import Key, key_words

GRID_BITS = 20
"""A grid step is about 2^-20 deviations. Finer steps round less, but then float64 places their
edges less exactly; coarser ones ask for more noise (here 0.3 % more at 10^7 coordinates)."""

PIECE = 2**17
"""So many blocks of the stream are made at a time: some 8 MB, which a processor's cache holds."""


def to_secure_mean(total: Float[Tensor, " numbers"], plan: Plan, key: Key, dimension: int) -> None:
    """Round the sum to a grid, add rounded Gaussian noise from a ChaCha20 stream, and divide.

    Guarantee: up to the exactness stated above, the result is post-processing of the Gaussian
    mechanism with noise multiplier `plan.noise_multiplier`, for a sum of `dimension` coordinates in
    all its parts. Times `plan.expected_batch`, every value is a whole number of grid steps.
    """
    grid, deviation = grid_noise(plan, dimension)
    # How many grid steps a number is, the noise in grid steps, and what one is worth in the mean.
    numbers = (1 / grid, deviation / grid, grid / plan.expected_batch)
    if has_noise_kernels(total):
        _secure_on_gpu(total, key_words(key, total.device), numbers)
        return
    assert isinstance(key, bytes)
    per_grid, deviation, worth = numbers
    whole = normal_deviates(key, total.numel()).mul_(deviation).round_()
    whole += total.to("cpu", torch.float64).mul(per_grid).round_()
    total.copy_(whole.mul_(worth))


def _secure_on_gpu(total: Tensor, key: Tensor, numbers: tuple[float, ...]) -> None:
    from sfumato.privacy.kernels.release import release_flat

    settings = torch.tensor(numbers, dtype=torch.float64)
    release_flat(total, key, to_device(settings, total.device))


def grid_noise(plan: Plan, dimension: int) -> tuple[float, float]:
    """The grid step for sums of `dimension` coordinates, and the deviation of the noise on it.

    Guarantee: neighbours that differ by `plan.max_norm` differ by at most deviation over noise
    multiplier once both are rounded to the grid.
    """
    grid = 2.0 ** (math.floor(math.log2(plan.noise_deviation)) - GRID_BITS)
    return grid, plan.noise_multiplier * (plan.max_norm + grid * math.sqrt(dimension))


def normal_deviates(key: bytes, count: int) -> Float[Tensor, " numbers"]:
    """`count` normal deviates in float64, from the stream under `key`, 64 bits each.

    A block of the stream makes eight. Number i of them comes from block i modulo the number of
    blocks: on a GPU, neighbouring lanes make neighbouring blocks, and so write neighbours.
    """
    blocks = -(-count // 8)
    drawn = torch.empty(8, blocks, dtype=torch.float64)
    for first in range(0, blocks, PIECE):
        size = min(PIECE, blocks - first)
        stream = chacha20(key, 64 * size, first.to_bytes(16, "little"))
        words = torch.frombuffer(stream, dtype=torch.int64).view(-1, 2)
        drawn[:, first : first + size] = normal_pairs(words).view(size, 8).T
    return drawn.view(-1)[:count]


def normal_pairs(words: Int[Tensor, "pairs 2"]) -> Float[Tensor, "pairs 2"]:
    """Two independent normal deviates from each 128 bits (Box and Muller 1958).

    The radius is that of a uniform number of 76 bits: the first bit says whether it is x or 1 - x,
    so that near 0 and near 1 it is as exact as float64 can be. The angle has the other 52 bits.
    """
    coarse, other = words.unbind(dim=1)
    fine = ((other & 0xFFF).double() + 0.5) * 2.0**-12
    x = ((coarse & (2**63 - 1)).double() + fine) * 2.0**-64
    log = torch.where(coarse < 0, torch.log1p(-x), torch.log(x))
    angle = ((other >> 12).double() + 0.5) * (math.pi * 2.0**-51)
    radius = (-2 * log).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def chacha20(key: bytes, num_bytes: int, nonce: bytes = bytes(16)) -> bytearray:
    """The ChaCha20 key stream (RFC 8439); the nonce begins with the number of the first block.

    Every step has a key of its own, so the rest of the nonce may stay zero.
    """
    stream = bytearray(num_bytes)
    Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update_into(stream, stream)
    return stream
