"""What commands with stages share, and reading a run that another command left."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sfumato.config import read_record
from sfumato.errors import ConfigError, RunError
from sfumato.files import read_json
from sfumato.integrity import require_whole
from sfumato.lineage import norm_of
from sfumato.privacy.ledger import Ledger
from sfumato.processes import num_processes
from sfumato.runs import Run
from sfumato.setting_groups import Settings, defaults, flatten, leaves
from sfumato.settings.train import Train, Training
from sfumato.trusted_code import is_own_code, require_trust


def describe_stage(summary: Mapping[str, Any]) -> str:
    """What one stage found, in words."""
    values = {k: v for k, v in summary.items() if k not in ("stage", "run")}
    told = [f"  {k}  {v:.4g}" if isinstance(v, float) else f"  {k}  {v}" for k, v in values.items()]
    return "\n".join([f"stage {summary['stage']} of {summary['run']}", *told])


def require_one_process(command: str, what: str, run: Run | None) -> Run:
    """The run, or a word on how several processes help: to train `what`, and hand it on."""
    if run is None or num_processes() > 1:
        raise ConfigError(
            f"sfumato {command} is for one process. With torchrun, sfumato train {what}."
        )
    return run


def read_given_run(folder: Path, config: Training) -> tuple[Train, Path, Ledger | None]:
    """Settings, weights and ledger of a finished run of `sfumato train`, on the device of `config`.

    A run that is damaged is refused: see `sfumato.integrity`.
    """
    record = folder / "config.json"
    verb = read_json(record)["verb"] if record.exists() else "train"
    if verb != "train":
        raise RunError(f"{folder} is a run of sfumato {verb}: one of sfumato train is wanted.")
    for name in ("config.json", "done.json", "model.safetensors"):
        if not (folder / name).exists():
            raise RunError(f"{folder} is no finished run of sfumato train: {name} is missing.")
    settings = read_record(Train, read_json(record), finished=True)
    if is_own_code(settings.model):
        require_trust(settings.model, record)
    ledger, weights = require_whole(folder), folder / "model.safetensors"
    # As it was, whatever the weights say now that it began with.
    norm = norm_of(weights) or settings.norm
    settings = replace(settings, data_root=config.data_root, device=config.device, norm=norm)
    return settings, weights, ledger


def log_ignored_settings(
    folder: Path,
    config: Settings,
    settings: Training,
    run: Run,
    used: Collection[str] = (),
) -> None:
    """Name the settings here that would make another model: the one in the folder is there.

    `used` are those that the command has another use for.
    """
    free = {"data", "data_root", "device", "seed", "noise_seed", "epsilon", "mode", "weights"}
    free |= set(used)
    given, usual, trained = flatten(config), defaults(type(config)), flatten(settings)
    other = [
        f"--{name.replace('_', '-')}"
        for name in leaves(Training)
        if name not in free
        and given[name] not in (usual[name], trained[name])
        and name not in Training.MAY_CHANGE
    ]
    if other:
        run.log(f"{folder} is as it was trained; ignored: {', '.join(other)}")


def refuse_ignored_settings(folder: Path, config: Settings, settings: Training) -> None:
    """Refuse a --data or --weights that the run in the folder has of its own."""
    if config.data not in (settings.data, defaults(type(config))["data"]):
        raise ConfigError(
            f'{folder} was trained on "{settings.data}", not "{config.data}". Leave --data '
            "out, or give another run."
        )
    if config.weights is not None:
        raise ConfigError(f"{folder} has weights of its own: leave --weights out.")
