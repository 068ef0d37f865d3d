"""What an audit found: promise, bounds, attacks and checks, as one record and in words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from sfumato.privacy.lower import Bound, Scores

POINTS = 300
"""A curve is kept to so many points."""


@dataclass(kw_only=True)
class Findings:
    """Everything that `private/audit.json` holds."""

    target: str
    promise: dict[str, Any] | None
    """Epsilon, delta, relation and unit; None: nothing was promised."""
    bounds: "list[Bound]" = field(default_factory=list)
    attacks: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    curve: dict[str, list[float]] | None = None
    """What the ledger allows any attack."""

    def record(self) -> dict[str, Any]:
        """As it is written."""
        bounds = [{**asdict(bound), "kept": self._kept(bound)} for bound in self.bounds]
        return {
            "target": self.target, "promise": self.promise, "bounds": bounds,
            "attacks": self.attacks, "checks": self.checks, "curve": self.curve,
        }  # fmt: skip

    def _kept(self, bound: "Bound") -> bool | None:
        """Whether what is proved lies at or below what was promised."""
        if self.promise is None or any(
            getattr(bound, key) != self.promise[key] for key in ("relation", "delta")
        ):
            return None
        return bound.epsilon <= self.promise["epsilon"]


def promised(
    epsilon: float, delta: float, relation: str = "add-or-remove", unit: str = "example"
) -> dict[str, Any]:
    """What was promised, as a record has it."""
    return {"epsilon": epsilon, "delta": delta, "relation": relation, "unit": unit}


def share_error(confidence: float, bounds: int) -> float:
    """The confidence that each of some bounds needs, for all of them to hold with this one."""
    return 1 - (1 - confidence) / max(1, bounds)


def hold_together(bounds: "Sequence[Bound]", confidence: float) -> "list[Bound]":
    """Bounds that were made by `share_error`, with the confidence that they have together."""
    note = "" if len(bounds) == 1 else "; the error is shared among all bounds"
    return [replace(b, confidence=confidence, thresholds=b.thresholds + note) for b in bounds]


def describe_attack(
    name: str, inside: "Scores", outside: "Scores", confidence: float
) -> dict[str, Any]:
    """An attack by its scores of members and of others: rates with intervals, and the ROC."""
    import numpy as np

    from sfumato.report.leakage import Roc, clustered_interval, roc

    # A score that is large speaks for membership, and an error that is small does.
    errors = -np.asarray(inside, dtype=np.float64), -np.asarray(outside, dtype=np.float64)
    images = np.arange(len(errors[0])), len(errors[0]) + np.arange(len(errors[1]))
    curve = roc(*errors)

    def limits(statistic: Any) -> list[float]:
        interval = clustered_interval(statistic, *errors, *images, level=confidence, resamples=200)
        return [statistic(curve), *interval]

    found = {"name": name, "auc": limits(lambda c: c.auc)}
    for text, fpr in (("1", 0.01), ("0.1", 0.001)):
        found[f"tpr_at_{text}_percent_fpr"] = limits(lambda c, fpr=fpr: Roc.tpr_at(c, fpr))
    return {**found, "roc": thin(curve.fpr, curve.tpr)}


def thin(fpr: "np.ndarray", tpr: "np.ndarray") -> dict[str, list[float]]:
    """A curve by some of its points, dense where false positives are few."""
    import numpy as np

    wanted = np.concatenate([[0.0], np.geomspace(1e-4, 1, POINTS)])
    places = np.unique(np.append(np.searchsorted(fpr, wanted, side="right") - 1, len(fpr) - 1))
    return {"fpr": fpr[places].tolist(), "tpr": tpr[places].tolist()}


def allowed_curve(*, rate: float, noise_multiplier: float, steps: int) -> dict[str, list[float]]:
    """The largest TPR that such a mechanism leaves to any attack, one image added or removed."""
    import numpy as np

    from sfumato.privacy.tradeoff import largest_tpr

    fpr = np.concatenate([[0.0], np.geomspace(1e-4, 1, 100)])
    tpr = largest_tpr(
        fpr, rate=rate, noise_multiplier=noise_multiplier, steps=steps, relation="add-or-remove"
    )
    return {"fpr": fpr.tolist(), "tpr": tpr.tolist()}


def tell(audit: Mapping[str, Any]) -> list[str]:
    """The promise beside the proof, what attacks reached, and which checks failed."""
    lines = [f"audit of {audit['target']}", f"  {_verdict(audit)}", *_proofs(audit["bounds"])]
    if not audit["bounds"]:
        lines.append(
            "  no epsilon is proved: nobody tossed a coin for who is a member, so what sets members"
            "\n  apart may be the images themselves. Train with --canaries for a proof."
        )
    if audit["attacks"]:
        best = max(audit["attacks"], key=lambda attack: attack["auc"][0])
        (auc, low, high), tpr = best["auc"], best["tpr_at_1_percent_fpr"]
        lines.append(
            f"  best of {len(audit['attacks'])} attacks: {best['name']}, AUC {auc:.3f} "
            f"({low:.3f} to {high:.3f}), TPR {tpr[0]:.3f} ({tpr[1]:.3f} to {tpr[2]:.3f}) at 1 % "
            f"FPR{_allowed(audit['curve'])}"
        )
    for check in audit["checks"]:
        if check["passed"] is False:
            lines.append(f"  FAILED  {check['name']}: {check['says']}")
    if audit["checks"]:
        passed = sum(check["passed"] is True for check in audit["checks"])
        lines.append(f"  checks of the mechanism: {passed} of {len(audit['checks'])} passed")
    return lines


def _verdict(audit: Mapping[str, Any]) -> str:
    from sfumato.report.words import down, up

    promise, bounds = audit["promise"], audit["bounds"]
    text = "promised: nothing (plain training)"
    if promise is not None:
        text = (
            f"promised: epsilon {up(promise['epsilon'])} at delta {promise['delta']:.2g}, for each "
            f"{promise['unit']}"
        )
    if not bounds:
        return text
    best = _best(bounds)
    proved = "proved by attack" if best["by_attack"] else "proved"
    text += f" · {proved}: at least {down(best['epsilon'])} ({100 * best['confidence']:g} %)"
    text += "".join(
        f" · measured: at least {down(b['epsilon'])}" for b in bounds if not b["by_attack"]
    )
    if promise is None:
        return text
    if disproved := [bound["name"] for bound in bounds if bound["kept"] is False]:
        return f"{text}: THE PROMISE IS BROKEN (by {', '.join(disproved)})"
    if any(check["passed"] is False for check in audit["checks"]):
        return f"{text}, but A CHECK OF THE MECHANISM FAILED: do not rely on the promise"
    return f"{text}, which does not break the promise"


def _best(bounds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What proves most among attacks; among measurements where nobody attacked."""
    return max(bounds, key=lambda bound: (bound["by_attack"], bound["epsilon"]))


def _proofs(bounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """The best bound, the first, which assumes least, and what was measured, with their reasons."""
    from sfumato.report.words import down

    if not bounds:
        return []
    shown = {id(b): b for b in (_best(bounds), bounds[0])}
    shown |= {id(b): b for b in bounds if not b["by_attack"]}
    return [
        f"    {down(b['epsilon'])} by {b['name']}; assumes: {b['assumes']}" for b in shown.values()
    ]


def _allowed(curve: Mapping[str, Sequence[float]] | None) -> str:
    if curve is None:
        return ""
    import numpy as np

    return f"; the ledger allows {float(np.interp(0.01, curve['fpr'], curve['tpr'])):.3f}"
