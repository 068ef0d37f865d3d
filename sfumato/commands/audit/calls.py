"""`sfumato audit trainer module:function`: a training of your own, called again and again."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sfumato.attacks.retraining_audit import (
    Trainer,
    bound_of_trials,
    check_runs,
    check_trials,
    run_trial,
    set_canary_aside,
    split_trials,
)
from sfumato.commands.audit.record import AuditRecord, describe_attack, guarantee_record
from sfumato.data.load import load_images
from sfumato.errors import ConfigError, DataError
from sfumato.files import append_line, read_lines, sha256
from sfumato.models.zoo import files_beside_you, find_function
from sfumato.privacy.budget import check_delta
from sfumato.runs import Run
from sfumato.settings.audit import AuditTrainer

TRIALS = "trials.jsonl"


def audit_calls(config: AuditTrainer, run: Run) -> AuditRecord:
    """Call the trainer, keep each trial as it comes, and bound epsilon from below."""
    check_runs(config.runs)
    train = find_trainer(config.trainer)
    images = load_images(config.data, "train", **config.source.loading)
    check_delta(config.delta, len(images))
    rest, canary = set_canary_aside(images, config.seed)
    try:
        with files_beside_you():  # a trainer may import what it needs when it is called
            scores = _trials(
                config, run, lambda number: run_trial(train, rest, canary, number, config.seed)
            )
        bound = bound_of_trials(scores, delta=config.delta, confidence=config.confidence)
    except DataError:  # the trainer has to be fixed: what it did until then is of no use
        (run.private / TRIALS).unlink(missing_ok=True)
        raise
    return AuditRecord(
        target=f"{config.trainer} on {images.name}",
        bounds=[bound],
        guarantee=_guarantee(config),
        attacks=[
            describe_attack("log-odds of the canary", *split_trials(scores), config.confidence)
        ],
    )


def _trials(config: AuditTrainer, run: Run, call: Callable[[int], float]) -> dict[int, float]:
    """The score of every call, by its number: those made before, by the same code, and new ones."""
    kept, code = run.private / TRIALS, code_of(config.trainer)
    lines = read_lines(kept, repair=True)
    if any(line.get("code") != code for line in lines):
        run.log(f"{config.trainer} has changed: {len(lines)} calls of it as it was do not count")
        kept.unlink()
        lines = []
    elif lines:
        run.log(f"{len(lines)} calls of {config.trainer} kept from before")
    scores = {line["run"]: float(line["score"]) for line in lines}
    for number in range(config.runs):
        if number not in scores:
            scores[number] = call(number)
            record = {"run": number, "score": scores[number], "code": code}
            append_line(kept, record, durable=True)
            check_trials(scores)
        if (number + 1) % max(1, config.runs // 10) == 0:
            run.log(f"{number + 1} of {config.runs} calls of {config.trainer}")
    return scores


def code_of(name: str) -> str:
    """A hash of the file that a trainer is in; what that file imports may change unseen."""
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return "" if file is None else sha256(Path(file))


def _guarantee(config: AuditTrainer) -> dict[str, Any] | None:
    if config.epsilon is None:
        return None
    return {**guarantee_record(config.epsilon, config.delta), "claimed": True}  # there is no ledger


def find_trainer(name: str) -> Trainer:
    """The function that module:function names."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f'--trainer "{name}": give it as module:function.')
    found = find_function(module, function)
    if not callable(found):
        raise ConfigError(f"--trainer {name} is a {type(found).__name__}, not a function.")
    return cast("Trainer", found)
