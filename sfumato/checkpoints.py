"""How far a run has come: a nested state of tensors, in one file that is never a pickle.

The file also says how long the metrics and the ledger were. Metrics that came later are dropped,
for they come again; a ledger that is not the one the state was paid from is refused.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import RunError
from sfumato.files import atomic, sync_file

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("metrics.jsonl", "private/metrics.jsonl")


def write_checkpoint(path: Path, run: Path, state: Mapping[str, Any]) -> None:
    """Keep a state of the run in this folder, replacing the last one in one move."""
    from safetensors.torch import save

    written = {name: sync_file(run / name) for name in METRICS}
    tensors: dict[str, Tensor] = {}
    shape = pack(dict(state), "", tensors)
    ledger = run / "ledger.jsonl"
    length = sync_file(ledger)
    paid = [length, prefix_digest(ledger, length)]
    notes = {"state": shape, "written": written, "ledger": paid}
    notes = {key: json.dumps(value) for key, value in notes.items()}
    with atomic(path) as file:
        file.write(save(tensors, metadata=notes))


def read_checkpoint(path: Path, run: Path) -> dict[str, Any] | None:
    """The last state that was kept, or None; metrics of the run that came after it are dropped."""
    from safetensors import safe_open

    written, state = dict.fromkeys(METRICS, 0), None
    if path.exists():
        with safe_open(path, framework="pt") as file:
            notes = file.metadata()
            state = unpack(json.loads(notes["state"]), file.get_tensor)
            written = json.loads(notes["written"])
            length, paid_from = json.loads(notes["ledger"])
        if prefix_digest(run / "ledger.jsonl", length) != paid_from:
            raise RunError(
                f"{run / 'ledger.jsonl'} is not the one the checkpoint was paid from: lines are "
                "gone or were changed. Start a new run with another --out."
            )
    for name in METRICS:
        if (run / name).exists():
            # Never longer than it is: that would fill a file lost in a power cut with zeros.
            size = (run / name).stat().st_size
            os.truncate(run / name, min(size, written[name]))
    return state


def prefix_digest(path: Path, length: int) -> str:
    """A hash of the first `length` bytes: an append-only file keeps them for ever."""
    if not length:
        return ""
    if not path.exists():
        return "missing"
    with path.open("rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()


def pack(value: Any, name: str, tensors: "dict[str, Tensor]") -> Any:
    """The value as JSON, with tensors taken out and referred to by name."""
    import torch

    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, dict):
        # Keys keep their type: optimizers number their parameters.
        return {
            "items": [[key, pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]
        }
    if isinstance(value, list | tuple):
        items = [pack(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"a checkpoint cannot hold {name}, a {type(value).__name__}")


def unpack(shape: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that `pack` took apart; `tensor` finds its tensors by name."""
    match shape:
        case {"tensor": name}:
            return tensor(name)
        case {"items": items}:
            return {key: unpack(item, tensor) for key, item in items}
        case {"list": items}:
            return [unpack(item, tensor) for item in items]
        case {"tuple": items}:
            return tuple(unpack(item, tensor) for item in items)
    return shape["value"]
