"""Whether a finished run can be believed: its ledger and its weights, by what lies beside them.

Everybody who reads a run asks here. A ledger is compared with its own count, the plan, the
settings, the summary, and the copy of it in the weights' own note; weights with the digest in that
note. So a run can be checked without done.json too: the weights and the ledger are enough.

What is found is loss and change in one place: a file that was cut, a number that was edited,
weights that were exchanged. It is no signature: anyone who forges all of them forges the run.

Weights of the first versions have no digest, or no note, and are used with a warning. A run is not
so old if "neighbours" stands in its ledger, in the ledger's copy in the note, or in done.json, or
if model.json or a digest stands in the weights: `_is_of_today`. A run from which all of these were
taken cannot be told from an old one; nor can weights without a note beside a ledger alone, for
people may save their own.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from warnings import warn

from sfumato.config import dumps, read_finished
from sfumato.errors import ConfigError, DamagedRun, DataError, SfumatoError, SfumatoWarning
from sfumato.files import read_json, read_lines
from sfumato.lineage import (
    DESCRIPTION,
    WeightsFile,
    home_of,
    ledger_lines,
    read_weights,
    run_settings,
    stage_and_run,
)
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader

KEEP_LEDGERS = ("demo", "release", "train", "warmup")
"""Commands whose finished runs have one."""
SLACK = 1e-3
"""Accountants of several versions differ by less, in parts."""
STATED = ("data", "delta", "relation", "unit", "neighbours")
"""What of a ledger's header a summary repeats."""
WEIGHTS = "model.safetensors"


def require_whole(folder: Path) -> Ledger | None:
    """The ledger of a run, a stage, or a folder with the weights of one; None if it has none.

    Guarantee: nothing that lies beside ledger and weights speaks against them. Otherwise a
    `DamagedRun` says what does.
    """
    try:
        lines = ledger_lines(folder)
        ledger = Ledger.from_records(lines) if lines else None
        problems = damage(home_of(folder), ledger)
    except SfumatoError as problem:
        raise DamagedRun(f"{folder} is damaged: {problem}") from problem
    if problems:
        why = "; ".join(problem.rstrip(".") for problem in problems)
        raise DamagedRun(
            f"{folder} is damaged, so nobody knows what its model gives away: {why}. Copy the run "
            "again from where it was made."
        )
    return ledger


def damage(folder: Path, ledger: Ledger | None, spent: float | None = None) -> tuple[str, ...]:
    """Why a run or a stage cannot be believed; nothing where it is whole.

    `spent` is the ledger's epsilon, where it is known: to price it takes a while.
    """
    found = [*_lost(folder)]
    if ledger is not None:
        found += [*_gaps(ledger), *_unlike_plan(folder, ledger), *_unlike_settings(folder, ledger)]
        found += _unlike_summary(folder, ledger, spent)
    found += _weights(folder)
    for stage in sorted((folder / "stages").glob("*")):
        lines = read_lines(stage / "ledger.jsonl")
        inner = damage(stage, Ledger.from_records(lines) if lines else None)
        found += [f'stage "{stage.name}": {problem}' for problem in inner]
    return tuple(found)


def plan_of(folder: Path) -> Plan | None:
    """plan.json, where this version can read it: what was done stands in the ledger."""
    try:
        return read_finished(Plan, read_json(folder / "plan.json"))
    except (ConfigError, FileNotFoundError):
        return None


def steps_of(ledger: Ledger) -> set[int]:
    """Steps of this run: those of the weights that it began with are not of its plan."""
    own = (release for release in ledger.releases if release.ledger == ledger.header.id)
    return {release.step for release in own if release.stage == "train"}


def _lost(folder: Path) -> Iterator[str]:
    """A ledger that must have been there."""
    if ledger_lines(folder) or run_settings(folder).get("verb") not in KEEP_LEDGERS:
        return
    if any((folder / "stages").glob("*/ledger.jsonl")):  # each stage has its own
        return
    if "epsilon" in _summary(folder):
        yield "there is no ledger, and done.json says that there was one"
    elif (folder / "plan.json").exists() and read_lines(folder / "metrics.jsonl"):
        yield "there is no ledger, and steps of plan.json were taken"


def _gaps(ledger: Ledger) -> Iterator[str]:
    """Steps that are missing before others of the same stage."""
    taken: dict[tuple[str, str], set[int]] = {}
    for release in ledger.releases:
        taken.setdefault((release.ledger, release.stage), set()).add(release.step)
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
    for release in ledger.releases:
        if release.ledger != ledger.header.id or release.stage != "train":
            continue
        if (
            release.step >= plan.steps
            or release.mechanism != plan.release("train", release.step).mechanism
        ):
            yield f"step {release.step} is not as in plan.json: {release.describe()}"
            return


def _unlike_settings(folder: Path, ledger: Ledger) -> Iterator[str]:
    """The header says otherwise than the settings that the run was made with."""
    records = (run_settings(place) for place in stage_and_run(folder))
    settings = next(filter(None, records), {}).get("config", {})
    if settings.get("teacher") is not None:  # the teacher's own hold
        return
    wanted = {name: settings[name] for name in ("delta", "unit", "relation") if name in settings}
    if "secure" in settings:
        wanted["noise"] = "chacha20" if settings["secure"] else "philox"
    if "noise_seed" in settings:
        wanted["fixed_seed"] = settings["noise_seed"] is not None
    yield from _unlike(ledger.header, wanted, "config.json")


def _unlike_summary(folder: Path, ledger: Ledger, spent: float | None) -> Iterator[str]:
    summary = _summary(folder)
    if "epsilon" not in summary:
        return
    stated = {name: summary[name] for name in STATED if name in summary}
    yield from _unlike(ledger.header, stated, "done.json")
    delta, stated = summary.get("delta", ledger.header.delta), float(summary["epsilon"])
    if spent is None or delta != ledger.header.delta:
        spent = ledger.epsilon(delta)
    if not math.isclose(spent, stated, rel_tol=SLACK):
        yield f"it adds up to epsilon {spent:.4g}, and done.json says {stated:.4g}"


def _unlike(header: LedgerHeader, wanted: Any, source: str) -> Iterator[str]:
    """What else the header says than another file; what that does not say is not compared."""
    for name in (field.name for field in fields(header)):
        found, known = getattr(header, name), wanted.get(name)
        if known is not None and found != known:
            yield f"the ledger's header says {name} {found}, and {source} says {known}"


def _weights(folder: Path) -> Iterator[str]:
    """What speaks against the weights in a folder, or, by their note, against its ledger."""
    file = folder / WEIGHTS
    if not file.is_file():
        return
    try:
        weights = read_weights(file)
    except DataError as problem:
        yield str(problem)
        return
    if weights.nan:
        yield f'"{weights.nan}" in {WEIGHTS} is NaN'
    lines = ledger_lines(folder)
    if weights.note is not None:
        yield from _unlike_note(folder, weights, lines)
        return
    places = [run_settings(place).get("verb") for place in stage_and_run(folder)]
    # Whatever has a model.json was saved with a note; earlier versions wrote neither.
    described = weights.made is not None or (folder / DESCRIPTION).exists()
    if (described and (lines or run_settings(home_of(folder)))) or (
        _is_of_today(folder, weights, lines) and any(verb in KEEP_LEDGERS for verb in places)
    ):
        yield f"{WEIGHTS} has no note of the run that made it: the weights were exchanged"
    elif lines:
        _say_unchecked(file)


def _unlike_note(folder: Path, weights: WeightsFile, lines: list[dict[str, Any]]) -> Iterator[str]:
    note = weights.note
    assert note is not None
    model, today = folder / DESCRIPTION, _is_of_today(folder, weights, lines)
    if note.tensors and note.tensors != weights.digest:
        yield f"the tensors in {WEIGHTS} are not those that its note is about"
    elif not note.tensors and today:
        yield f"the note in {WEIGHTS} has no digest of the tensors: it was taken out"
    elif not note.tensors and lines:
        _say_unchecked(folder / WEIGHTS)
    if model.exists() and weights.made is None and today:
        yield f"{WEIGHTS} does not say what {DESCRIPTION} says: that was taken out"
    elif model.exists() and weights.made is not None and weights.made != read_json(model):
        yield f"{DESCRIPTION} says otherwise than the note in {WEIGHTS}"
    noted = note.lines
    if noted and not lines:
        # Weights may be taken along without a ledger; then nothing is guaranteed.
        if (home_of(folder) / "ledger.jsonl").exists() or run_settings(home_of(folder)):
            yield f"there is no ledger, and the note in {WEIGHTS} has {len(noted)} lines of one"
    elif lines:
        yield from _unlike_copy(Ledger.from_records(lines), noted)


def _is_of_today(folder: Path, weights: WeightsFile, lines: list[dict[str, Any]]) -> bool:
    """Whether something here shows a version that left note, digest and model.json in weights."""
    note = weights.note
    noted, digest = ([], "") if note is None else (note.lines, note.tensors)
    places = (*lines[:1], *noted[:1], _summary(home_of(folder)))
    named = any("'neighbours':" in str(place) for place in places)  # a stranger's may be anything
    return named or bool(digest) or weights.made is not None


def _unlike_copy(ledger: Ledger, noted: list[dict[str, Any]]) -> Iterator[str]:
    """What the copy of the ledger in the weights' note has otherwise, or more."""
    source = f"the note in {WEIGHTS}"
    if not noted:
        yield f"{source} knows of no ledger, and there is one: the weights are of another run"
        return
    copy = Ledger.from_records(noted)
    header = {field.name: getattr(copy.header, field.name) for field in fields(copy.header)}
    yield from _unlike(ledger.header, header, source)
    lines, others = ({dumps(dict(line)) for line in one.records()[1:]} for one in (copy, ledger))
    if lost := lines - others:
        yield f"{len(lost)} of the {len(lines)} lines in {source} are not in the ledger"


def _say_unchecked(file: Path) -> None:
    warn(
        f"{file} cannot be checked: an earlier version of sfumato made it, and kept no digest of "
        "the weights. Whether they are those of the run, nobody knows.",
        SfumatoWarning,
        stacklevel=2,
    )


def _summary(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "done.json") if (folder / "done.json").exists() else {}
    return found if isinstance(found, dict) else {}
