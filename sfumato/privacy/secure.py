"""Gaussian noise that stands up to an adversary who reads every bit of the output.

Two things go wrong with ordinary noise. A statistical generator can be inverted from its outputs;
so the bits here are a ChaCha20 stream. And `sum + noise` in floating point leaves gaps between the
values it can produce, and the gaps depend on the secret sum (Mironov 2012; Jin et al. 2022); so
here the sum is first rounded to a grid, and the noise is a whole number of grid steps.

Why that is the Gaussian mechanism: for t on the grid, t + round(x) = round(t + x). The output is a
rounding of the sum plus Gaussian noise, hence post-processing of what the ledger records. Rounding
the sum moves it by at most half a step in each of d coordinates, so two neighbours may differ by
max_norm + step * sqrt(d) instead of max_norm: the noise grows by that factor.

How exact it is: the normal deviates are float64, off by up to 3e-15 deviations, which moves the
edge of a grid cell by 2^-28 of its width; tails are true beyond 12 deviations. That is no exact
discrete Gaussian (Canonne et al. 2020). The sum itself was added up in floating point, with a
relative error of about 1e-7 a term, and timing is not constant.
"""

import math

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.privacy.budget import Plan

GRID_BITS = 20
"""A grid step is about 2^-20 deviations. Finer steps round less, but then float64 places their
edges less exactly; coarser ones ask for more noise (here 0.3 % more at 10^7 coordinates)."""


def add_secure_noise(total: Tensor, plan: Plan, key: bytes, dimension: int) -> Tensor:
    """Round the sum to a grid and add rounded Gaussian noise from a ChaCha20 stream under `key`.

    Guarantee: up to the exactness stated above, the result is post-processing of the Gaussian
    mechanism with noise multiplier `plan.noise_multiplier`, for a sum of `dimension` coordinates in
    all its tensors. Every value is a whole number of grid steps. Noise is made on the CPU.
    """
    grid, deviation = grid_noise(plan, dimension)
    whole = (total.to("cpu", torch.float64) / grid).round()
    whole += gaussian_words(key, total.numel(), deviation / grid).round().view(total.shape)
    return (whole * grid).to(total.device, total.dtype)


def grid_noise(plan: Plan, dimension: int) -> tuple[float, float]:
    """The grid step for sums of `dimension` coordinates, and the deviation of the noise on it.

    Guarantee: neighbours that differ by `plan.max_norm` differ by at most deviation over noise
    multiplier once both are rounded to the grid.
    """
    grid = 2.0 ** (math.floor(math.log2(plan.noise_deviation)) - GRID_BITS)
    return grid, plan.noise_multiplier * (plan.max_norm + grid * math.sqrt(dimension))


def gaussian_words(key: bytes, count: int, deviation: float) -> Tensor:
    """`count` normal deviates in float64, one from each 128 bits of the stream under `key`.

    The first bit is the sign; the others are a uniform number, mapped through the inverse normal
    distribution. Half of the bits only matter where the number is small: there they keep it as
    exact as float64 can be, so that the tails have no gaps.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.float64)
    words = torch.frombuffer(chacha20(key, 16 * count), dtype=torch.int64).view(count, 2)
    coarse, fine = words.unbind(dim=1)
    uniform = (coarse & (2**63 - 1)).double() + _unit_interval(fine)
    normal = torch.special.ndtri(uniform * 2.0**-64)
    return torch.where(coarse < 0, -normal, normal) * deviation


def _unit_interval(words: Tensor) -> Tensor:
    """64 bits as a number above 0 and at most 1."""
    return ((words >> 11) & (2**53 - 1)).double() * 2.0**-53 + 2.0**-54


def chacha20(key: bytes, num_bytes: int, nonce: bytes = bytes(16)) -> bytearray:
    """The ChaCha20 key stream (RFC 8439): the first four bytes of the nonce are the counter.

    Every tensor of every step has a key of its own, so the nonce may stay zero.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError as missing:
        raise ConfigError(
            'secure noise needs the package "cryptography". Install it, or take noise="philox".'
        ) from missing
    stream = bytearray(num_bytes)
    Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update_into(stream, stream)
    return stream
