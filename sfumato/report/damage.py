"""What a ledger has lost, by what else lies beside it: its own count, the plan, the summary.

Whoever forges all of them forges the page. What is looked for is loss: a file that was cut, lines
that went missing, a number that somebody changed in one place.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sfumato.config import read_finished
from sfumato.errors import ConfigError
from sfumato.files import read_json, read_lines
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger

KEEP_LEDGERS = ("demo", "release", "train", "warmup")
"""Verbs whose finished runs have one."""
SLACK = 1e-3
"""Accountants of several versions differ by less, in parts."""


def damage(folder: Path, ledger: Ledger | None, spent: float | None = None) -> tuple[str, ...]:
    """Why the ledger of this folder cannot be believed; nothing where it is whole.

    `spent` is the ledger's epsilon, where it is known: to price it takes a while.
    """
    if ledger is None:
        return tuple(_lost(folder))
    return (*_gaps(ledger), *_unlike_plan(folder, ledger), *_unlike_summary(folder, ledger, spent))


def plan_of(folder: Path) -> Plan | None:
    """plan.json, where this version can read it: what was done stands in the ledger."""
    try:
        return read_finished(Plan, read_json(folder / "plan.json"))
    except (ConfigError, FileNotFoundError):
        return None


def steps_of(ledger: Ledger) -> set[int]:
    """Steps of this run: those of the weights that it began with are not of its plan."""
    own = (event for event in ledger.events if event.ledger == ledger.header.id)
    return {event.step for event in own if event.stage == "train"}


def _lost(folder: Path) -> Iterator[str]:
    """A ledger that must have been there."""
    if (folder / "config.json").exists() and _verb(folder) in KEEP_LEDGERS:
        if "epsilon" in _summary(folder):
            yield "there is no ledger, and done.json says that there was one"
        elif (folder / "plan.json").exists() and read_lines(folder / "metrics.jsonl"):
            yield "there is no ledger, and steps of plan.json were taken"


def _gaps(ledger: Ledger) -> Iterator[str]:
    """Steps that are missing before others of the same stage."""
    taken: dict[tuple[str, str], set[int]] = {}
    for event in ledger.events:
        taken.setdefault((event.ledger, event.stage), set()).add(event.step)
    for (_, stage), steps in taken.items():
        missing = sorted({*range(max(steps))} - steps)
        if missing:
            which = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
            yield f'stage "{stage}" lacks {len(missing)} of its steps: {which}'


def _unlike_plan(folder: Path, ledger: Ledger) -> Iterator[str]:
    plan, steps = plan_of(folder), steps_of(ledger)
    if plan is None or plan.noise_multiplier == 0:  # an exact release is one line
        return
    metrics = (line.get("step", -1) for line in read_lines(folder / "metrics.jsonl"))
    known = plan.steps if _summary(folder) else 1 + max(metrics, default=-1)
    if len(steps) < known:
        yield f"it has {len(steps)} of the {known} steps that were taken"
    for event in ledger.events:
        if event.ledger != ledger.header.id or event.stage != "train":
            continue
        if event.step >= plan.steps or event.mechanism != plan.event("train", event.step).mechanism:
            yield f"step {event.step} is not as in plan.json: {event.describe()}"
            return


def _unlike_summary(folder: Path, ledger: Ledger, spent: float | None) -> Iterator[str]:
    summary = _summary(folder)
    if "epsilon" not in summary:
        return
    delta, stated = summary.get("delta", ledger.header.delta), float(summary["epsilon"])
    if spent is None or delta != ledger.header.delta:
        spent = ledger.epsilon(delta)
    if not math.isclose(spent, stated, rel_tol=SLACK):
        yield f"it adds up to epsilon {spent:.4g}, and done.json says {stated:.4g}"


def _summary(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "done.json") if (folder / "done.json").exists() else {}
    return found if isinstance(found, dict) else {}


def _verb(folder: Path) -> str:
    found = read_json(folder / "config.json")
    return str(found.get("verb")) if isinstance(found, dict) else ""
