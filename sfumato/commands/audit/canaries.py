"""What the canaries of a finished `sfumato train --canaries` run say about its guarantee."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from sfumato.commands.audit.record import joint_confidence, share_error
from sfumato.commands.train.canaries import read_canaries, tensor_hash
from sfumato.config import read_finished
from sfumato.errors import RunError
from sfumato.files import read_json, read_lines
from sfumato.privacy.audit.checks import CanaryObservations, Check, check_buffers, check_mechanism
from sfumato.privacy.audit.lower import Bound, many_run_bound, one_run_bound
from sfumato.privacy.audit.lower_noise import curve_bound, likelihood_scores, noise_bound
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger
from sfumato.training.canaries import CanaryInclusion, Observations


@dataclass(frozen=True, kw_only=True)
class CanaryFindings:
    """Bounds, the scores that they rest on, and checks of the mechanism."""

    bounds: list[Bound]
    attacks: dict[str, tuple[np.ndarray, np.ndarray]] = field(repr=False)
    """By name of the attack, scores of canaries that were in and of those that were not."""
    checks: list[Check]


def has_canaries(path: Path) -> bool:
    """Whether the run was trained with canaries."""
    return (path / "private" / "canaries.json").exists()


def examine_canaries(path: Path, *, confidence: float) -> CanaryFindings:
    """What the canaries of a finished run prove.

    Guarantee: if the run keeps its own, some bound lies above the ledger's epsilon with
    chance at most 1 - confidence, for all bounds together; and some check fails with no more than
    that.
    """
    canaries = _finished(path)
    scores = score_canaries(path, canaries)
    pair = _apart(scores, canaries)
    what = "likelihood ratio" if canaries.kind == "gradient" else "loss"
    return CanaryFindings(
        bounds=_bounds(path, canaries, scores, confidence),
        attacks={f"{what} of {canaries.kind} canaries": pair},
        checks=check_run(path, confidence=confidence),
    )


def check_run(path: Path, *, confidence: float) -> list[Check]:
    """Whether a finished run did what its plan says, as far as its canaries can tell."""
    canaries, found = _finished(path), []
    if canaries.kind == "gradient":
        found = check_mechanism(read_seen(path, canaries), confidence=confidence)
    return [*found, _buffers(path)]


def score_canaries(path: Path, canaries: CanaryInclusion) -> np.ndarray:
    """How much each canary looks as if it was in: how likely its steps are, or its loss's fall."""
    if canaries.kind == "gradient":
        return likelihood_scores(read_seen(path, canaries))
    start, end = (
        np.array(read_json(path / "private" / f"canary_{when}.json")["losses"])
        for when in ("start", "end")
    )
    return np.nan_to_num(start - end, nan=-math.inf)


def _bounds(
    path: Path, canaries: CanaryInclusion, scores: np.ndarray, confidence: float
) -> list[Bound]:
    """Every bound gets its share of the error, so that all of them hold together."""
    coins, gradient = np.array(canaries.included), canaries.kind == "gradient"
    plan = _plan(path)
    curved = gradient and plan.noise_decay == 1
    each: Any = {
        "delta": Ledger.from_records(read_lines(path / "ledger.jsonl")).header.delta,
        "confidence": share_error(confidence, 1 + 2 * gradient + curved),
    }
    found = [one_run_bound(scores, coins, name=f"{canaries.kind} canaries, one run", **each)]
    if gradient:
        pair, assumes = _apart(scores, canaries), "noise of different canaries is independent"
        found.append(many_run_bound(*pair, name="many canaries", assumes=assumes, **each))
        if curved:
            found.append(curve_bound(*pair, plan, **each))
        found.append(noise_bound(read_seen(path, canaries), plan, **each))
    return joint_confidence(found, confidence)


def _finished(path: Path) -> CanaryInclusion:
    if not has_canaries(path):
        raise RunError(f"{path} has no canaries. Train with sfumato train --canaries N.")
    if not (path / "done.json").exists():
        raise RunError(f"{path} is not finished: repeat its command first.")
    return read_canaries(path)


def _apart(scores: np.ndarray, canaries: CanaryInclusion) -> tuple[np.ndarray, np.ndarray]:
    included = np.array(canaries.included)
    return scores[included], scores[~included]


def read_seen(path: Path, canaries: CanaryInclusion) -> CanaryObservations:
    """What every step of a run let be seen of its gradient canaries."""
    plan = _plan(path)
    rows = Observations.read(path / "private" / "canary_steps.bin", len(canaries))
    if len(rows) != plan.steps:
        raise RunError(f"{path} has {plan.steps} steps, and canaries saw {len(rows)} of them.")
    rows_seen = ~np.isnan(rows["seen"]).any(axis=1)
    if not rows_seen.any():
        raise RunError(f"{path}: no step was seen by its canaries.")
    # A step whose effect was lost was not seen, and says nothing of its batch either.
    kept = np.flatnonzero(rows_seen)
    return CanaryObservations(
        seen=rows["seen"][kept].astype(np.float64),
        present=rows["present"][kept],
        sizes=rows["size"][kept],
        included=np.array(canaries.included),
        noise=np.array([plan.at(int(step)).noise_multiplier for step in kept]),
        rate=plan.rate,
        others=(plan.size or 0) - len(canaries),
    )


def _plan(path: Path) -> Plan:
    return read_finished(Plan, read_json(path / "plan.json"))


def _buffers(path: Path) -> Check:
    before = read_json(path / "private" / "canary_start.json")["buffers"]
    artefact = load_file(path / "model.safetensors")
    after = {name: tensor_hash(artefact[name]) for name in before if name in artefact}
    return check_buffers(before, after)
