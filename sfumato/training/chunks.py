"""How batches are cut into chunks that fit memory: into few shapes, with little to fill them up.

A Poisson batch has another size in every step, and a captured or compiled program has one shape.
So chunks are filled up with rows that count for nothing and cost as much as any other: where 1,000
examples are expected and 1,126 fit at once, always to take 1,126 costs an eighth more than need be.
The chance of every size is known beforehand, and with it the length for which least is wasted.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtr

from sfumato.privacy.budget import Plan

DEAR = 0.05
"""What a chunk costs beside its rows, in parts of the longest: launches, and what is not full."""


@dataclass(frozen=True)
class ChunkSizes:
    """How batches of about this many examples are cut into chunks for each process."""

    expected: float
    deviation: float
    processes: int = 1
    shapes: int | None = None
    """Lengths that a batch's last chunk may have; None for any, when nothing is filled up."""

    @classmethod
    def of(
        cls, plan: Plan, *, processes: int, device: torch.device, compiled: bool
    ) -> "ChunkSizes":
        """That of a plan: compiled code has one shape, and on a GPU every new one costs seconds.

        (cuDNN looks for the best program for each convolution of each shape.)
        """
        deviation = math.sqrt(plan.expected_batch * (1 - plan.rate))
        shapes = 1 if compiled else 4 if device.type == "cuda" else None
        return cls(plan.expected_batch, deviation, processes, shapes)

    @property
    def longest(self) -> int:
        """The examples that one process may have to take: more than four deviations are rare."""
        most = self.expected + min(self.expected / 4, 4 * self.deviation)
        return max(1, math.ceil(most / self.processes))

    def length(self, most: int) -> int:
        """How long chunks are if `most` examples fit at once: as long, or up to half as long.

        On average that takes least time, if a row costs the same in all of them, and each chunk a
        little beside.
        """
        if self.shapes is None and self.processes == 1:
            return most
        most = min(most, self.longest)
        lengths = range(math.ceil(most / 2), most + 1)
        return max(lengths, key=lambda length: (-self._cost(length, most), length))

    def round_to(self, length: int) -> int:
        """What the length of a batch's last chunk is a multiple of."""
        return 1 if self.shapes is None else math.ceil(length / self.shapes)

    def rows(self, length: int) -> float:
        """Rows that the busiest process has in a step, on average, filled up and all."""
        if self.processes == 1:
            unit = self.round_to(length)
            return unit * self._count(unit)
        return length * self._count(length * self.processes)

    def _cost(self, length: int, most: int) -> float:
        return self.rows(length) + DEAR * most * self._count(length * self.processes)

    def _count(self, unit: int) -> float:
        """How many units a batch takes, on average: the sum of the chances of needing one more."""
        full = unit * np.arange(math.ceil((self.expected + 8 * self.deviation) / unit) + 1)
        return float(ndtr((self.expected - full - 0.5) / max(self.deviation, 1e-9)).sum())
