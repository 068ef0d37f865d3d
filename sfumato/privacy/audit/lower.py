"""Lower bounds on epsilon: what the outcome of an attack proves about a mechanism.

The ledger says how large epsilon is at most. An attack that succeeds too often for some epsilon
proves that the true one is larger, and how surely. Two ways: many runs (Jagielski et al. 2020),
where each trial is independent of the others, and one run (Steinke et al. 2023), where each of many
canaries was included by the toss of a coin and the attack guesses how the coins fell.

A bound that is too large calls sound code broken, so whatever was chosen after a look at the scores
(a threshold, a number of guesses) was chosen on other scores, or is corrected for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import expit, logit
from scipy.stats import beta, binom

from sfumato.errors import ConfigError, DataError
from sfumato.privacy.releases import Relation

Inside = Float[np.ndarray, " inside"] | Sequence[float]
Outside = Float[np.ndarray, " outside"] | Sequence[float]
Scores = Float[np.ndarray, " trials"] | Sequence[float]
"""One number a trial: the larger, the more likely the example was in."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Epsilon at `delta` is at least this, or something of chance 1 - `confidence` happened."""

    name: str
    epsilon: float
    delta: float
    confidence: float
    relation: Relation
    thresholds: str
    """How threshold or number of guesses was chosen, and what that cost."""
    assumes: str
    """What must hold for the bound to hold, in words."""
    by_attack: bool = True
    """Whether an attack guessed who was in; else the mechanism was measured."""


def many_run_bound(
    inside: Inside,
    outside: Outside,
    *,
    delta: float,
    confidence: float = 0.95,
    relation: Relation = "add-or-remove",
    name: str = "many runs",
    assumes: str = "trials are independent of each other",
    seed: int = 0,
) -> Bound:
    """What the scores of independent trials with and without the example prove.

    Guarantee: above the true epsilon with chance at most 1 - confidence. Any test obeys
    TPR <= e^epsilon FPR + delta, and so does its complement, so rates with limits give a bound.
    Threshold and side are chosen on one half of the trials, drawn by `seed`, and the limits are
    taken on the other half alone, so no correction is due.

    Trials must be independent, so take one a run. Runs may draw from the same pool of images:
    epsilon holds for each pool. Runs with and without must be neighbours by `relation`.
    """
    _check_claim(delta, confidence)
    scores = [_checked(part) for part in (inside, outside)]
    proved = 0.0
    if min(map(len, scores)) >= 2:
        generator = np.random.default_rng(seed)
        halves = [np.array_split(generator.permutation(part), 2) for part in scores]
        (first_in, rest_in), (first_out, rest_out) = halves
        thresholds = _thresholds(np.concatenate([first_in, first_out]))
        found = _proved(thresholds, first_in, first_out, delta, confidence)
        side, place = np.unravel_index(np.argmax(found), found.shape)
        there = thresholds[place : place + 1]
        proved = float(_proved(there, rest_in, rest_out, delta, confidence)[side, 0])
    return Bound(
        name=name,
        epsilon=max(0.0, proved),
        delta=delta,
        confidence=confidence,
        relation=relation,
        thresholds="threshold and side chosen on one half of the trials, counted on the other",
        assumes=assumes,
    )


def one_run_bound(
    scores: Scores,
    included: Bool[np.ndarray, " coins"] | Sequence[bool],
    *,
    delta: float,
    confidence: float = 0.95,
    name: str = "one run",
) -> Bound:
    """What one run proves that tossed a fair coin for each of its canaries.

    Guarantee: above the true epsilon with chance at most 1 - confidence, however the scores depend
    on each other, if each canary was included by a fair coin of its own that nothing but the
    training saw. The k highest scores are guessed to be in, the k lowest to be out, and of the rest
    nothing is said. Every k of a list that only the number of canaries decides is tried, and each
    has its share of the error. Equal scores are put in an order that no coin had a part in.
    """
    _check_claim(delta, confidence)
    values, coins = _checked(scores), np.asarray(included)
    if coins.dtype != np.bool_ or coins.shape != values.shape:
        raise DataError("each canary has one score, and one coin that is true or false.")
    tried = guess_sizes(len(values))
    # A caller may list those inside first: then the order in the list would tell the coins.
    order = np.random.default_rng(0).permutation(len(values))
    coins = coins[order][np.argsort(values[order], kind="stable")]
    error = (1 - confidence) / max(1, len(tried))
    best = 0.0
    for size in tried:
        right = int((~coins[:size]).sum() + coins[-size:].sum())
        best = max(best, guesses_bound(right, 2 * size, len(values), delta, 1 - error, best))
    return Bound(
        name=name,
        epsilon=best,
        delta=delta,
        confidence=confidence,
        relation="add-or-remove",
        thresholds=f"{len(tried)} numbers of guesses tried, each with its share of the error",
        assumes="a fair coin decided on each canary, by itself",
    )


def guess_sizes(canaries: int) -> list[int]:
    """How many guesses a side are tried: half of the canaries, a quarter, ... down to five."""
    found, size = [], canaries // 2
    while size >= 5 or (size and not found):
        found.append(size)
        size //= 2
    return found


def guesses_bound(
    right: int, guesses: int, canaries: int, delta: float, confidence: float, known: float = 0.0
) -> float:
    """The epsilon that `right` out of `guesses` about coins prove, when nothing else was tried.

    With f(v) the chance that a binomial of rate e^epsilon / (1 + e^epsilon) reaches v, guesses as
    good as these have at most the chance f(v) + 2 m delta max_i (f(v - i) - f(v)) / i (Steinke et
    al. 2023, theorem 5.2; m canaries). Returns the largest epsilon for which that is below
    1 - confidence, to 1e-4 and from below; or `known`, if it is not above.
    """
    _check_claim(delta, confidence)
    if not 0 <= right <= guesses <= canaries:
        raise ConfigError(f"{right} right of {guesses} guesses about {canaries} canaries: why?")
    if right == 0:
        return known
    # Without delta this is Clopper and Pearson's lower limit; with it the bound is lower.
    rate = float(beta.ppf(1 - confidence, right, guesses - right + 1))
    high = float(logit(rate))
    if delta == 0 or high <= known:
        return max(high, known)
    low = known
    if _chance(right, guesses, canaries, delta, low) >= 1 - confidence:
        return known
    # The chance rises with epsilon wherever it is below one half, so there is one crossing.
    while high - low > 1e-4:
        middle = (low + high) / 2
        rejected = _chance(right, guesses, canaries, delta, middle) < 1 - confidence
        low, high = (middle, high) if rejected else (low, middle)
    return low


def binomial_interval(
    successes: int | Int[np.ndarray, "*counts"], trials: int, level: float = 0.95
) -> tuple[Float[np.ndarray, "*counts"], Float[np.ndarray, "*counts"]]:
    """Limits of a rate (Clopper and Pearson 1934), for independent trials.

    Guarantee: the rate is above the upper limit with chance at most (1 - level) / 2 and below the
    lower one likewise, so each is also a one-sided limit.
    """
    hits = np.asarray(successes)
    check_confidence(level, "level")
    if trials < 1 or (hits < 0).any() or (hits > trials).any():
        raise ConfigError(f"successes must lie between 0 and trials={trials}, which is at least 1.")
    tail = (1 - level) / 2
    low = np.where(hits == 0, 0.0, beta.ppf(tail, np.maximum(hits, 1), trials - hits + 1))
    high = np.where(hits == trials, 1.0, beta.isf(tail, hits + 1, np.maximum(trials - hits, 1)))
    return low, high


def check_confidence(confidence: float, name: str = "confidence") -> None:
    """Refuse what is no level of confidence, under the name that the caller knows it by."""
    if not 0 < confidence < 1:
        raise ConfigError(f"{name}={confidence:g} must lie between 0 and 1; 0.95 is usual.")


def _check_claim(delta: float, confidence: float) -> None:
    """Refuse to prove an epsilon at what is no delta, or with what is no confidence."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta={delta:g} must lie in 0 to 1, 1 excluded.")
    check_confidence(confidence)


def _thresholds(scores: Float[np.ndarray, " scores"]) -> Float[np.ndarray, " thresholds"]:
    """Where to cut: in the middle between neighbours, so that what lies near them falls right.

    Dense at both ends, where rare hits and rare misses prove the most.
    """
    pooled = np.sort(scores)
    below = np.concatenate([pooled[:1], pooled[:-1]])
    # Halved before they are added, which cannot overflow. Infinite scores have no middle.
    with np.errstate(invalid="ignore"):
        middle = below / 2 + pooled / 2
    cuts = np.where((below < middle) & (middle < pooled), middle, pooled)
    places = np.unique(np.geomspace(1, len(cuts), 1000).astype(int)) - 1
    return np.concatenate([cuts[places], cuts[::-1][places]])


def _proved(
    thresholds: np.ndarray, inside: np.ndarray, outside: np.ndarray, delta: float, confidence: float
) -> Float[np.ndarray, "2 thresholds"]:
    """What each threshold proves: by hits, likelier with the example, and by misses, without it."""
    hits, false = (
        len(part) - np.searchsorted(np.sort(part), thresholds, side="left")
        for part in (inside, outside)
    )
    low_tpr, _ = binomial_interval(hits, len(inside), confidence)
    _, high_fpr = binomial_interval(false, len(outside), confidence)
    larger = np.stack([low_tpr, 1 - high_fpr]) - delta
    smaller = np.stack([high_fpr, 1 - low_tpr])
    # An upper limit is never 0, and what is not above delta proves nothing.
    return np.log(np.maximum(larger, 1e-300) / smaller)


def _chance(right: int, guesses: int, canaries: int, delta: float, epsilon: float) -> float:
    """The chance of this many right guesses, at most, under (epsilon, delta)."""
    # reach[i] is the chance that a binomial reaches right - i.
    reach = binom.sf(right - 1 - np.arange(right + 1), guesses, expit(epsilon))
    steps = np.arange(1, right + 1)
    return float(reach[0] + 2 * canaries * delta * ((reach[1:] - reach[0]) / steps).max())


def _checked(scores: np.ndarray | Sequence[float]) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise DataError(
            "scores are one number a trial, and none may be NaN. Give what cannot be scored a "
            "score of minus infinity."
        )
    return values
