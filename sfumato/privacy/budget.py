"""The guarantee, and the plan that keeps it.

A `Budget` is the guarantee (epsilon, delta). A `Plan` is one way to spend it: T steps, each on a
Poisson batch that every example joins with probability `rate`, each example's contribution
clipped to norm `max_norm`, Gaussian noise of deviation `noise_multiplier * max_norm` on the sum
(Abadi et al. 2016). `make_plan` finds the least noise that fits the budget, after what has been
spent already, so that several stages can share one budget.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sfumato.config import check_counts, check_given, check_numbers
from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.accounting import MOST_EVENTS, mechanisms_of, price
from sfumato.privacy.releases import LEAST_NOISE, Mechanism, Relation, Release, check_noise
from sfumato.privacy.search import least_noise, most_steps

STAIRS = 8
"""How many values a schedule takes."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The guarantee: (epsilon, delta)-differential privacy. With epsilon=inf there is none."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_given(epsilon=self.epsilon, delta=self.delta)
        check_numbers(epsilon=self.epsilon, delta=self.delta)
        if not self.epsilon > 0:
            raise ConfigError(
                f"epsilon={self.epsilon:g} must be above 0: at 0 nothing can be learned from the "
                "data. Between 1 and 8 is usual."
            )
        check_delta(self.delta)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a budget is spent: every number the guarantee depends on, and nothing else.

    `expected_batch` divides the noisy sum. It is a public setting, never the size a batch happened
    to have, because that size depends on who is in the data. `max_batch`, when given, cuts a larger
    Poisson batch to a random subset (Ganesh 2025), so that memory has a bound; then `size`, the
    number of examples, is part of the plan too.

    `noise_decay` and `clip_decay` are schedules: by how much noise multiplier and norm bound have
    been multiplied at the end. They fall (or rise) geometrically, in eight equal stairs, since
    each new noise multiplier is one more mechanism to price.
    """

    noise_multiplier: float
    expected_batch: float
    rate: float = 1.0
    steps: int = 1
    max_norm: float = 1.0
    relation: Relation = "add-or-remove"
    max_batch: int | None = None
    size: int | None = None
    noise_decay: float = 1.0
    clip_decay: float = 1.0

    def __post_init__(self) -> None:
        whole = {"steps": self.steps, "max_batch": self.max_batch, "size": self.size}
        others = {name: value for name, value in vars(self).items() if name not in whole}
        check_counts(**whole)
        check_numbers(**{name: value for name, value in others.items() if name != "relation"})
        check_given(steps=self.steps, **others)
        for name in ("noise_decay", "clip_decay"):
            if not 1e-3 <= getattr(self, name) <= 1e3:
                raise ConfigError(f"{name}={getattr(self, name):g} must lie in 0.001 to 1000.")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"rate={self.rate:g} must lie in (0, 1]: it is a probability.")
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be at least 1.")
        if not (self.max_norm > 0 and math.isfinite(self.max_norm)):
            raise ConfigError(
                f"max_norm={self.max_norm:g} must be positive and finite: it bounds what one "
                "example can change."
            )
        for step in (0, self.steps - 1):
            check_noise(self.noise_multiplier * self.noise_decay ** self._done(step))
        if self.noise_multiplier > 0 and not 1e-30 < self.noise_deviation < 1e30:
            raise ConfigError(
                f"noise of deviation {self.noise_deviation:g} vanishes in float32: choose max_norm "
                "nearer to 1."
            )
        if not self.expected_batch > 0:
            raise ConfigError(f"expected_batch={self.expected_batch:g} must be above 0.")
        if self.max_batch is not None and not (self.size and 0 < self.max_batch <= self.size):
            raise ConfigError(
                f"max_batch={self.max_batch} must lie between 1 and the {self.size} examples."
            )

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise on each coordinate of a sum, in the first step."""
        return self.noise_multiplier * self.max_norm

    def at(self, step: int) -> "Plan":
        """The plan as it stands in that step: its noise multiplier and norm bound."""
        if self.noise_decay == self.clip_decay == 1:
            return self
        done = self._done(step)
        return replace(
            self,
            noise_decay=1.0,
            clip_decay=1.0,
            noise_multiplier=self.noise_multiplier * self.noise_decay**done,
            max_norm=self.max_norm * self.clip_decay**done,
        )

    def _done(self, step: int) -> float:
        """How much of the way down (or up) the stairs of a schedule that step is, from 0 to 1."""
        stairs = min(STAIRS, self.steps)
        return min(step * stairs // self.steps, stairs - 1) / max(1, stairs - 1)

    def release(self, stage: str, step: int, data: str = "") -> Release:
        """The ledger line that step number `step` costs."""
        if not 0 <= step < self.steps:
            raise PrivacyError(
                f'step {step} of stage "{stage}" is beyond its plan of {self.steps} steps: the '
                "budget is spent. Plan more steps from the start, with more noise in each."
            )
        now = self.at(step)
        return Release(
            stage=stage,
            step=step,
            data=data,
            rate=self.rate,
            noise_multiplier=now.noise_multiplier,
            max_batch=self.max_batch,
            size=self.size if self.max_batch is not None else None,
            max_norm=now.max_norm,
            divisor=self.expected_batch,
        )

    def mechanisms(self, steps: int | None = None) -> Counter[Mechanism]:
        """What the accountant prices: the mechanisms of the first `steps` steps, counted."""
        steps = self.steps if steps is None else steps
        if self.noise_decay == 1:
            return Counter({self.release("plan", 0).mechanism: steps})
        return Counter(self.release("plan", step).mechanism for step in range(steps))

    def epsilon(self, delta: float, steps: int | None = None) -> float:
        """What the plan will cost, or its first `steps` steps, by the PLD accountant."""
        return price(self.mechanisms(steps), delta, self.relation, cells_for=self.steps)


def make_plan(
    budget: Budget | None = None,
    *,
    size: int,
    batch_size: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    noise_multiplier: float | None = None,
    max_norm: float = 1.0,
    relation: Relation = "add-or-remove",
    max_batch: int | None = None,
    noise_decay: float = 1.0,
    clip_decay: float = 1.0,
    spent: Sequence[Release] = (),
) -> Plan:
    """The plan with the least noise that keeps `budget`, or the one with that `noise_multiplier`.

    Guarantee: with a budget, the events of the plan composed with `spent` cost at most
    `budget.epsilon` at `budget.delta` under `relation`, by the PLD accountant's upper bound. With a
    noise multiplier the caller chooses, and the ledger will say what it costs.

    Without `batch_size` the plan takes all of the data (rate 1); without `epochs` and `steps` it is
    a single release.

    >>> plan = make_plan(Budget(epsilon=2, delta=1e-5), size=50_000, batch_size=1000, epochs=1)
    >>> plan.steps, round(plan.noise_multiplier, 2)
    (50, 0.83)
    """
    if (budget is None) == (noise_multiplier is None):
        raise ConfigError("give either a budget (epsilon, delta) or a noise multiplier.")
    check_given(size=size)
    check_counts(size=size, steps=steps)
    check_numbers(batch_size=batch_size, epochs=epochs)
    if size < 1:
        raise ConfigError(f"size={size}: there must be at least one example.")
    batch_size = size if batch_size is None else batch_size
    if not 0 < batch_size <= size:
        raise ConfigError(
            f"batch_size={batch_size:g} must be above 0 and at most {size}, the number of examples "
            "(or people) to train on."
        )
    plan = Plan(
        noise_multiplier=0.0 if noise_multiplier is None else noise_multiplier,
        expected_batch=batch_size,
        rate=batch_size / size,
        steps=count_steps(size, batch_size, epochs=epochs, steps=steps),
        max_norm=max_norm,
        relation=relation,
        max_batch=max_batch,
        size=size,
        noise_decay=noise_decay,
        clip_decay=clip_decay,
    )
    if budget is None:
        return plan
    check_delta(budget.delta, size)
    if math.isinf(budget.epsilon):
        return plan
    return replace(plan, noise_multiplier=_noise_within(budget, plan, mechanisms_of(spent)))


def _noise_within(budget: Budget, plan: Plan, before: Counter[Mechanism]) -> float:
    """The least noise multiplier in the first step for which plan and `before` keep the budget."""
    share = plan.noise_decay ** plan._done(plan.steps - 1)

    def price_of(noise: float) -> float:
        if noise * min(1.0, share) < LEAST_NOISE:
            return math.inf
        trial = replace(plan, noise_multiplier=noise)
        return price(before + trial.mechanisms(), budget.delta, plan.relation)

    return least_noise(price_of, budget.epsilon)


def steps_within(budget: Budget, plan: Plan) -> int:
    """How many steps of the plan's kind the budget allows."""
    mechanism = plan.release("plan", 0).mechanism

    def price_of(steps: int) -> float:
        return price(Counter({mechanism: steps}), budget.delta, plan.relation)

    return most_steps(price_of, budget.epsilon, MOST_EVENTS)


def count_steps(
    size: int, batch_size: float, *, epochs: float | None = None, steps: int | None = None
) -> int:
    """Steps that `epochs` passes take, rounded up; one step when neither is given."""
    if epochs is not None and steps is not None:
        raise ConfigError(f"epochs={epochs:g} and steps={steps} say the same thing: give one.")
    if epochs is None:
        return 1 if steps is None else steps
    if not (epochs > 0 and math.isfinite(epochs)):
        raise ConfigError(f"epochs={epochs:g} must be above 0.")
    # 4 epochs of 60,000 in batches of 128 are 1875 steps, not 1876 by a rounding error.
    return math.ceil(round(epochs * size / batch_size, 6))


def check_delta(delta: float, size: int | None = None) -> None:
    """Refuse what is no delta, and one that a careless mechanism satisfies on `size` examples."""
    if not 0 < delta < 1:
        raise ConfigError(
            f"delta={delta:g} must lie between 0 and 1: it is the chance that the guarantee fails. "
            "Leave it out to get one that suits the data's size."
        )
    if size is not None and delta >= 1 / size:
        raise ConfigError(
            f"delta={delta:g} is not below 1/{size}: publishing one image at random would satisfy "
            f"it. Use {default_delta(size):.2g}, the default, or less."
        )


def default_delta(size: int) -> float:
    """1e-5 as in the literature, or size^-1.1 where that is smaller: always well below 1/size.

    >>> default_delta(4_000)
    1e-05
    >>> f"{default_delta(1_000_000):.1e}"
    '2.5e-07'
    """
    if size < 1:
        raise ConfigError(f"size={size}: there must be at least one example.")
    return min(1e-5, size**-1.1)
