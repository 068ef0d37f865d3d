"""What any attack can reach: the largest true-positive rate at each false-positive rate.

Differential privacy bounds every test of "was this example used?", and so every attack that ends
in such a test, whatever it computes on the way. For T steps of Gaussian noise on Poisson batches
the best test is known: reject when the privacy loss is large (Neyman and Pearson). Its ROC is
1 - f, where f is the trade-off function (Dong et al. 2019). It says more than one pair (epsilon,
delta) does, and it stands on the axes on which attacks are drawn.

The same number is the bound on reconstruction. If a blind guess comes close enough to an example
with probability kappa, an attack that knows all other examples comes as close with probability
at most `largest_tpr(kappa, ...)` (Hayes et al. 2023; Kaissis et al. 2023).
"""

import math
from typing import Literal

import numpy as np
from jaxtyping import Float

from sfumato.errors import ConfigError
from sfumato.privacy.accounting import Pair, loss_cells
from sfumato.privacy.releases import LEAST_NOISE
from sfumato.privacy.search import least_noise

Neighbours = Literal["remove", "add", "add-or-remove", "replace"]
"""What tells a positive from a negative. "remove": positives were trained with the example and
negatives without it; "add": the reverse; "add-or-remove": whichever of the two is worse;
"replace": negatives were trained with another example in its place."""

ROUNDING = 1e-7
"""Floats in the privacy loss distribution are wrong by less than this, all cells together."""


def largest_tpr(
    fpr: float | Float[np.ndarray, "*points"],
    *,
    rate: float,
    noise_multiplier: float,
    steps: int,
    relation: Neighbours,
) -> Float[np.ndarray, "*points"]:
    """An upper bound on the true-positive rate of every attack with these false-positive rates.

    Guarantee: at least the true optimum for the mechanism as stated (each of `steps` batches takes
    an example with chance `rate`), and above it by 1e-5 or so (1e-3 where the noise is below 0.1).
    It rises with `fpr` and is never below it. "remove", "add" and "replace" are concave;
    "add-or-remove" is the larger of two curves at each point and bends where they cross. Without
    noise, or with less than 0.02, the bound is 1.

    For "replace" the pair is an example whose gradients all point one way against one whose
    gradients all point the other way. That no other pair is worse is believed, not proven, when
    steps are composed (Lebeda et al. 2024).
    """
    _check(rate, noise_multiplier, steps)
    points = np.asarray(fpr, dtype=np.float64)
    if not ((points >= 0) & (points <= 1)).all():
        raise ConfigError("fpr must lie between 0 and 1: it is a rate of false positives.")
    if rate == 1:
        # All steps of plain Gaussian noise are one step with less of it.
        noise_multiplier, steps = noise_multiplier / math.sqrt(steps), 1
    if noise_multiplier < LEAST_NOISE:
        return np.ones_like(points)
    pairs: tuple[Pair, ...] = ("remove", "add") if relation == "add-or-remove" else (relation,)
    bound = points
    for pair in pairs:
        positives, negatives = loss_cells(rate, noise_multiplier, steps, pair)
        # Taking cells in order of loss is the best test of each size; in between, toss a coin.
        best = np.interp(points, np.cumsum(negatives), np.cumsum(positives))
        bound = np.maximum(bound, np.minimum(best + ROUNDING, 1.0))
    return np.asarray(bound)


def noise_for_tpr(
    tpr: float, fpr: float, *, rate: float, steps: int, relation: Neighbours
) -> float:
    """The least noise multiplier, to about 2e-4 of it, that keeps every attack to `tpr` at `fpr`.

    Guarantee: `largest_tpr` at the noise returned is at most `tpr`. It is never below 0.05.
    """
    if not 0 <= fpr < fpr + 1e-5 <= tpr < 1:
        raise ConfigError(
            f"tpr={tpr:g} must lie above fpr={fpr:g} and below 1: guessing reaches fpr, and 1 "
            "needs no noise."
        )

    def reached(noise: float) -> float:
        return float(
            largest_tpr(fpr, rate=rate, noise_multiplier=noise, steps=steps, relation=relation)
        )

    return least_noise(reached, tpr)


def _check(rate: float, noise: float, steps: int) -> None:
    if not (0 < rate <= 1 and steps >= 1 and noise >= 0 and math.isfinite(noise)):
        raise ConfigError(
            f"no mechanism has rate={rate:g}, noise_multiplier={noise:g} and steps={steps}. A rate "
            "lies in (0, 1], noise is finite and not negative, and there is at least one step."
        )
