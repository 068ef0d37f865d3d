"""What an audit found: guarantee, bounds, attacks and checks, as one record."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from sfumato.metrics.leakage import Roc, clustered_interval, roc
from sfumato.privacy.audit.lower import Bound, binomial_interval
from sfumato.privacy.audit.tradeoff import largest_tpr
from sfumato.reporting.scores import is_kept

FEW = (0.01, 0.001)
"""False-positive rates at which an attack is judged: few, for who is accused must be right."""
Values = np.ndarray | Sequence[float]

POINTS = 300
"""A curve is kept to this many points."""


@dataclass(kw_only=True)
class AuditRecord:
    """Everything that `private/audit.json` holds."""

    target: str
    guarantee: dict[str, Any] | None
    """Epsilon, delta, relation and unit; None: nothing was guaranteed."""
    bounds: list[Bound] = field(default_factory=list)
    attacks: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    curve: dict[str, list[float]] | None = None
    """What the ledger allows any attack."""

    def record(self) -> dict[str, Any]:
        """As it is written."""
        rows = [asdict(bound) for bound in self.bounds]
        bounds = [{**row, "kept": is_kept(row, self.guarantee or {})} for row in rows]
        return {
            "target": self.target,
            "promise": self.guarantee,
            "bounds": bounds,
            "attacks": self.attacks,
            "checks": self.checks,
            "curve": self.curve,
        }


def guarantee_record(
    epsilon: float, delta: float, relation: str = "add-or-remove", unit: str = "example"
) -> dict[str, Any]:
    """What was guaranteed, as a record has it."""
    return {"epsilon": epsilon, "delta": delta, "relation": relation, "unit": unit}


def share_error(confidence: float, bounds: int) -> float:
    """The confidence that each of some bounds needs, for all of them to hold with this one."""
    return 1 - (1 - confidence) / max(1, bounds)


def joint_confidence(bounds: Sequence[Bound], confidence: float) -> list[Bound]:
    """Bounds that were made by `share_error`, with the confidence that they have together."""
    note = "" if len(bounds) == 1 else "; the error is shared among all bounds"
    return [replace(b, confidence=confidence, thresholds=b.thresholds + note) for b in bounds]


def describe_attack(
    name: str, inside: Values, outside: Values, confidence: float
) -> dict[str, Any]:
    """An attack by its scores of members and of others: rates with intervals, and the ROC."""
    # A score that is large speaks for membership, and an error that is small does.
    errors = -np.asarray(inside, dtype=np.float64), -np.asarray(outside, dtype=np.float64)
    images = np.arange(len(errors[0])), len(errors[0]) + np.arange(len(errors[1]))
    whole = roc(*errors)
    points = thin_curve(whole.fpr, whole.tpr)
    trials = len(errors[0]), len(errors[1])
    rates = [*FEW, *points["fpr"]]

    def numbers(curve: Roc) -> np.ndarray:
        return np.array([curve.auc, *map(curve.tpr_at, rates)])

    limits = clustered_interval(numbers, *errors, *images, level=confidence, resamples=200)
    low, high = (limit.tolist() for limit in limits)
    found = [
        tpr_at_few(whole, rate, limits, trials=trials, confidence=confidence)
        for rate, limits in zip(FEW, zip(low[1:3], high[1:3], strict=True), strict=True)
    ]
    return {
        "name": name,
        "auc": [whole.auc, low[0], high[0]],
        "tpr_at_1_percent_fpr": found[0],
        "tpr_at_0.1_percent_fpr": found[1],
        "roc": {**points, "low": low[3:], "high": high[3:]},
    }


def tpr_at_few(
    curve: Roc,
    rate: float,
    limits: tuple[float, float],
    *,
    trials: tuple[int, int],
    confidence: float,
) -> list[float] | None:
    """The TPR at so small an FPR with its interval; None where the scores allow no estimate.

    `trials` are how many members and others there are. Fewer than one false positive among all
    others cannot be seen: before the first of 16 others a guess finds 1 member in 17. And where
    others and members share the largest score, no threshold separates anybody. `limits` are those
    of a bootstrap; one that never varied says nothing, and makes way for the exact interval of a
    share.
    """
    value, (members, others) = curve.tpr_at(rate), trials
    if others * rate < 1:
        return None
    if value == 0 and not ((curve.fpr > 0) & (curve.fpr <= rate)).any():
        return None
    low, high = limits
    if low == high:
        low, high = map(float, binomial_interval(round(value * members), members, confidence))
    return [value, low, high]


def thin_curve(fpr: np.ndarray, tpr: np.ndarray) -> dict[str, list[float]]:
    """A curve by some of its points, dense where false positives are few."""
    wanted = np.concatenate([[0.0], np.geomspace(1e-4, 1, POINTS)])
    places = np.unique(np.append(np.searchsorted(fpr, wanted, side="right") - 1, len(fpr) - 1))
    return {"fpr": fpr[places].tolist(), "tpr": tpr[places].tolist()}


def allowed_curve(*, rate: float, noise_multiplier: float, steps: int) -> dict[str, list[float]]:
    """The largest TPR that such a mechanism leaves to any attack, one image added or removed."""
    fpr = np.concatenate([[0.0], np.geomspace(1e-4, 1, 100)])
    tpr = largest_tpr(
        fpr, rate=rate, noise_multiplier=noise_multiplier, steps=steps, relation="add-or-remove"
    )
    return {"fpr": fpr.tolist(), "tpr": tpr.tolist()}
