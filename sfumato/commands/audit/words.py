"""What an audit found, in words: the promise beside the proof."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sfumato.reporting.words import best_of, down, interval, proved, up

if TYPE_CHECKING:
    from sfumato.results import Finding, Findings, Limits


CHANGED = {"add-or-remove": "added or removed", "replace": "replaced by another"}
"""What a relation lets happen to one example or person."""


def tell(found: "Findings", promise: Mapping[str, Any] | None) -> list[str]:
    """The promise beside the proof, what attacks reached, and which checks failed."""
    bounds, checks = found.of("bound"), found.of("check")
    lines = [f"audit of {found.target}", f"  {_verdict(found, promise)}", *_proofs(bounds)]
    if not bounds:
        lines.append(
            "  no epsilon is proved: nobody tossed a coin for who is a member, so what sets members"
            "\n  apart may be the images themselves. Train with --canaries for a proof."
        )
    if found.of("attack"):
        lines += _strongest(found)
    failed = [check for check in checks if check.passed is False]
    lines += [f"  FAILED  {check.name}: {check.means}" for check in failed]
    if checks:
        passed = sum(check.passed is True for check in checks)
        lines.append(f"  checks of the mechanism: {passed} of {len(checks)} passed")
    return lines


def _verdict(found: "Findings", promise: Mapping[str, Any] | None) -> str:
    text = "promised: nothing (plain training)"
    if promise is not None:
        by = "promised, as claimed" if promise.get("claimed") else "promised"
        text = (
            f"{by}: epsilon {up(promise['epsilon'])} at delta {promise['delta']:.2g}, one "
            f"{promise['unit']} {CHANGED[promise['relation']]}"
        )
    bounds = found.of("bound")
    if not bounds:
        return text
    best = best_of(bounds)
    how = "proved by attack" if best.by_attack else "proved"
    text += f" · {how}: at least {down(proved(best))} ({100 * (best.confidence or 0):g} %)"
    measured = [bound for bound in bounds if not bound.by_attack]
    text += "".join(f" · measured: at least {down(proved(bound))}" for bound in measured)
    if promise is None:
        return text
    if disproved := [bound.name for bound in bounds if bound.kept is False]:
        return f"{text}: THE PROMISE IS BROKEN (by {', '.join(disproved)})"
    if any(check.passed is False for check in found.of("check")):
        return f"{text}, but A CHECK OF THE MECHANISM FAILED: do not rely on the promise"
    if any(bound.kept for bound in bounds):
        return f"{text}, which does not break the promise"
    return f"{text}, which is about other neighbours or another delta than the promise"


def _proofs(bounds: "Sequence[Finding]") -> list[str]:
    """The best bound, the first, which assumes least, and what was measured, with their reasons."""
    if not bounds:
        return []
    measured = [bound for bound in bounds if not bound.by_attack]
    shown = dict.fromkeys((best_of(bounds), bounds[0], *measured))
    return [f"    {down(proved(b))} by {b.name}. {b.means}" for b in shown]


def _strongest(found: "Findings") -> list[str]:
    """The strongest attack by AUC and the one at few false alarms; or that none is better."""
    attacks = found.of("attack")
    best = max(attacks, key=lambda attack: _value(attack.value))
    sharp = max((best, *attacks), key=lambda attack: _value(attack.tpr_at_1_percent_fpr))
    of = f"best of {len(attacks)} attacks" if len(attacks) > 1 else "attack"
    few = f"{_tpr(sharp)} at 1 % FPR{_allowed(found, sharp)}"
    if sharp is best:
        lines = [f"  {of}: {best.name}, AUC {interval(best.value)}, {few}"]
    else:
        lines = [
            f"  {of} by AUC: {best.name}, {interval(best.value)}",
            f"  {of} by TPR: {sharp.name}, {few}",
        ]
    if not any(map(_beats_guessing, attacks)):
        lines.append(f"  {'none of them is' if len(attacks) > 1 else 'not'} better than guessing")
    return lines


def _beats_guessing(attack: "Finding") -> bool:
    """Whether an interval lies above what a guess reaches, AUC 0.5 and as many hits as alarms."""
    pairs = (attack.value, 0.5), (attack.tpr_at_1_percent_fpr, 0.01)
    return any(limits and _low(limits) > guess for limits, guess in pairs)


def _low(limits: "Limits") -> float:
    value, low, _ = limits
    return value if low is None else low


def _value(limits: "Limits | None") -> float:
    return 0.0 if limits is None else limits[0]


def _tpr(attack: "Finding") -> str:
    """Its rate where false alarms are few, if its scores tell so few apart."""
    if attack.tpr_at_1_percent_fpr is None:
        return "TPR not known (too few images, or equal scores)"
    return f"TPR {interval(attack.tpr_at_1_percent_fpr)}"


def _allowed(found: "Findings", attack: "Finding") -> str:
    if found.allowed is None or attack.tpr_at_1_percent_fpr is None:
        return ""
    import numpy as np

    allowed = float(np.interp(0.01, *found.allowed))
    value, low, _ = attack.tpr_at_1_percent_fpr
    within = ", which is within its interval" if value > allowed >= (low or 0.0) else ""
    return f"; the ledger allows {allowed:.3f}{within}"
