"""`load_model`: from a run directory to a classifier that names pictures."""

from os.path import expanduser, isdir
from pathlib import Path

from sfumato.config import read_finished
from sfumato.errors import ConfigError, RunError
from sfumato.files import read_json
from sfumato.integrity import require_whole
from sfumato.models.zoo import load_exactly
from sfumato.runs import Run
from sfumato.training.setup import pick_device
from sfumato.training.trained_model import NAME, Description, TrainedModel
from sfumato.trusted_code import is_own_code, require_trust

PLACES = ("", "stages/train", "stages/student")
"""Where a run has its classifier: warmup in its stage train, release in its stage student."""
VERBS = ("train", "warmup", "release")


def load_model(
    run: Run | str | Path, device: str = "cpu", *, trust_code: bool = False
) -> TrainedModel:
    """The classifier that a run has left, with its weights: those averaged, if there are such.

    `run` is the directory of a run of `sfumato train`, `warmup` or `release`, one of its stages, or
    any folder with model.json and model.safetensors. Where a ledger lies beside them, the guarantee
    comes with it. Raises `RunError` where there is no such model, it cannot be built again, or the
    run is damaged (`sfumato.integrity`): then nobody knows what is guaranteed.

    A network of your own is built by code whose name the folder gives. It is imported and run
    with `trust_code` alone: a folder from elsewhere may name anything.
    """
    if not isinstance(run, Run | str | Path):
        raise ConfigError(
            f"load_model takes the directory of a run, and got {run!r}. Give its path."
        )
    folder = find_model(run.path if isinstance(run, Run) else Path(expanduser(run)))
    description = read_description(folder)
    name, own = description.model, is_own_code(description.model)
    if own and not trust_code:
        require_trust(name, folder / NAME)
    ledger = require_whole(folder)
    try:
        network = description.new_network()
    except ConfigError as problem:
        hint = " It is code of your own: Python must find it here, or by PYTHONPATH." if own else ""
        raise RunError(
            f"the network of {folder} cannot be built again: {problem}{hint}"
        ) from problem
    try:
        load_exactly(network, folder / "model.safetensors")
    except ConfigError as problem:
        hint = " Was its code changed since?" if own else ""
        raise RunError(f'{problem} By model.json it is a "{name}".{hint}') from problem
    network = network.to(pick_device(device))
    return TrainedModel(network=network, description=description, ledger=ledger)


def find_model(place: Path) -> Path:
    """The folder with model.json and the weights, or why there is none."""
    folder = place.parent if place.name == "model.safetensors" else place
    if not isdir(folder):
        raise RunError(f"{place}: there is no such folder. Give the directory of a run.")
    found = [folder / inner for inner in PLACES if (folder / inner / "model.json").exists()]
    if not found:
        raise RunError(why_none(folder))
    if not (found[0] / "model.safetensors").exists():
        raise RunError(f"{found[0]} has model.json, and model.safetensors is missing beside it.")
    return found[0]


def why_none(folder: Path) -> str:
    """What is wrong with a folder that has no classifier."""
    record = folder / "config.json"
    verb = read_json(record).get("verb") if record.exists() else None
    if verb is None and folder.parent.name == "stages":
        return f"{folder} is a stage without a classifier: it makes something else, or is to come."
    if verb is None:
        return f"{folder} is no run: it has neither model.json nor config.json."
    if verb not in VERBS:
        return (
            f"{folder} is a run of sfumato {verb}, which leaves no classifier: give one of sfumato "
            f"{', '.join(VERBS[:-1])} or {VERBS[-1]}."
        )
    if not (folder / "done.json").exists():
        return (
            f"{folder} is not finished, and its model is not there yet. sfumato {verb} --out "
            f"{folder} goes on with it."
        )
    if (folder / "stages/generator/generator.json").exists():
        return (
            f"{folder} has made a generator, and no classifier: draw images from it with sfumato "
            f"warmup draw {folder} --out FILE.npz."
        )
    return f"{folder} has no model.json: an earlier version of sfumato made it. Train it again."


def read_description(folder: Path) -> Description:
    """What model.json says."""
    try:
        return read_finished(Description, read_json(folder / NAME))
    except ConfigError as problem:
        raise RunError(f"{folder / NAME} cannot be read: {problem}") from problem
