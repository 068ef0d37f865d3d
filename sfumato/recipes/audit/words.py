"""What an audit found, in words: the promise beside the proof."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sfumato.report.words import best_of, down, interval, up

if TYPE_CHECKING:
    from sfumato.report.found import Attack, Findings, Proved


CHANGED = {"add-or-remove": "added or removed", "replace": "replaced by another"}
"""What a relation lets happen to one example or person."""


def tell(found: "Findings", promise: Mapping[str, Any] | None) -> list[str]:
    """The promise beside the proof, what attacks reached, and which checks failed."""
    lines = [f"audit of {found.audited}", f"  {_verdict(found, promise)}", *_proofs(found.bounds)]
    if not found.bounds:
        lines.append(
            "  no epsilon is proved: nobody tossed a coin for who is a member, so what sets members"
            "\n  apart may be the images themselves. Train with --canaries for a proof."
        )
    if found.attacks:
        best = max(found.attacks, key=_auc)
        lines.append(
            f"  best of {len(found.attacks)} attacks: {best.name}, AUC {interval(best.auc)}, "
            f"TPR {interval(best.tpr_at_1_percent_fpr)} at 1 % FPR{_allowed(found, best)}"
        )
    failed = [check for check in found.checks if check.passed is False]
    lines += [f"  FAILED  {check.name}: {check.says}" for check in failed]
    if found.checks:
        passed = sum(check.passed is True for check in found.checks)
        lines.append(f"  checks of the mechanism: {passed} of {len(found.checks)} passed")
    return lines


def _verdict(found: "Findings", promise: Mapping[str, Any] | None) -> str:
    text = "promised: nothing (plain training)"
    if promise is not None:
        by = "promised, as claimed" if promise.get("claimed") else "promised"
        text = (
            f"{by}: epsilon {up(promise['epsilon'])} at delta {promise['delta']:.2g}, one "
            f"{promise['unit']} {CHANGED[promise['relation']]}"
        )
    if not found.bounds:
        return text
    best = best_of(found.bounds)
    proved = "proved by attack" if best.by_attack else "proved"
    text += f" · {proved}: at least {down(best.epsilon)} ({100 * (best.confidence or 0):g} %)"
    measured = [bound for bound in found.bounds if not bound.by_attack]
    text += "".join(f" · measured: at least {down(bound.epsilon)}" for bound in measured)
    if promise is None:
        return text
    if disproved := [bound.name for bound in found.bounds if bound.kept is False]:
        return f"{text}: THE PROMISE IS BROKEN (by {', '.join(disproved)})"
    if any(check.passed is False for check in found.checks):
        return f"{text}, but A CHECK OF THE MECHANISM FAILED: do not rely on the promise"
    if any(bound.kept for bound in found.bounds):
        return f"{text}, which does not break the promise"
    return f"{text}, which is about other neighbours or another delta than the promise"


def _proofs(bounds: "Sequence[Proved]") -> list[str]:
    """The best bound, the first, which assumes least, and what was measured, with their reasons."""
    if not bounds:
        return []
    measured = [bound for bound in bounds if not bound.by_attack]
    shown = dict.fromkeys((best_of(bounds), bounds[0], *measured))
    return [f"    {down(b.epsilon)} by {b.name}; assumes: {b.assumes}" for b in shown]


def _auc(attack: "Attack") -> float:
    return 0.0 if attack.auc is None else attack.auc[0]


def _allowed(found: "Findings", attack: "Attack") -> str:
    if found.allowed is None:
        return ""
    import numpy as np

    allowed = float(np.interp(0.01, *found.allowed))
    value, low, _ = attack.tpr_at_1_percent_fpr or (0.0, None, None)
    within = ", which is within its interval" if value > allowed >= (low or 0.0) else ""
    return f"; the ledger allows {allowed:.3f}{within}"
