"""What the scores of each command mean: one function a command makes findings of them.

A command keeps its scores for programs in `private/scores.json`, and what they mean in
`private/findings.json`. Runs made before there were findings are read by the same functions.
"""

import math
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from sfumato.files import read_json, read_lines
from sfumato.privacy.audit.lower import binomial_interval
from sfumato.results import FINDINGS, Audited, Curve, Finding, Findings, Limits, read_findings
from sfumato.runs import Run

Scores = Mapping[str, Any]

CONTROLS = {
    "k=0": "a student of unmoved public images",
    "public-only": "a student of public images, without the teacher",
    "real": "a student of the private images, without privacy",
}
WARMUP = {
    "warmup": "after the warm-up, which saw no private image",
    "drawn": "after drawn images alone",
    "dp": "after the private stage",
    "warmup_on_public_images_alone": "after the same warm-up on public images alone",
    "dp_from_public_images_alone": "and after private training from there",
    "dp_from_scratch": "private training without a warm-up",
}


def keep_scores(run: Run, verb: str, scores: Scores) -> None:
    """Write the scores of a command and what they mean; both are private."""
    run.write_json("private/scores.json", scores)
    keep_findings(run, verb, scores)


def keep_findings(run: Run, verb: str, scores: Scores = types.MappingProxyType({})) -> None:
    """Write what scores mean, and where the findings of the run's parts are."""
    run.write_json(FINDINGS, from_scores(verb, scores, run.path))


def keep_audit(run: Run, record: Scores) -> None:
    """Write what an auditor found in a run of its own, or beside what is known of the audited."""
    before = findings_of(run.path)
    run.write_json("private/audit.json", record)
    run.write_json(FINDINGS, before.with_audit(of_audit(record)))


def findings_of(path: Path) -> Findings:
    """What the run in this directory found. Only where private output was asked for."""
    if (path / FINDINGS).exists():
        return read_findings(path / FINDINGS)
    verb = str(_json(path / "config.json").get("verb", "train"))
    found = from_scores(verb, _json(path / "private" / "scores.json"), path)
    audit = _json(path / "private" / "audit.json")
    return found.with_audit(of_audit(audit)) if audit else found


def from_scores(verb: str, scores: Scores, path: Path) -> Findings:
    """What the scores of a run of this command mean."""
    warning = str(scores.get("warning") or "").strip()
    return Findings(
        found=(*MEANING.get(verb, of_train)(scores), *_cost(path)),
        notes=(warning,) if warning else (),
        parts=inner_runs(verb, path),
    )


def inner_runs(verb: str, path: Path) -> dict[str, str]:
    """The runs that a run of this command holds, each with findings of its own."""
    places = [p for folder in ("stages", "private") for p in sorted((path / folder).glob("*"))]
    if verb == "demo":
        places = [p for p in places if _json(p / "config.json").get("verb") not in (None, "audit")]
    elif verb == "reconstruct":  # one for each value of a setting
        places = [place for place in places if "=" in place.name]
    else:  # an audit that trained its target
        places = [place for place in places if verb == "audit" and place.name == "target"]
    return {place.name.replace("_", " "): str(place.relative_to(path)) for place in places}


def of_train(scores: Scores) -> Iterator[Finding]:
    """Test accuracy."""
    yield from _accuracies(scores, scores.get("test_images"), {"test_accuracy": "test accuracy"})


def of_release(scores: Scores) -> Iterator[Finding]:
    """Accuracy of student, teacher and controls; images beside others; and near copies."""
    named = {"test_accuracy": "test accuracy", "teacher_accuracy": "accuracy of the teacher"}
    yield from _accuracies(scores, scores.get("test_images"), named)
    yield from _accuracies(scores.get("controls") or {}, scores.get("test_images"), CONTROLS)
    near = scores.get("membership") or {}
    for key, name in (
        ("membership_auc", "are released images nearer to private ones than to test images?"),
        ("membership_auc_of_public", "the same of public images, which know nothing"),
    ):
        if (value := _limits(near.get(key))) is not None:
            yield Finding(kind="attack", name=name, value=value)
    yield from _distances(scores.get("quality") or {}, "private")


def of_warmup(scores: Scores) -> Iterator[Finding]:
    """Accuracy after each stage, of controls, and drawn images beside others."""
    older = {name: name.replace("_", " ") for name in scores if name.startswith("warmup_with_")}
    yield from _accuracies(scores, scores.get("test_images"), {**WARMUP, **older})
    yield from _distances(scores.get("fidelity") or {}, "test")


def of_invert(scores: Scores) -> Iterator[Finding]:
    """How often judges take guesses for the class; of a sweep, for every target."""
    of = f"of {scores.get('guesses')} guesses; {100 * scores.get('level', 0.95):g} % interval"
    rates = {
        "top1": ("guesses that judges take for the class", of),
        "floor_top1": ("public images that they take for it: the floor", "no attack at all"),
        "held_out_top1": ("real images that they name rightly: the ceiling", "of images unseen"),
    }
    majority = scores.get("majority") or {}
    found = [(*rates[key], majority[key]) for key in rates if majority.get(key)]
    for row in scores.get("rows") or []:
        kind = f"{row['target']}{', control' if row['control'] else ''}"
        name = f"guesses of {kind}, ε {float(row['epsilon']):.3g}, seed {row['seed']}"
        found.append((name, "that judges take for the class", row["attack"]))
    for name, means, entry in found:
        value = _limits(entry.get("mean"), entry.get("interval"))
        if value is not None:
            yield Finding(kind="accuracy", name=name, value=value, means=means)


def of_reconstruct(scores: Scores) -> Iterator[Finding]:
    """Accuracy of the heads, how well true images are told from others, and what that proves."""
    accuracy = _limits(scores.get("accuracy_of_heads"))
    if accuracy is not None:
        name, means = "accuracy of the heads under attack", "on average over heads"
        yield Finding(kind="accuracy", name=name, value=accuracy, means=means)
    rate = "tpr_at_1_percent_fpr"
    if "auc" in scores:
        yield Finding(
            kind="attack",
            name="which images is this head made of? (reconstruction)",
            value=_limits(scores["auc"], scores.get("auc_interval")),
            tpr_at_1_percent_fpr=_limits(scores.get(rate), scores.get(f"{rate}_interval")),
        )
    privacy = scores.get("privacy") or {}
    if "epsilon_proved" in privacy:
        told = {
            **privacy,
            "name": "reconstruction, one trial a head",
            "epsilon": privacy["epsilon_proved"],
            "thresholds": "chosen on one half of the trials, counted on the other",
            "assumes": "independent heads, which differ in one image",
        }
        yield _bound(told, privacy)


def of_audit(record: Scores) -> Findings:
    """What an auditor's record says: attacks, bounds beside the guarantee, and checks."""
    said = record.get("promise") or {}
    epsilon, delta = _number(said.get("epsilon")), _number(said.get("delta"))
    guarantee = None
    if epsilon is not None and math.isfinite(epsilon) and delta is not None:
        guarantee = Audited(
            epsilon=epsilon,
            delta=delta,
            relation=said.get("relation", "add-or-remove"),
            unit=said.get("unit", "example"),
            claimed=bool(said.get("claimed")),
        )
    return Findings(
        found=(
            *map(_attack, record.get("attacks") or []),
            *(_bound(bound, said) for bound in record.get("bounds") or []),
            *map(_check, record.get("checks") or []),
        ),
        target=None if record.get("target") is None else str(record["target"]),
        guarantee=guarantee,
        allowed=_curve(record.get("curve"), "fpr", "tpr"),
    )


MEANING: Mapping[str, Callable[[Scores], Iterator[Finding]]] = {
    "invert": of_invert,
    "reconstruct": of_reconstruct,
    "release": of_release,
    "train": of_train,
    "warmup": of_warmup,
}


def _accuracies(scores: Scores, count: Any, names: Mapping[str, str]) -> Iterator[Finding]:
    """Accuracies, with the exact interval where it is known of how many images."""
    for key, name in names.items():
        value = _number(scores.get(key))
        if value is None:
            continue
        limits, means = (value, None, None), "of test images; their number was not recorded"
        if isinstance(count, int) and count > 0:
            low, high = binomial_interval(min(count, round(value * count)), count)
            limits = (value, float(low), float(high))
            means = f"of {count} test images; 95 % interval (Clopper-Pearson)"
        yield Finding(kind="accuracy", name=name, value=limits, means=means)


def _distances(compared: Scores, real: str) -> Iterator[Finding]:
    """Frechet distances of several sets of images to real ones."""
    for name, part in compared.items():
        value = _limits(part.get("frechet")) if isinstance(part, dict) else None
        if value is not None:
            means = (
                f"{part['made_count']:,} {name.replace('_', ' ')} images to {part['real_count']:,} "
                f"{real} ones in features ({compared.get('features')}); lower is nearer"
            )
            yield Finding(
                kind="quality", name=f"Frechet distance, {name}", value=value, means=means
            )


def _attack(found: Scores) -> Finding:
    return Finding(
        kind="attack",
        name=str(found.get("name", "an attack")),
        value=_limits(found.get("auc")),
        tpr_at_1_percent_fpr=_limits(found.get("tpr_at_1_percent_fpr")),
        tpr_at_0_1_percent_fpr=_limits(found.get("tpr_at_0.1_percent_fpr")),
        roc=_curve(found.get("roc"), "fpr", "tpr"),
        band=_curve(found.get("roc"), "low", "high"),
    )


def _bound(bound: Scores, guarantee: Scores) -> Finding:
    """A bound beside the guarantee, if both speak of the same neighbours and the same delta."""
    kept, told = (
        is_kept(bound, guarantee),
        {"thresholds": "Thresholds: {}", "assumes": "Assumes: {}"},
    )
    return Finding(
        kind="bound",
        name=str(bound.get("name", "a bound")),
        value=(_number(bound.get("epsilon")) or 0.0, None, None),
        means=" ".join(text.format(f"{bound[k]}.") for k, text in told.items() if bound.get(k)),
        delta=_number(bound.get("delta")),
        confidence=_number(bound.get("confidence")),
        relation=str(bound.get("relation", "")),
        by_attack=bool(bound.get("by_attack", True)),
        guaranteed=None if kept is None else _number(guarantee.get("epsilon")),
        kept=kept,
    )


def is_kept(bound: Scores, guarantee: Scores) -> bool | None:
    """Whether what is proved lies within what is guaranteed.

    None if nothing is, or if the two speak of other neighbours or another delta.
    """
    epsilon = _number(guarantee.get("epsilon"))
    alike = all(bound.get(key) == guarantee.get(key) for key in ("relation", "delta"))
    if epsilon is None or math.isinf(epsilon) or not alike:
        return None
    return (_number(bound.get("epsilon")) or 0.0) <= epsilon


def _check(found: Scores) -> Finding:
    return Finding(
        kind="check",
        name=str(found.get("question") or found.get("name", "")),
        means=str(found.get("says", "")),
        passed=found.get("passed"),
        p_value=_number(found.get("p_value")),
    )


def _cost(path: Path) -> Iterator[Finding]:
    """The median time of a training step; the first are slower: they compile and allocate."""
    lines = read_lines(path / "private" / "metrics.jsonl")
    found = [(_number(line.get("seconds")), _number(line.get("batch"))) for line in lines]
    times = [(seconds, size) for seconds, size in found if seconds is not None]
    times = times[len(times) // 10 :]
    if times:
        each = [seconds / size for seconds, size in times if size]
        yield Finding(
            kind="cost",
            name="a training step",
            means="the median",
            seconds_per_step=median(seconds for seconds, _ in times),
            seconds_per_example=median(each) if each else None,
        )


def _json(path: Path) -> Scores:
    found = read_json(path) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _number(found: Any) -> float | None:
    """A number as it stands in a file, "inf" included; None for anything else."""
    if found == "inf":
        return math.inf
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and not math.isnan(found) else None


def _limits(value: Any, interval: Any = None) -> Limits | None:
    """A value with its interval, from `[value, low, high]` or from two places."""
    if isinstance(value, list | tuple):
        value, *interval = value
    found = _number(value)
    is_pair = isinstance(interval, list | tuple) and len(interval) == 2
    low, high = interval if is_pair else (None, None)
    return None if found is None else (found, _number(low), _number(high))


def _curve(found: Any, one: str, other: str) -> Curve | None:
    if not isinstance(found, dict) or not found.get(one) or not found.get(other):
        return None
    return tuple(map(float, found[one])), tuple(map(float, found[other]))
