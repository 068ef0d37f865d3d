"""One use of private data, stated as a fact: what was done, not what it costs.

Everything sfumato does to private data is a Gaussian release on a Poisson batch, so one kind of
event is enough: a full-batch release has rate 1, an exact one has no noise. Keeping events apart
from accountants (an idea of Google's dp-accounting) means that a better accountant can price an
old ledger again.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sfumato.errors import ConfigError, PrivacyError

Relation = Literal["add-or-remove", "replace"]
"""Which data sets count as neighbours: one has an example more, or one example differs."""

LEAST_NOISE = 0.02
"""The smallest noise multiplier that has a price: below it, one takes minutes and means nothing."""


class Mechanism(NamedTuple):
    """All that an accountant needs to know of an event: equal mechanisms have one price.

    The fields mean what they mean in `Release`; `size` is given only where `max_batch` is.
    """

    rate: float
    noise_multiplier: float
    max_batch: int | None = None
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Release:
    """A sum of vectors of norm at most C over a Poisson batch, released with Gaussian noise.

    Every example joins the batch with probability `rate`; the noise has deviation
    `noise_multiplier` times C. With `max_batch`, a larger batch of the `size` examples is cut to a
    random subset first. The meaning of a field never changes: old ledgers stay readable.
    """

    stage: str
    step: int = 0
    rate: float = 1.0
    noise_multiplier: float
    max_batch: int | None = None
    size: int | None = None
    max_norm: float = 1.0
    """C, the norm bound."""
    divisor: float = 1.0
    """What the noisy sum was divided by."""
    data: str = ""
    """Name of the private data set."""
    ledger: str = ""
    """Id of the ledger the event was first written in."""
    family: str = ""
    """Events of one family touch disjoint examples, so together they cost as much as one."""
    tag: str = ""
    """A keyed hash of the sum: equal for a repetition, different for another release."""

    def __post_init__(self) -> None:
        noise = self.noise_multiplier
        if not (0 < self.rate <= 1 and noise >= 0 and math.isfinite(noise) and self.step >= 0):
            raise PrivacyError(f"no mechanism does this: {self}. A rate lies in (0, 1].")
        if self.max_batch is not None and not (self.size and 0 < self.max_batch <= self.size):
            raise PrivacyError(f"max_batch={self.max_batch} must lie in 1..size, {self.size}.")

    @property
    def name(self) -> tuple[str, str, int, str]:
        """What makes two lines the same event."""
        return (self.ledger, self.stage, self.step, self.tag)

    @property
    def mechanism(self) -> Mechanism:
        """What makes two events cost the same."""
        return Mechanism(self.rate, self.noise_multiplier, self.max_batch, self.size)

    @property
    def is_exact(self) -> bool:
        """Whether the values left without noise."""
        return self.noise_multiplier == 0

    def describe(self, unit: str = "example") -> str:
        """The event in words; `unit` is what a batch is drawn from."""
        if self.is_exact:
            return "an exact release: no noise, so no guarantee"
        batch = f"a Poisson batch (each {unit} with chance {self.rate:.4g})"
        batch = "all of the data" if self.rate == 1 else batch
        limit = f", cut to {self.max_batch}" if self.max_batch is not None else ""
        noise = f"Gaussian noise of {self.noise_multiplier:.4g} times the norm bound"
        return f"{noise} on {batch}{limit}"


def check_noise(noise_multiplier: float) -> None:
    """Refuse so little noise that no accountant can price it; none at all is infinite, and said."""
    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(f"noise_multiplier={noise_multiplier:g} must be finite and not negative.")
    if 0 < noise_multiplier < LEAST_NOISE:
        raise ConfigError(
            f"noise_multiplier={noise_multiplier:g} is too small to be priced: at least "
            f"{LEAST_NOISE:g}, or 0 for a training without a guarantee."
        )
