"""What a run directory says, as plain data: the card that pages and programs are given.

Everything here comes from the open part of a run, which its ledger covers. What `private/` holds
is read in one other place, `scores`, and only when it is asked for. Epsilon is derived from the
ledger again, never taken from a summary. Nothing is written, locked or repaired, so a run that is
still training can be looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sfumato.config import to_json
from sfumato.errors import DamagedRun, PrivacyError, RunError
from sfumato.files import read_json
from sfumato.integrity import damage, plan_of, steps_of
from sfumato.privacy.accounting import epsilon
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.releases import Release
from sfumato.reporting.guarantee import Guarantee, guarantee_of, ledger_of
from sfumato.reporting.scores import findings_of
from sfumato.reporting.subject import Subject, brief, flags_of, lies_in_private, read_subject
from sfumato.results import Findings
from sfumato.resume_check import DATA, REPORT

PICTURES = ("*.png", "bundle/*.png")
POINTS = 16
STATED = ("epsilon", "delta", "unit", "relation", "neighbours")
"""What a summary says of the guarantee: that is taken from the ledger alone."""


@dataclass(frozen=True, kw_only=True)
class SpentEvents:
    """Events of one kind: how many, of which stage, and what each was, in words."""

    stage: str
    count: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Epsilon after this many uses of private data; those beyond `done` are planned."""

    steps: tuple[int, ...]
    epsilon: tuple[float, ...]
    done: int


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """One run. In card.json, infinity is the string "inf", and a part that is not there is null."""

    name: str
    """The name of the run's directory."""
    verb: str
    finished: bool
    settings: dict[str, Any]
    """config.json, flat; of a target or teacher that was given, what it was made with itself."""
    summary: dict[str, Any]
    """Numbers and words of done.json; empty while the run goes on."""
    guarantee: Guarantee | None
    """Without a ledger there is none: nothing in the open part was trained on private images."""
    damage: tuple[str, ...]
    """Why the ledger cannot be believed: what is missing or changed in it; empty if it is whole."""
    subject: Subject | None
    """The target of an attack, or the teacher that a release was given."""
    events: tuple[SpentEvents, ...]
    curve: Curve | None
    """None where epsilon is infinite, nothing was spent, or the ledger is damaged."""
    plan: dict[str, Any] | None
    """plan.json: rate, noise multiplier, norm bound and so on."""
    steps: tuple[int, int] | None
    """Steps taken and planned, where there is a plan."""
    stages: dict[str, dict[str, Any] | None]
    """Stages that were begun, and what each said at its end, but for its guarantee; None while it
    goes on."""
    pictures: tuple[str, ...]
    """Pictures of the open part, as paths in the run."""
    from_public: bool
    """Whether these were drawn by a generator of public images, which no ledger speaks of."""
    has_private: bool
    """Whether there is a `private/` with something to report."""
    private: Findings | None
    """What `private/` says; None unless it was asked for."""
    private_pictures: tuple[str, ...] = ()
    """Pictures of `private/`, where they were asked for."""
    command: str | None = None
    """What to type for the same again; None if this version has no such settings."""


def read_card(path: Path, *, include_private: bool = False) -> RunCard:
    """The card of the run in that directory, finished or not.

    Guarantee: without `include_private` no file under a folder called `private` is opened, and a
    run that itself lies in the `private/` of another is refused.
    """
    config = _config_of(path)
    if not include_private and lies_in_private(path):
        raise PrivacyError(
            f"{path} lies in the private/ of another run: all of it must not be shared. Add "
            "--include-private to see it on a page that says so."
        )
    finished = (path / "done.json").exists()
    ledger, verb = ledger_of(path), str(config["verb"])
    plan = plan_of(path)
    coming = [] if finished else _coming(plan, ledger)
    summary = read_json(path / "done.json") if finished else {}
    stages = _stages(path, verb)
    guarantee = None if ledger is None else guarantee_of(ledger, coming)
    problems = damage(path, ledger, guarantee and guarantee.epsilon)
    subject, settings = read_subject(
        path, verb, flags_of(config["config"]), include_private=include_private
    )
    return RunCard(
        name=path.resolve().name,
        verb=verb,
        finished=finished,
        settings={k: brief(v) for k, v in settings.items()},
        summary=_open(summary),
        guarantee=guarantee,
        damage=problems,
        subject=subject,
        events=() if ledger is None else _spent(ledger.releases, ledger.header.unit),
        curve=_curve(ledger, coming) if ledger is not None and not problems else None,
        plan=None if plan is None else to_json(plan),
        steps=None if plan is None or ledger is None else (len(steps_of(ledger)), plan.steps),
        stages=stages,
        pictures=_pictures(path, stages),
        from_public=bool((stages.get("split") or {}).get("public")),
        has_private=any(
            file.suffix in (".json", ".png") and file.name not in (DATA, *REPORT)
            for pattern in ("*", "*/private/*")
            for file in (path / "private").glob(pattern)
        ),
        private=_findings(path) if include_private else None,
        private_pictures=_private_pictures(path) if include_private else (),
    )


def _findings(path: Path) -> Findings:
    found = findings_of(path)
    return replace(found.with_parts(path, findings_of), target=brief(found.target))


def _private_pictures(path: Path) -> tuple[str, ...]:
    found = sorted((path / "private").glob("*.png"))
    return tuple(str(file.relative_to(path)) for file in found)


def _config_of(path: Path) -> Mapping[str, Any]:
    if not path.is_dir():
        there = "is a file" if path.exists() else "does not exist"
        raise RunError(f"{path} {there}. Give the directory of a run, such as runs/train-...")
    if not (path / "config.json").exists():
        inside = sorted(found.parent.name for found in path.glob("*/config.json"))
        hint = f" There are runs in it: {', '.join(inside[:4])}." if inside else ""
        raise RunError(f"{path} holds no run: config.json is missing.{hint}")
    config = read_json(path / "config.json")
    if not isinstance(config, dict) or not {"verb", "config"} <= set(config):
        raise DamagedRun(f"{path / 'config.json'} is damaged: it names no command and no settings.")
    return config


def _coming(plan: Plan | None, ledger: Ledger | None) -> list[Release]:
    """What is planned and not done yet."""
    if plan is None or ledger is None:
        return []
    return [plan.release("planned", step) for step in range(len(steps_of(ledger)), plan.steps)]


def _spent(releases: tuple[Release, ...], unit: str) -> tuple[SpentEvents, ...]:
    """Events in groups that are alike, in the order in which each group began."""
    counts: dict[tuple[str, str], int] = {}
    for release in releases:
        kind = (release.stage, release.describe(unit))
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(SpentEvents(stage=s, count=count, what=w) for (s, w), count in counts.items())


def _curve(ledger: Ledger, coming: list[Release]) -> Curve | None:
    releases, header = [*ledger.releases, *coming], ledger.header
    if not releases or any(release.is_exact for release in releases):
        return None
    done, count = len(ledger.releases), len(releases)
    shares = (*(2.0**-i for i in range(5, 9)), *(i / POINTS for i in range(1, POINTS + 1)))
    marks = sorted({done, *(max(1, round(count * share)) for share in shares)} - {0})
    prices = [
        epsilon(releases[:mark], header.delta, header.relation, cells_for=count) for mark in marks
    ]
    return Curve(steps=(0, *marks), epsilon=(0.0, *prices), done=done)


def _open(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary without what is said elsewhere, and without whole paths."""
    return {k: brief(v) for k, v in summary.items() if k not in ("run", "text", "bundle")}


def _stages(path: Path, verb: str) -> dict[str, dict[str, Any] | None]:
    places = [place for place in (path / "stages").glob("*") if place.is_dir()]
    places.sort(key=lambda place: place.stat().st_mtime)
    ends = {place.name: place / "done.json" for place in places}
    found: dict[str, dict[str, Any] | None] = {}
    for name, end in ends.items():
        # Of heads it says how good they are on images that no ledger covers.
        told = read_json(end) if end.exists() and verb != "reconstruct" else {}
        told = {key: value for key, value in _open(told).items() if key not in STATED}
        found[name] = told if end.exists() else None
    return found


def _pictures(path: Path, stages: Mapping[str, Mapping[str, Any] | None]) -> tuple[str, ...]:
    """Pictures of the open part, a generator's among them. A link out of it is none."""
    found = [file for pattern in PICTURES for file in sorted(path.glob(pattern))]
    found += _samples(path, (stages.get("generator") or {}).get("images_at_best"))
    root = path.resolve()
    real = [file for file in found if file.resolve().is_relative_to(root)]
    names = [file for file in real if "private" not in file.resolve().relative_to(root).parts]
    return tuple(str(file.relative_to(path)) for file in names)


def _samples(path: Path, kept: int | None) -> list[Path]:
    """What a generator drew at last, or else what the weights that were kept draw.

    A generator is looked at again and again while it trains, and looks that find it copying public
    images do not count. While none is kept yet, it is the last look.
    """
    drawn = sorted((path / "stages" / "sample" / "samples").glob("*.png"))
    looks = sorted((path / "stages" / "generator" / "samples").glob("*.png"))
    if kept is not None:
        looks = [look for look in looks if look.stem == f"{kept:09d}"]
    return (drawn or looks)[-1:]
