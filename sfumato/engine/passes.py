"""Batches that an ordinary loader draws: what can be known of them, and what they cost.

Nobody but the loader knows who is in them, so nothing is amplified. What is left is that a pass
over the data shows every example once: the steps of a pass touch disjoint examples, and cost
together what one of them does. That holds as long as no sum reaches over the end of a pass.
"""

import warnings
from dataclasses import replace

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.accounting import shuffled_epsilon
from sfumato.privacy.budget import Plan


class Passes:
    """Passes over `size` examples, as far as they show: by how many came.

    A batch that does not fit into what is left of the data begins the next pass, whether the loader
    drops an incomplete last batch or not. A pass that is broken off does not show.
    """

    def __init__(self, plan: Plan, size: int) -> None:
        self.plan = plan
        self.size = size
        self.begin(0)

    def begin(self, step: int) -> None:
        """The data is shuffled anew before this step: examples may come once more."""
        self._begun, self._seen = step, 0

    def check(self, examples: int, gathered: int) -> None:
        """Refuse so many examples more in a sum of so many, if they are not paid for."""
        total, most = gathered + examples, self.plan.expected_batch
        if total > most:
            raise PrivacyError(
                f"this logical batch has {total} examples and batch_size is {most:g}: the data "
                "would be seen more often than is paid for. Call step(loss=...) sooner, or plan "
                "with the batch size that is used."
            )
        if gathered and self._seen + examples > self.size:
            raise PrivacyError(
                f"this logical batch begins in one pass over the {self.size} examples and goes on "
                "in the next: some would be in one sum twice, and once is paid for. Call "
                "step(loss=...) at the end of each pass, also on a smaller batch."
            )

    def add(self, examples: int) -> None:
        """So many were added to a sum."""
        fits = self._seen + examples <= self.size
        self._seen = (self._seen if fits else 0) + examples

    def price(self, step: int, delta: float) -> tuple[Plan, str]:
        """A plan without amplification, and a name for the steps that cost together what one does.

        What all of them will cost is said once, before the first step.
        """
        if self.plan.noise_decay != 1:
            raise ConfigError("noise_decay needs Poisson batches: draw them by engine.loader.")
        if step == 0:
            self._warn(delta)
        number = (step - self._begun) // self._steps
        return replace(self.plan, rate=1.0), f"epoch {number} from step {self._begun} on"

    @property
    def _steps(self) -> int:
        """The fewest steps that a pass can take: a last part is dropped."""
        return int(1 / self.plan.rate + 1e-6)

    def _warn(self, delta: float) -> None:
        times = self.plan.steps / self._steps
        honest = shuffled_epsilon(self.plan.noise_multiplier, times, delta)
        warnings.warn(
            "these batches do not come from engine.loader, so they are not Poisson samples: after "
            f"{self.plan.steps} steps epsilon will be {honest:.3g} for shuffled batches, not "
            f"{self.plan.epsilon(delta):.3g}.",
            stacklevel=6,
        )
