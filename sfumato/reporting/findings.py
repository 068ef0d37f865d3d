"""What the `private/` of a run says: scores, attacks, audits, and pictures that must not be shared.

Every verb scores in its own words; here they become the same few things, so that a page can set
them beside each other: rates with intervals, attacks with their ROC, lower bounds on epsilon, and
checks. Nobody calls this without having been asked for what is private.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from sfumato.files import read_json, read_lines
from sfumato.privacy.audit.checks import Check
from sfumato.reporting.found import Attack, Findings, Limits, Promised, Proved, Rate
from sfumato.reporting.subject import brief


def find(path: Path) -> Findings:
    """What `private/` of the run holds, and that of its stages and of the attackers in it."""
    scores = _json(path / "private" / "scores.json")
    places = [(name, at) for name, at in _places(path) if CONTROLS.get(at.name) not in scores]
    places.sort(key=lambda place: _json(place[1] / "config.json").get("verb") == "audit")
    parts, seen = [_own(path, "", own=True)], [_json(path / "private" / "audit.json")]
    for name, place in places:
        audit = _json(place / "private" / "audit.json")
        # An auditor leaves a copy with the run it audited, which came first: there it is told.
        parts.append(_own(place, name, own=_is_whole(path, place), told=audit in seen))
        seen.append(audit)
    own = parts[0]
    return Findings(
        rates=tuple(rate for part in parts for rate in part.rates),
        attacks=tuple(attack for part in parts for attack in part.attacks),
        bounds=tuple(bound for part in parts for bound in part.bounds),
        checks=tuple(check for part in parts for check in part.checks),
        allowed=own.allowed,
        audited=brief(own.audited),
        promised=own.promised,
        seconds_per_step=own.seconds_per_step,
        seconds_per_example=own.seconds_per_example,
        pictures=tuple(
            str(found.relative_to(path)) for found in sorted((path / "private").glob("*.png"))
        ),
        notes=tuple(note for part in parts for note in part.notes),
    )


def _places(path: Path) -> Iterator[tuple[str, Path]]:
    """Whole runs and studies among the stages, and runs in `private/`; each may have stages."""
    for folder in (path / "stages", path / "private"):
        for place in sorted(folder.glob("*")):
            if place.name not in ("judges", "repeats") and (place / "private").is_dir():
                # The numbers of a stage of training stand in the run's own scores.
                named = folder.name == "private" or "=" in place.name or _is_whole(path, place)
                if named:
                    yield place.name, place
                for name, inner in _places(place):
                    yield f"{place.name}: {name}" if named else name, inner


def _is_whole(path: Path, place: Path) -> bool:
    """Whether a stage of this run is a run of its own, which this run's ledger covers."""
    return place.parent == path / "stages" and (place / "config.json").exists()


def read_audit(audit: Mapping[str, Any], *, own: bool = True) -> Findings:
    """What an audit's record says, of the run itself (`own`) or of a model that it attacked."""
    promise = audit.get("promise") or {}
    return Findings(
        attacks=tuple(map(_attack, _list(audit, "attacks"))),
        bounds=tuple(_proved(bound, promise, own=own) for bound in _list(audit, "bounds")),
        checks=tuple(
            Check(
                name=str(check.get("name", "")), question=str(check.get("question", "")),
                passed=check.get("passed"), p_value=_value(check.get("p_value")),
                says=str(check.get("says", "")),
            )
            for check in _list(audit, "checks")
        ),
        allowed=_curve(audit.get("curve")),
        audited=None if "target" not in audit else str(audit["target"]),
        promised=_promised(promise),
    )  # fmt: skip


def _promised(promise: Mapping[str, Any]) -> Promised | None:
    """A promise that says something; none is without its delta."""
    epsilon, delta = _value(promise.get("epsilon")), _value(promise.get("delta"))
    if epsilon is None or math.isinf(epsilon) or delta is None:
        return None
    relation = str(promise.get("relation", "add-or-remove"))
    unit = str(promise.get("unit", "example"))
    return Promised(epsilon=epsilon, delta=delta, relation=relation, unit=unit)


def is_kept(bound: Mapping[str, Any], promise: Mapping[str, Any]) -> bool | None:
    """Whether what is proved lies within what is promised.

    None if nothing is, or if the two speak of other neighbours or another delta.
    """
    promised = _value(promise.get("epsilon"))
    alike = all(bound.get(key) == promise.get(key) for key in ("relation", "delta"))
    if promised is None or math.isinf(promised) or not alike:
        return None
    return (_value(bound.get("epsilon")) or 0.0) <= promised


def _own(path: Path, name: str, *, own: bool, told: bool = False) -> Findings:
    """What one `private/` folder says, with the name of its stage before it; an audit once."""
    scores = _json(path / "private" / "scores.json")
    audit = read_audit({} if told else _json(path / "private" / "audit.json"), own=own)
    prefix = f"{name.replace('_', ' ')}: " if name else ""
    warning = str(scores.get("warning", "")).strip()
    times = _times(path)
    return replace(
        audit,
        rates=tuple(_rates(scores, prefix)),
        attacks=(*_attacks_in(scores, prefix), *(_named(prefix, a) for a in audit.attacks)),
        bounds=(*_bounds_in(scores, prefix), *(_named(prefix, b) for b in audit.bounds)),
        seconds_per_step=_median([seconds for seconds, _ in times]),
        seconds_per_example=_median([seconds / size for seconds, size in times if size]),
        notes=(prefix + warning,) if warning else (),
    )


Named = TypeVar("Named", Attack, Proved)


def _named(prefix: str, found: Named) -> Named:
    return replace(found, name=prefix + found.name)


def _json(path: Path) -> Mapping[str, Any]:
    found = read_json(path) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _list(part: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [entry for entry in part.get(name) or [] if isinstance(entry, dict)]


def _value(found: Any) -> float | None:
    """A number as it stands in a file, "inf" included; None for anything else."""
    if found == "inf":
        return math.inf
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and not math.isnan(found) else None


def _limits(value: Any, interval: Any = None) -> Limits | None:
    """A value with its interval, from `[value, low, high]` or from two places."""
    if isinstance(value, list | tuple):
        value, *interval = value
    found = _value(value)
    low, high = (
        interval if isinstance(interval, list | tuple) and len(interval) == 2 else (None,) * 2
    )
    return None if found is None else (found, _value(low), _value(high))


UNKNOWN = "of how many test images is not recorded, so there is no interval"
ACCURACIES = {
    "test_accuracy": "test accuracy",
    "teacher_accuracy": "test accuracy of the teacher",
    "target_test_accuracy": "test accuracy of the target",
    "warmup": "test accuracy after the warm-up",
    "dp": "test accuracy after private training",
    "drawn": "test accuracy after drawn images alone",
    "warmup_on_public_images_alone": "the same warm-up on public images alone",
    "dp_from_public_images_alone": "and after private training from there",
    "dp_from_scratch": "private training without a warm-up",
    "accuracy_of_heads": "accuracy of the heads under attack",
}
CONTROLS = {"public-alone-dp": "dp_from_public_images_alone", "scratch": "dp_from_scratch"}
"""Places of controls of `sfumato warmup`, and where the run's own scores have the same numbers."""


def _rates(scores: Mapping[str, Any], prefix: str) -> Iterator[Rate]:
    """Accuracies, with the exact interval where it is known of how many images."""
    from sfumato.privacy.audit.lower import binomial_interval

    controls = scores.get("controls")
    named = {**scores, **(controls if isinstance(controls, dict) else {})}
    tested = {k: v for k, v in ACCURACIES.items() if _value(named.get(k)) is not None}
    tested |= {k: f"control {k}" for k in controls or {} if k not in tested}
    tested |= {k: k.replace("_", " ") for k in scores if k.startswith("warmup_with_width")}
    count = scores.get("test_images")
    for key, name in tested.items():
        value = _value(named[key])
        if value is None:
            continue
        if isinstance(count, int) and count > 0 and key != "accuracy_of_heads":
            low, high = binomial_interval(min(count, round(value * count)), count)
            of = f"of {count} test images; 95 % interval (Clopper-Pearson)"
            yield Rate(name=prefix + name, value=(value, float(low), float(high)), of=of)
        else:
            of = "on average over heads" if key == "accuracy_of_heads" else UNKNOWN
            yield Rate(name=prefix + name, value=(value, None, None), of=of)
    yield from _inversion_rates(scores, prefix)


def _inversion_rates(scores: Mapping[str, Any], prefix: str) -> Iterator[Rate]:
    majority = scores.get("majority")
    if not isinstance(majority, dict):
        return
    of = f"of {scores.get('guesses')} guesses; {100 * scores.get('level', 0.95):g} % interval"
    words = {
        "top1": ("guesses that judges take for the class", of),
        "floor_top1": ("public images that they take for it: the floor", "no attack at all"),
        "held_out_top1": ("real images that they name rightly: the ceiling", "of images unseen"),
    }
    for key, (name, share) in words.items():
        entry = majority.get(key)
        value = _limits(entry.get("mean"), entry.get("interval")) if entry else None
        if value is not None:
            yield Rate(name=prefix + name, value=value, of=share)


def _attacks_in(scores: Mapping[str, Any], prefix: str) -> Iterator[Attack]:
    """The attack of `sfumato reconstruct`, and the look for near copies of `sfumato release`."""
    if "auc" in scores:
        yield Attack(
            name=f"{prefix}which images is this head made of? (reconstruction)",
            auc=_limits(scores["auc"], scores.get("auc_interval")),
            tpr_at_1_percent_fpr=_limits(
                scores.get("tpr_at_1_percent_fpr"), scores.get("tpr_at_1_percent_fpr_interval")
            ),
            tpr_at_0_1_percent_fpr=None, roc=None,
        )  # fmt: skip
    near = scores.get("membership")
    for key, name in (
        ("membership_auc", "are released images nearer to private ones than to test images?"),
        ("membership_auc_of_public", "the same of public images, which know nothing"),
    ):
        value = _limits(near.get(key)) if isinstance(near, dict) else None
        if value is not None:
            yield Attack(
                name=prefix + name, auc=value, tpr_at_1_percent_fpr=None,
                tpr_at_0_1_percent_fpr=None, roc=None,
            )  # fmt: skip


def _bounds_in(scores: Mapping[str, Any], prefix: str) -> Iterator[Proved]:
    """What the reconstruction of heads proves."""
    privacy = scores.get("privacy")
    if not isinstance(privacy, dict) or "epsilon_proved" not in privacy:
        return
    found = {
        **privacy,
        "name": f"{prefix}reconstruction, one trial a head",
        "epsilon": privacy["epsilon_proved"],
        "thresholds": "chosen on one half of the trials, counted on the other",
        "assumes": "independent heads, which differ in one image",
    }
    yield _proved(found, privacy, own=not prefix)


def _proved(bound: Mapping[str, Any], promise: Mapping[str, Any], *, own: bool) -> Proved:
    """A bound beside the promise, if both speak of the same neighbours and the same delta."""
    kept = is_kept(bound, promise)
    return Proved(
        name=str(bound.get("name", "a bound")), own=own,
        by_attack=bool(bound.get("by_attack", True)),
        epsilon=_value(bound.get("epsilon")) or 0.0,
        promised=None if kept is None else _value(promise.get("epsilon")), kept=kept,
        delta=_value(bound.get("delta")), confidence=_value(bound.get("confidence")),
        relation=str(bound.get("relation", "")), thresholds=str(bound.get("thresholds", "")),
        assumes=str(bound.get("assumes", "")),
    )  # fmt: skip


def _attack(found: Mapping[str, Any]) -> Attack:
    return Attack(
        name=str(found.get("name", "an attack")), auc=_limits(found.get("auc")),
        tpr_at_1_percent_fpr=_limits(found.get("tpr_at_1_percent_fpr")),
        tpr_at_0_1_percent_fpr=_limits(found.get("tpr_at_0.1_percent_fpr")),
        roc=_curve(found.get("roc")), band=_curve(found.get("roc"), "low", "high"),
    )  # fmt: skip


def _curve(
    found: Any, one: str = "fpr", other: str = "tpr"
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if not isinstance(found, dict) or not found.get(one) or not found.get(other):
        return None
    return tuple(map(float, found[one])), tuple(map(float, found[other]))


def _times(path: Path) -> list[tuple[float, float | None]]:
    """Seconds of each training step, and how many examples it had, where that is known."""
    lines = read_lines(path / "private" / "metrics.jsonl")
    found = [(_value(line.get("seconds")), _value(line.get("batch"))) for line in lines]
    times = [(seconds, size) for seconds, size in found if seconds is not None]
    return times[len(times) // 10 :]  # the first are slower: they compile, allocate and test


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
