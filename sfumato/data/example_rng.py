"""Random numbers that belong to examples, for augmentations.

If one example more in the batch gave all others other crops, it would change the sum by far more
than its own gradient, and the guarantee would be void. So what is drawn for an example is a
function of the seed, the step and the example alone: not of its place in a batch, nor of who else
is there.
"""

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

GOLDEN, FIRST, SECOND = (
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The constants of splitmix64, as signed integers."""


@dataclass
class ExampleRng:
    """One stream of numbers a row."""

    keys: Int[Tensor, " n"]
    thrown: int = 0

    @classmethod
    def of(cls, seed: int, *numbers: Int[Tensor, " n"] | int) -> "ExampleRng":
        """Streams named by numbers: a step, an example, a view."""
        first = next(number for number in numbers if isinstance(number, Tensor))
        keys = mix(torch.full_like(first, seed))
        for number in numbers:
            keys = mix(keys + GOLDEN + number)
        return cls(keys)

    def throw(self, times: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "times n"]:
        """The next numbers of each row, between 0 and 1."""
        turns = torch.arange(self.thrown + 1, self.thrown + times + 1, device=self.keys.device)
        self.thrown += times
        words = mix(self.keys + GOLDEN * turns[:, None])
        return ((words >> 40) & 0xFFFFFF).to(dtype) / 2**24

    def normal(self, times: int) -> Float[Tensor, "times n"]:
        """The next standard normal numbers of each row (Box and Muller 1958); none beyond 5.8."""
        length, angle = self.throw(times + times % 2).chunk(2)
        length, angle = (-2 * torch.log1p(-length)).sqrt(), 2 * torch.pi * angle
        return torch.cat([length * angle.cos(), length * angle.sin()])[:times]

    def integers(self, high: int, times: int) -> Int[Tensor, "times n"]:
        """The next whole numbers of each row, from 0 to `high` less one."""
        return (self.throw(times, torch.float64) * high).long()


def seed_of(*names: object) -> int:
    """A seed for a generator that is named by a purpose, a seed, a step: 63 bits, of any Python.

    (Python's own `hash` differs between versions, and has the same for -1 and -2.)
    """
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "little") >> 1


def mix(words: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The last step of splitmix64 (Steele et al. 2014): every bit depends on every bit."""
    words = (words ^ _shifted(words, 30)) * FIRST
    words = (words ^ _shifted(words, 27)) * SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: Int[Tensor, "*shape"], bits: int) -> Int[Tensor, "*shape"]:
    """To the right, with zeros coming in: torch's own shift would bring the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
