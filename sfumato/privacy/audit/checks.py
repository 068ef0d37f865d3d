"""Checks of a mechanism from what gradient canaries saw of it: does it do what the ledger says?

A lower bound on epsilon asks whether a guarantee is broken; these ask how. A canary adds the norm
bound to a coordinate of its own, so each step shows there what was added, plus noise. If all is as
planned, noise is Gaussian of the guaranteed size, the same whatever the batch, new in every step
and on every coordinate; nobody adds more than the norm bound; and batches are Poisson.

Each check has a p-value: the chance of something at least as odd if all is as planned, exact or an
upper bound of it (Chernoff 1952), for few canaries as for many. All of them together raise a false
alarm with chance at most 1 - confidence (Bonferroni).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import binom, chi2, norm
from scipy.stats import t as student

from sfumato.privacy.audit.lower import check_confidence

ROOM = 0.005
"""By this much noise may be larger than guaranteed: secure noise is, by what rounding may move."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A question to a run, and what it answered. Where `passed` is None it could not be asked."""

    name: str
    question: str
    passed: bool | None
    p_value: float | None
    says: str


@dataclass(frozen=True, kw_only=True)
class CanaryObservations:
    """What steps showed of canaries, in units of the norm bound of each step."""

    seen: Float[np.ndarray, "steps canaries"]
    present: Bool[np.ndarray, "steps canaries"]
    """Whether the canary was in the step's batch."""
    sizes: Int[np.ndarray, " steps"]
    """How many examples each batch had."""
    included: Bool[np.ndarray, " canaries"]
    """How the coins fell."""
    noise: Float[np.ndarray, " steps"]
    """The noise multiplier of each step."""
    rate: float
    others: int
    """Examples that are no canaries."""

    @property
    def residuals(self) -> Float[np.ndarray, "steps canaries"]:
        """What is noise if each present canary added the norm bound; should be standard normal."""
        return (self.seen - self.present) / self.noise[:, None]


def check_mechanism(seen: CanaryObservations, *, confidence: float = 0.95) -> list[Check]:
    """All checks. Guarantee: of a sound run one or more fail with chance at most 1 - confidence.

    Few canaries or steps leave some p-values at 1; about a hundred of each show every bug that
    changes something by ten per cent.
    """
    check_confidence(confidence)
    error = (1 - confidence) / len(QUESTIONS)
    found = []
    for name, (question, test) in QUESTIONS.items():
        p_value, says = test(seen)
        found.append(
            Check(name=name, question=question, passed=p_value >= error, p_value=p_value, says=says)
        )
    return found


def absent_squares(
    seen: CanaryObservations,
) -> tuple[Float[np.ndarray, " steps"], Int[np.ndarray, " steps"]]:
    """Sums of squares of what is noise alone, step by step, and how many there are of them."""
    absent = np.isfinite(seen.seen) & ~seen.present
    rows = np.where(absent, np.nan_to_num(seen.residuals), 0.0)
    return (rows**2).sum(axis=1), absent.sum(axis=1)


def check_buffers(before: Mapping[str, str], after: Mapping[str, str]) -> Check:
    """Whether the artefact holds statistics that changed while training, by hashes of buffers."""
    moved = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    says = f"{len(before)} buffers, none of which changed while training"
    if moved:
        says = f'"{moved[0]}" and {len(moved) - 1} more changed while training, without noise'
    return Check(
        name="statistics",
        question="does the model hold statistics of private images that no noise covers?",
        passed=not moved,
        p_value=None,
        says=says,
    )


def _noise_size(seen: CanaryObservations) -> tuple[float, str]:
    squares, count = absent_squares(seen)
    if not count.sum():
        return 1.0, "no coordinate was ever without its canary"
    total, number = float(squares.sum()), int(count.sum())
    low = float(chi2.cdf(total, number))
    high = float(chi2.sf(total / (1 + ROOM) ** 2, number))
    ratio = math.sqrt(total / number)
    return _two_sided(low, high), f"noise is {ratio:.4f} times as large as guaranteed"


def _noise_apart(seen: CanaryObservations) -> tuple[float, str]:
    """The largest correlation of two steps, each pair of which has its share of the error."""
    rows = seen.residuals[np.isfinite(seen.residuals).all(axis=1)]
    steps, canaries = rows.shape
    if steps < 2 or canaries < 3:
        return 1.0, "too few steps or canaries to compare"
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    largest = 0.0
    for start in range(0, steps, 512):
        block = np.abs(rows[start : start + 512] @ rows.T)
        block[np.arange(len(block)), start + np.arange(len(block))] = 0
        largest = max(largest, float(block.max()))
    # Of a Gaussian vector and any other the correlation r has this law, exactly.
    ratio = largest * math.sqrt((canaries - 1) / max(1 - largest**2, 1e-12))
    pairs = steps * (steps - 1) / 2
    p_value = min(1.0, pairs * 2 * float(student.sf(ratio, canaries - 1)))
    return p_value, f"the two most alike of {steps} steps have a correlation of {largest:.3f}"


def _noise_spread(seen: CanaryObservations) -> tuple[float, str]:
    """Means over coordinates: were the noise one number for all of them, these would be large."""
    rows = seen.residuals[np.isfinite(seen.residuals).all(axis=1)]
    if not rows.size:
        return 1.0, "nothing was seen"
    ratio = float((rows.sum(axis=1) ** 2 / rows.shape[1]).sum())
    low, high = float(chi2.cdf(ratio, len(rows))), float(chi2.sf(ratio, len(rows)))
    spread = math.sqrt(ratio / len(rows))
    return _two_sided(low, high), f"means over coordinates are {spread:.3f} times as they should be"


def _noise_steady(seen: CanaryObservations) -> tuple[float, str]:
    """The slope of the noise's size over the logarithm of the batch's."""
    squares, count = absent_squares(seen)
    sizes = np.log(np.maximum(seen.sizes, 1))
    squares, count, sizes = (part[count > 0] for part in (squares, count, sizes))
    if len(count) < 3 or not squares.any():
        return 1.0, "too few steps to compare"
    if not np.ptp(sizes):
        return 1.0, "all batches had the same size"
    apart = sizes - np.average(sizes, weights=count)
    mean = float((apart * squares).sum() / squares.sum())
    slope = float(mean * count.sum() / (count * apart**2).sum() / 2)
    # That sum(a q) / sum(q) is above its value m is that sum((a - m) q) is above 0, for q of chi
    # squared laws: whatever the size of the noise.
    p_value = _two_sided(_positive(mean - apart, count), _positive(apart - mean, count))
    return p_value, f"noise goes with the batch's size to the power {slope:.2f}"


def _positive(weights: Float[np.ndarray, " steps"], count: Int[np.ndarray, " steps"]) -> float:
    """A limit of the chance that a weighted sum of chi squares reaches 0, by Chernoff's bound."""
    if weights.max() <= 0:
        return 1.0  # all of the noise in one step, which other checks ask about
    tilts = np.linspace(0, 1, 500, endpoint=False)[:, None] / weights.max()
    return float(np.exp((-count / 2 * np.log1p(-tilts * weights)).sum(axis=1).min()))


def _contributions(seen: CanaryObservations) -> tuple[float, str]:
    """The weighted mean of what present canaries added, against the norm bound, from above."""
    sound = np.isfinite(seen.seen) & seen.present
    if not sound.any():
        return 1.0, "no canary was ever in a batch"
    weights = np.where(sound, 1 / seen.noise[:, None] ** 2, 0.0)
    mean = float((weights * np.nan_to_num(seen.seen)).sum() / weights.sum())
    score = (mean - 1) * math.sqrt(weights.sum())
    return float(norm.sf(score)), f"canaries in a batch add {mean:.4f} norm bounds on average"


def _rate(seen: CanaryObservations) -> tuple[float, str]:
    present, steps = seen.present[:, seen.included], len(seen.sizes)
    trials, hits = present.size, int(present.sum())
    if seen.present[:, ~seen.included].any():
        return 0.0, "a canary that was left out was in a batch"
    p_value = _two_sided(
        float(binom.cdf(hits, trials, seen.rate)), float(binom.sf(hits - 1, trials, seen.rate))
    )
    average = hits / max(1, present.shape[1])
    return p_value, f"canaries were in {average:.3g} of {steps} batches ({steps * seen.rate:.3g})"


def _visits(seen: CanaryObservations) -> tuple[float, str]:
    counts = seen.present[:, seen.included].sum(axis=0)
    return _dispersion(counts, len(seen.sizes), seen.rate, "how often a canary was in a batch")


def _batches(seen: CanaryObservations) -> tuple[float, str]:
    trials = seen.others + int(seen.included.sum())
    return _dispersion(seen.sizes, trials, seen.rate, "the size of batches")


QUESTIONS: dict[str, tuple[str, Callable[[CanaryObservations], tuple[float, str]]]] = {
    "noise size": ("is the noise as large as guaranteed?", _noise_size),
    "fresh noise": ("is the noise of every step new?", _noise_apart),
    "separate noise": ("has every coordinate its own noise?", _noise_spread),
    "steady noise": ("is the noise the same for small and large batches?", _noise_steady),
    "contributions": ("does no example add more than the norm bound?", _contributions),
    "sampling rate": ("are examples in batches as often as planned?", _rate),
    "visits": ("do examples come by their own coins, not in turn?", _visits),
    "batch sizes": ("do the sizes of batches vary as Poisson batches do?", _batches),
}


def _dispersion(
    counts: Int[np.ndarray, " counts"], trials: int, rate: float, what: str
) -> tuple[float, str]:
    """Whether counts vary as binomials do: by the sum of their squared deviations."""
    variance = trials * rate * (1 - rate)
    if not len(counts) or not trials:
        return 1.0, "there is nothing to count"
    if variance == 0:
        same = bool((counts == trials).all())
        return float(same), f"{what}: {'all of them, always' if same else 'not all, not always'}"
    squares = (counts - trials * rate) ** 2 / variance
    p_value = _two_sided(*_spread_chances(float(squares.mean()), len(counts), trials, rate))
    return p_value, f"{what} varies {squares.mean():.3f} times as it should"


def _spread_chances(mean: float, count: int, trials: int, rate: float) -> tuple[float, float]:
    """Limits of the chances that squared deviations of binomials have this mean, or less, or more.

    In units of the variance. Chernoff's bound: for any t > 0 the chance of more is at most
    E[exp(t (square - mean))] ^ count, and for t < 0 that of less. It holds for few counts and for
    small ones too, where no smooth law does. Values that next to no binomial takes are paid for
    beforehand: they would blow up the expectation.
    """
    rare = 1e-14
    first, last = int(binom.ppf(rare, trials, rate)), int(binom.isf(rare, trials, rate))
    values = np.arange(first, last + 1)
    squares = (values - trials * rate) ** 2 / (trials * rate * (1 - rate))
    logs, tilts = binom.logpmf(values, trials, rate), np.geomspace(1e-3, 1e4, 100)[:, None]
    # So that what rounding has put beyond all that is possible is still possible.
    slack = 1e-12 * (1 + squares)
    offs = (mean - squares + slack, squares - mean + slack)
    best = (float(np.logaddexp.reduce(logs + tilts * off, axis=1).min()) for off in offs)
    less, more = (min(1.0, math.exp(min(0.0, count * x)) + 2 * rare * count) for x in best)
    return less, more


def _two_sided(*sides: float) -> float:
    return min(1.0, 2 * min(sides))
