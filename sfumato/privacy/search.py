"""How much noise is enough, and how many steps are too many: searches by price.

Whatever has a price that falls with the noise, or rises with the steps, can be searched: epsilon of
a plan (`budget`), or the rate that an attack can reach (`proof.tradeoff`). Prices are bounds and
take time. So there are few trials, and what is returned was itself priced.
"""

import math
from collections.abc import Callable
from functools import cache

from scipy.optimize import root_scalar

from sfumato.errors import ConfigError


def least_noise(price_of: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier, to about 2e-4 of it, whose price is at most `target`.

    `price_of(noise)` falls with the noise; it is infinite where there is too little to be priced.
    Guarantee: the noise returned was itself priced, and costs at most `target`. It is never below
    0.05, where epsilon is in the hundreds.
    """

    @cache
    def excess(log_noise: float) -> float:
        return math.log(max(price_of(math.exp(log_noise)), 1e-12) / target)

    # Epsilon against noise is nearly straight on logarithmic axes: a few trials are enough.
    high = 0.0
    while excess(high) > 0:
        high += 1.0
        if high > 14:
            raise ConfigError(
                f"no amount of noise brings epsilon down to {target:g}: what is already spent "
                "reaches it, or delta is out of reach. Raise the budget."
            )
    low = high - 0.5
    while excess(low) <= 0:
        low, high = low - 0.5, low
        if low < -3:
            return math.exp(high)
    noise = math.exp(_root(excess, low, high))
    while price_of(noise) > target:
        noise *= 1.0001
    return noise


def most_steps(price_of: Callable[[int], float], target: float, limit: int) -> int:
    """The largest number of steps whose price is at most `target`; 0 if one is too many.

    `price_of(steps)` rises with the steps. Beyond `limit` nothing is priced: it is an error if even
    about this many cost too little.
    """

    @cache
    def excess(log_steps: float) -> float:
        return math.log(max(price_of(round(math.exp(log_steps))), 1e-12) / target)

    low, high = 0.0, 2.0
    if excess(low) > 0:
        return 0
    while excess(high) <= 0:
        low, high = high, high + 2.0
        if high > math.log(limit):
            raise ConfigError(f"epsilon={target:g} allows more than {limit} steps: lower it.")
    steps = round(math.exp(_root(excess, low, high)))
    while price_of(steps) > target:
        steps -= 1
    while price_of(steps + 1) <= target:
        steps += 1
    return steps


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return root_scalar(function, bracket=(low, high), method="brentq", xtol=1e-4).root
