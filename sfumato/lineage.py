"""Where tensors come from: a note in the file itself, so that a copy elsewhere is still known.

It says which command made them and of which data, and has the lines of the ledger that paid for
them; and the same of the weights that these began with. Nothing in it is of images. Names and
ledgers are public; a digest of private images, by which a guess at them could be checked, is not in
it. A digest of the tensors is: it says whether they are still those that the ledger paid for.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from sfumato.config import dumps, read_finished
from sfumato.errors import DataError, SfumatoError
from sfumato.files import read_json, read_lines

if TYPE_CHECKING:  # and inside functions: notes are read without torch, by `sfumato report` say
    from torch import Tensor

NOTE = "sfumato"
"""The name of the note in a file's metadata."""
DESCRIPTION = "model.json"
"""Where a run notes what its weights are weights of; a note of that name in the file says it too.
"""
LARGEST = 2**26
"""Bytes that the ledgers in a note may have when unpacked: 200,000 steps. What is larger was made
to fill the memory."""
START = "start.json"
"""Where a run notes what is known of the weights that it begins with."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What made a file of tensors."""

    verb: str
    data: str
    """Name of the data that its run was about; see `data_name`."""
    public_share: bool
    """Whether a share of them was declared public, and trained on without noise."""
    private: bool
    """Whether it was made in `private/`, where no ledger covers anything."""
    ledger: str
    """The ledger's lines, packed; see `lines`."""
    start: "Origin | None"
    """The same of the weights that it began with; None if there were none, or nothing is known."""
    tensors: str = ""
    """A digest of the file's tensors. Empty in files of the first versions, and where a file is to
    come; elsewhere that is damage, see `sfumato.integrity`."""

    @property
    def text(self) -> bytes:
        """The ledger as a file has it; a `ValueError` if it is cut, or larger than any ledger."""
        if not self.ledger:
            return b""
        unpacking = zlib.decompressobj()
        whole = unpacking.decompress(base64.b85decode(self.ledger), LARGEST)
        if not unpacking.eof:
            raise ValueError(f"its ledger is cut, or has more than {LARGEST} bytes")
        return whole

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The ledger's lines; none if there was no ledger."""
        return [json.loads(line) for line in self.text.splitlines()]

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
    return read_tensor_note(file) or origin_in_place(file)


def read_tensor_note(file: Path) -> Origin | None:
    """What sfumato wrote into a file of tensors; None if it did not write that."""
    note = _notes(file).get(NOTE)
    return None if note is None else _parsed(file, note)


def _parsed(file: Path, note: str) -> Origin:
    try:
        found = read_finished(Origin, json.loads(note))
        size = 0
        for one in found.all:
            size += len(one.text)
            if size > LARGEST:
                raise ValueError(f"its ledgers have more than {LARGEST} bytes")
            _ = one.lines  # to the end, or it is damaged
    except (ValueError, zlib.error, RecursionError, SfumatoError) as problem:
        raise DataError(
            f"{file}: its note of where it comes from is damaged ({problem}). Copy it again."
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
    if not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except SafetensorError:
        return {}  # it is of another kind, or damaged: the reader of its tensors says so


@dataclass(frozen=True)
class WeightsFile:
    """A file of tensors, read to its end."""

    note: Origin | None
    made: Any
    """What model.json said when the file was written; None if the file does not have it."""
    digest: str
    nan: str
    """The first tensor that has a NaN; empty if none has."""


def read_weights(file: Path) -> WeightsFile:
    """What a file of tensors holds, without the tensors; a `DataError` if it cannot be read."""
    from safetensors.torch import load_file

    try:
        tensors, notes = load_file(file), _notes(file)
        made = json.loads(notes[DESCRIPTION]) if DESCRIPTION in notes else None
    except (SafetensorError, ValueError, OSError) as problem:
        raise DataError(f"{file.name} is damaged: {problem}") from problem
    note = _parsed(file, notes[NOTE]) if NOTE in notes else None
    floats = (name for name, value in tensors.items() if value.is_floating_point())
    nan = next((name for name in floats if bool(tensors[name].float().isnan().any())), "")
    return WeightsFile(note, made, digest_of(tensors), nan)


def digest_of(tensors: "Mapping[str, Tensor]") -> str:
    """A hash of names, types, shapes and values, in whatever order they come."""
    import torch

    made = blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        made.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        made.update(flat.numpy().data)
    return made.hexdigest()


def origin_in_place(file: Path) -> Origin | None:
    """What the folders say that a file lies in, or will."""
    run = next((folder for folder in file.parents if run_settings(folder)), file.parent)
    record, lines = run_settings(run), ledger_lines(file.parent)
    if not record and not lines:
        return None
    settings = record.get("config", {})
    whole = "\n".join(map(dumps, lines)).encode()
    # What lies deeper, in private/ say, may depend on what its run began with.
    inside = [folder for folder in file.parents if folder.is_relative_to(run)]
    places = (folder / START for folder in (*inside, *stage_and_run(file.parent)))
    start = next((place for place in places if place.exists()), None)
    return Origin(
        verb=record.get("verb", ""),
        data=data_name(str(settings["data"])) if "data" in settings else "",
        public_share=settings.get("public_share") is not None,
        private="private" in file.relative_to(run).parts,
        ledger=base64.b85encode(zlib.compress(whole)).decode() if lines else "",
        start=None if start is None else read_finished(Origin, read_json(start)),
    )


def run_settings(folder: Path) -> dict[str, Any]:
    """The command and the settings of the run in a folder; nothing where there is none."""
    record = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return record if isinstance(record, dict) and "verb" in record else {}


def ledger_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the ledger of the bundle, stage or run in a folder; none if there is none."""
    found = (read_lines(place / "ledger.jsonl") for place in stage_and_run(folder))
    return next(filter(None, found), [])


def home_of(folder: Path) -> Path:
    """The folder with the ledger of a stage or run: the stage itself, or its run."""
    places = stage_and_run(folder)
    return next((place for place in places if (place / "ledger.jsonl").exists()), places[-1])


def data_name(source: str) -> str:
    """What --data is about, as names of images begin: wherever it lies, and whichever classes."""
    return Path(source.partition("@")[0]).expanduser().resolve().name.removesuffix(".npz")


def stage_and_run(folder: Path) -> tuple[Path, ...]:
    """A folder, and the run that it is a stage of."""
    folder = folder.resolve()
    return (folder, folder.parent.parent) if folder.parent.name == "stages" else (folder,)
