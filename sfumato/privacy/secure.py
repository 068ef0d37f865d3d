"""Gaussian noise that stands up to an adversary who reads every bit of the output.

Two things go wrong with ordinary noise. A statistical generator can be inverted from its outputs;
so the bits here are a ChaCha20 stream. And `sum + noise` in floating point leaves gaps between the
values it can produce, and the gaps depend on the secret sum (Mironov 2012; Jin et al. 2022); so
here the sum is first rounded to a grid, and the noise is a whole number of grid steps.

Why that is the Gaussian mechanism: for t on the grid, t + round(x) = round(t + x). The output is a
rounding of the sum plus *ideal* Gaussian noise, hence post-processing of what the ledger records.
Rounding the sum moves it by at most half a step in each of d coordinates, so two neighbours may
differ by max_norm + step * sqrt(d) instead of max_norm: the noise grows by that factor.

What it does not cover: the sum itself was added up in floating point, with a relative error of
about 1e-7 a term, and timing is not constant.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.privacy.budget import Plan
from sfumato.privacy.sampling import Secret

GRID_BITS = 20
"""A grid step is about 2^-20 deviations. Finer steps round less, but then each holds fewer of the
2^64 words, and its probability is less exact: here to 2^-40, with 0.3 % more noise at d = 10^7."""


def add_secure_noise(
    sums: Mapping[str, Tensor], plan: Plan, secret: Secret, purpose: tuple[str | int, ...]
) -> dict[str, Tensor]:
    """Round the sums to a grid and add rounded Gaussian noise from a ChaCha20 stream.

    Guarantee: the result is post-processing of the Gaussian mechanism with noise multiplier
    `plan.noise_multiplier`. Every value is a whole number of grid steps. Noise is made on the CPU
    in float64; the result has each tensor's own type and device.
    """
    grid, deviation = grid_noise(plan, sum(tensor.numel() for tensor in sums.values()))
    noisy = {}
    for number, (name, tensor) in enumerate(sums.items()):
        # The stream's name holds stage, step and tensor: no word is ever used twice.
        key = secret.derive((*purpose, number), 32)
        whole = (tensor.to("cpu", torch.float64) / grid).round()
        whole += gaussian_words(key, tensor.numel(), deviation / grid).round().view(tensor.shape)
        noisy[name] = (whole * grid).to(tensor.device, tensor.dtype)
    return noisy


def grid_noise(plan: Plan, dimension: int) -> tuple[float, float]:
    """The grid step for sums of `dimension` coordinates, and the deviation of the noise on it.

    Guarantee: neighbours that differ by `plan.max_norm` differ by at most deviation over noise
    multiplier once both are rounded to the grid.
    """
    grid = 2.0 ** (math.floor(math.log2(plan.noise_deviation)) - GRID_BITS)
    return grid, plan.noise_multiplier * (plan.max_norm + grid * math.sqrt(dimension))


def gaussian_words(key: bytes, count: int, deviation: float) -> Tensor:
    """`count` normal deviates in float64, one from each 64-bit word of the stream under `key`.

    The top bit is the sign; the other 63 are a uniform number mapped through the inverse normal
    distribution. Small numbers keep all their digits in floating point, so tails are true up to
    9.1 deviations (a chance of 2^-65).
    """
    if count == 0:
        return torch.empty(0, dtype=torch.float64)
    words = torch.frombuffer(chacha20(key, 8 * count), dtype=torch.int64)
    magnitude = (words & (2**63 - 1)).double()
    tail = (magnitude + 0.5) * 2.0**-64
    normal = torch.special.ndtri(tail)
    return torch.where(words < 0, -normal, normal) * deviation


def chacha20(key: bytes, num_bytes: int, nonce: bytes = bytes(16)) -> bytearray:
    """The ChaCha20 key stream (RFC 8439): the first four bytes of the nonce are the counter."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError as missing:
        raise ConfigError(
            'secure noise needs the package "cryptography". Install it, or take noise="torch".'
        ) from missing
    stream = bytearray(num_bytes)
    Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update_into(stream, stream)
    return stream
