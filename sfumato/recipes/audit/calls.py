"""`sfumato audit --trainer module:function`: somebody's own training, called again and again."""

from typing import TYPE_CHECKING, Any, cast

from sfumato.errors import ConfigError
from sfumato.recipes.audit.record import AuditRecord, describe_attack, promised
from sfumato.recipes.audit.settings import Config
from sfumato.runs import Run

if TYPE_CHECKING:
    from sfumato.attack.retrain import Trainer

TRIALS = "trials.jsonl"


def audit_calls(config: Config, run: Run) -> AuditRecord:
    """Call the trainer, keep each trial as it comes, and bound epsilon from below."""
    from sfumato.attack.retrain import bound_of_trials, check_runs, set_canary_aside, trial
    from sfumato.data.load import load_images
    from sfumato.files import append_line, read_lines

    check_runs(config.runs)
    train = find_trainer(config.trainer or "")
    images = load_images(config.data, "train", **config.loading)
    rest, canary = set_canary_aside(images, config.seed)
    kept = run.private / TRIALS
    scores = {line["run"]: float(line["score"]) for line in read_lines(kept, mend=True)}
    for number in range(config.runs):
        if number not in scores:
            scores[number] = trial(train, rest, canary, number, config.seed)
            append_line(kept, {"run": number, "score": scores[number]}, durable=True)
        if (number + 1) % max(1, config.runs // 10) == 0:
            run.log(f"{number + 1} of {config.runs} calls of {config.trainer}")
    bound = bound_of_trials(scores, delta=config.delta, confidence=config.confidence)
    sides = ([s for n, s in sorted(scores.items()) if n % 2 == side] for side in (1, 0))
    inside, outside = sides
    return AuditRecord(
        target=f"{config.trainer} on {images.name}", bounds=[bound], promise=_promise(config),
        attacks=[describe_attack("log-odds of the canary", inside, outside, config.confidence)],
    )  # fmt: skip


def _promise(config: Config) -> dict[str, Any] | None:
    return None if config.epsilon is None else promised(config.epsilon, config.delta)


def find_trainer(name: str) -> "Trainer":
    """The function that module:function names."""
    from sfumato.nn.zoo import find_function

    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f'--trainer "{name}": give it as module:function.')
    found = find_function(module, function)
    if not callable(found):
        raise ConfigError(f"--trainer {name} is a {type(found).__name__}, not a function.")
    return cast("Trainer", found)
