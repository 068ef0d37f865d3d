"""Where tensors come from: a note in the file itself, so that a copy elsewhere is still known.

It says which verb made them and of which data, and has the lines of the ledger that paid for them;
and the same of the weights that these began with. Nothing in it is of images. Names and ledgers are
public; a digest of private images, by which a guess at them could be checked, is not in it.
"""

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.config import dumps, from_json
from sfumato.errors import DataError, SfumatoError
from sfumato.files import read_json, read_lines

NOTE = "sfumato"
"""The name of the note in a file's metadata."""
DESCRIPTION = "model.json"
"""Where a run notes what its weights are weights of; a note of that name in the file says it too.
"""
START = "start.json"
"""Where a run notes what is known of the weights that it begins with."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What made a file of tensors."""

    verb: str
    data: str
    """Name of the data that its run was about; see `data_name`."""
    public_share: bool
    """Whether a share of them was declared public, and learnt without noise."""
    private: bool
    """Whether it was made in `private/`, where no ledger covers anything."""
    ledger: str
    """The ledger's lines, packed; see `lines`."""
    start: "Origin | None"
    """The same of the weights that it began with; None if there were none, or nothing is known."""

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The ledger's lines; none if there was no ledger."""
        if not self.ledger:
            return []
        whole = zlib.decompress(base64.b85decode(self.ledger))
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def all(self) -> "Iterator[Origin]":
        """This one, and all before it."""
        yield self
        if self.start is not None:
            yield from self.start.all

    @property
    def note(self) -> str:
        """As a file keeps it; `read_note` reads it back."""
        return dumps(self)


def origin_of(file: Path) -> Origin | None:
    """What the note in a file says, or else the run that it lies in; None if nobody knows."""
    file = file.expanduser().resolve()
    return read_note(file) or origin_in_place(file)


def read_note(file: Path) -> Origin | None:
    """What sfumato wrote into a file of tensors; None if it did not write that."""
    note = _notes(file).get(NOTE)
    if note is None:
        return None
    try:
        found = from_json(Origin, json.loads(note))
        for one in found.all:
            _ = one.lines  # to the end, or it is damaged
    except (ValueError, zlib.error, RecursionError, SfumatoError) as problem:
        raise DataError(
            f"{file}: its note of where it comes from is damaged ({problem}). Copy it anew."
        ) from problem
    return found


def norm_of(weights: Path) -> str | None:
    """What became of BatchNorm in the network that a run of sfumato left these weights of."""
    beside = weights.with_name(DESCRIPTION)
    try:
        made = read_json(beside) if beside.is_file() else json.loads(_notes(weights)[DESCRIPTION])
    except (KeyError, ValueError, SfumatoError):
        return None
    return made.get("norm") if isinstance(made, dict) else None


def _notes(file: Path) -> dict[str, str]:
    """What stands beside the tensors of a file; nothing in one of another kind."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except SafetensorError:
        return {}  # it is of another kind, or damaged: whoever reads its tensors says so


def origin_in_place(file: Path) -> Origin | None:
    """What the folders say that a file lies in, or will."""
    run = next((folder for folder in file.parents if settings_of(folder)), file.parent)
    record, lines = settings_of(run), ledger_lines(file.parent)
    if not record and not lines:
        return None
    settings = record.get("config", {})
    whole = "\n".join(map(dumps, lines)).encode()
    start = next((f / START for f in _stage_and_run(file.parent) if (f / START).exists()), None)
    return Origin(
        verb=record.get("verb", ""),
        data=data_name(str(settings["data"])) if "data" in settings else "",
        public_share=settings.get("public_share") is not None,
        private="private" in file.relative_to(run).parts,
        ledger=base64.b85encode(zlib.compress(whole)).decode() if lines else "",
        start=None if start is None else from_json(Origin, read_json(start)),
    )


def settings_of(folder: Path) -> dict[str, Any]:
    """The verb and the settings of the run in a folder; nothing where there is none."""
    record = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return record if isinstance(record, dict) and "verb" in record else {}


def ledger_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the ledger of the bundle, stage or run in a folder; none if there is none."""
    found = (read_lines(place / "ledger.jsonl") for place in _stage_and_run(folder))
    return next(filter(None, found), [])


def data_name(source: str) -> str:
    """What --data is about, as names of images begin: wherever it lies, and whichever classes."""
    return Path(source.partition("@")[0]).expanduser().resolve().name.removesuffix(".npz")


def _stage_and_run(folder: Path) -> tuple[Path, ...]:
    folder = folder.resolve()
    return (folder, folder.parent.parent) if folder.parent.name == "stages" else (folder,)
