"""Lower bounds on epsilon for those who believe that the mechanism adds Gaussian noise.

A bound that assumes nothing must be shown the rare events that epsilon is about, and needs a
million trials for what is proved here by a thousand: if a mechanism is Gaussian noise of unknown
size on Poisson batches, its whole trade-off curve follows from that size (Nasr et al. 2023). So
limits of the two error rates anywhere, or of the noise itself, are limits of epsilon.

An audit states both kinds. These find noise that is too small and examples that weigh too much;
that the noise is Gaussian, new in each step and on each coordinate is what `checks` asks.
"""

import math
from dataclasses import replace

import numpy as np
from scipy.stats import chi2

from sfumato.errors import ConfigError
from sfumato.privacy.audit.checks import CanaryObservations, absent_squares
from sfumato.privacy.audit.lower import Bound, Inside, Outside, binomial_interval
from sfumato.privacy.audit.tradeoff import Neighbours, noise_for_tpr
from sfumato.privacy.budget import Plan
from sfumato.privacy.releases import LEAST_NOISE


def likelihood_scores(seen: CanaryObservations) -> np.ndarray:
    """How much likelier what was seen of a canary is if it was in, in logarithms: the best test.

    Steps whose effect was lost say nothing. (Hayes et al. 2023, section 3; sums over steps.)
    """
    with np.errstate(divide="ignore"):
        absent = np.log1p(-seen.rate)
    present = math.log(seen.rate) + (2 * seen.seen - 1) / (2 * seen.noise[:, None] ** 2)
    return np.nansum(np.logaddexp(absent, present), axis=0)


def curve_bound(
    inside: Inside,
    outside: Outside,
    plan: Plan,
    *,
    delta: float,
    confidence: float = 0.95,
    name: str = "many canaries, on the curve of Gaussian noise",
) -> Bound:
    """What `likelihood_scores` of canaries prove of Gaussian noise on the plan's Poisson batches.

    Guarantee: above the true epsilon with chance at most 1 - confidence, if the mechanism is the
    plan's with noise of another size; up to the accountant's discretisation, the same as the
    ledger's. Whatever the test, its true-positive rate lies on or below the trade-off curve; a test
    above the curve of some noise proves that there was less.
    """
    if plan.noise_decay != 1:
        raise ConfigError("there is no curve for noise that changes from step to step.")
    noises: list[float] = []
    if len(inside) and len(outside):
        hits, false = (int((np.asarray(part) > 0).sum()) for part in (inside, outside))
        low_tpr = float(binomial_interval(hits, len(inside), confidence)[0])
        high_fpr = float(binomial_interval(false, len(outside), confidence)[1])
        # The same two limits, once for the test "it was there" and once for "it was not".
        noises = [
            *_most_noise(low_tpr, high_fpr, plan, "remove"),
            *_most_noise(1 - high_fpr, 1 - low_tpr, plan, "add"),
        ]
    # More noise than the smaller of the two was refuted by one test or the other.
    proved = replace(plan, noise_multiplier=min(noises)).epsilon(delta) if noises else 0.0
    return Bound(
        name=name,
        epsilon=proved,
        delta=delta,
        confidence=confidence,
        relation=plan.relation,
        thresholds="none chosen: in, where that is likelier by the plan",
        assumes="Gaussian noise, independent for each canary, on Poisson batches of the plan's "
        "rate; its size is not assumed",
    )


def noise_bound(
    seen: CanaryObservations,
    plan: Plan,
    *,
    delta: float,
    confidence: float = 0.95,
) -> Bound:
    """Epsilon with the noise that was measured where no canary was, at its upper limit.

    Guarantee: above the true epsilon with chance at most 1 - confidence, if noise is Gaussian and
    independent, of the plan's size times some number, and an example can add the whole norm bound;
    up to the accountant's discretisation, the same as the ledger's.
    """
    squares, counts = absent_squares(seen)
    proved = 0.0
    if counts.sum():
        most = math.sqrt(squares.sum() / chi2.ppf(1 - confidence, counts.sum()))
        # Less noise than can be priced costs at least as much as the least that can.
        least = LEAST_NOISE / min(1.0, plan.noise_decay)
        noise = max(plan.noise_multiplier * most, least)
        proved = replace(plan, noise_multiplier=noise).epsilon(delta)
    return Bound(
        name="the noise itself",
        epsilon=proved,
        delta=delta,
        confidence=confidence,
        relation=plan.relation,
        thresholds="none: the size of the noise is measured",
        assumes="Gaussian noise, independent for each canary and step, on Poisson batches of the "
        "plan's rate, where an example can add the whole norm bound",
        by_attack=False,
    )


def _most_noise(tpr: float, fpr: float, plan: Plan, relation: Neighbours) -> list[float]:
    """The most noise that a test with these rates leaves possible; none if it proves nothing.

    More would keep every test below `tpr` at `fpr`. From above, by up to 2e-4 of it, so epsilon
    comes out smaller.
    """
    if not fpr + 1e-5 <= tpr < 1:
        return []
    return [noise_for_tpr(tpr, fpr, rate=plan.rate, steps=plan.steps, relation=relation)]
