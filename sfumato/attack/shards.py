"""Heads on disk, for those who want to keep a fleet: shards that are whole or not there.

    FOLDER/shard-0003-of-0016/   weights.npy  members.npy  shard.json
    FOLDER/fleet.json            written by `merge`, when all shards have been found whole

Shard i of n holds heads i*H//n to (i+1)*H//n of a fleet of H. It is written under another name
and renamed when it is whole, so many processes and machines can work on one folder, and the same
command goes on where it was cut. Nothing is ever overwritten.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import torch
from torch import Tensor

from sfumato.attack.fleet import Fleet, Heads
from sfumato.attack.heads import HeadRecipe
from sfumato.config import differences, dumps, from_json, to_json
from sfumato.errors import ConfigError, RunError, SfumatoError
from sfumato.files import atomic, lock, read_json, sha256

Record = TypeVar("Record")

BATCH = 4096
"""Heads that are trained between two writes."""


@dataclass(frozen=True, kw_only=True)
class FleetRecord:
    """What tells one saved fleet from another."""

    recipe: HeadRecipe
    seed: int
    dimension: int
    source: str
    table: str
    """The hash of features and labels."""
    kind: str
    heads: int
    shards: int

    def range_of(self, index: int) -> tuple[int, int]:
        """The first head of a shard, and how many it has."""
        first, end = (i * self.heads // self.shards for i in (index, index + 1))
        return first, end - first

    def folder_of(self, index: int) -> str:
        """The name of a shard's folder."""
        return f"shard-{index:04d}-of-{self.shards:04d}"

    @property
    def layout(self) -> dict[str, tuple[str, int]]:
        """The arrays of a shard: type and columns."""
        columns = self.recipe.num_parameters(self.dimension)
        return {"weights.npy": ("<f4", columns), "members.npy": ("<i4", self.recipe.images)}


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The manifest of one shard."""

    fleet: FleetRecord
    index: int
    weights_sha256: str
    members_sha256: str

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of each array's file."""
        return {"weights.npy": self.weights_sha256, "members.npy": self.members_sha256}


def write_shard(folder: Path | str, fleet: Fleet, index: int, shards: int, heads: int) -> Path:
    """Train and write shard `index` of `shards` of a fleet of `heads`; returns its folder.

    Guarantee: a shard that is there already, whole and of this fleet, is left as it is and nothing
    is trained. One that is damaged, or of another fleet, is refused and left as it is too.
    """
    if not 0 <= index < shards:
        raise ConfigError(f"there is no shard {index} of {shards}: count from 0.")
    if heads < shards:
        raise ConfigError(f"{heads} heads do not fill {shards} shards. Take fewer shards.")
    record = FleetRecord(
        recipe=fleet.recipe, seed=fleet.seed, dimension=fleet.dimension, source=fleet.source,
        table=fleet.table, kind=fleet.kind, heads=heads, shards=shards,
    )  # fmt: skip
    folder = Path(folder)
    place = folder / record.folder_of(index)
    _refuse_foreign(folder, record)
    if place.exists():
        _read_shard(place, record, index, hashes=True)
        return place
    draft = folder / f".{place.name}.draft"
    draft.mkdir(parents=True, exist_ok=True)
    descriptor = lock(draft)
    try:
        if place.exists():
            raise RunError(f"{place} was finished by another process just now. Go on with merge.")
        hashes = _write_arrays(draft, fleet, record, index)
        shard = ShardRecord(
            fleet=record, index=index,
            weights_sha256=hashes["weights.npy"], members_sha256=hashes["members.npy"],
        )  # fmt: skip
        with atomic(draft / "shard.json") as file:
            file.write(dumps(shard, indent=1).encode())
        os.rename(draft, place)
    finally:
        os.close(descriptor)
    return place


def merge(folder: Path | str) -> Path:
    """Check every byte of every shard in `folder`, and write `fleet.json`; returns its path.

    Guarantee: after it, `open_shards` gives the whole fleet. Shards that are missing, damaged or
    of different fleets are refused by name. A `fleet.json` that is there must say the same.
    """
    folder = Path(folder)
    places = sorted(folder.glob("shard-*-of-*"))
    if not places:
        raise RunError(f"{folder} holds no shards. Write them first.")
    record = _read_record(places[0]).fleet
    for place in places:
        _same_fleet(place / "shard.json", record, _read_record(place).fleet)
    for index in range(record.shards):
        _read_shard(folder / record.folder_of(index), record, index, hashes=True)
    path = folder / "fleet.json"
    if path.exists():
        _same_fleet(path, record, _parse(path, FleetRecord))
    else:
        with atomic(path) as file:
            file.write(dumps(record, indent=1).encode())
    return path


@dataclass(frozen=True)
class SavedFleet(Sequence[Heads]):
    """The shards of a fleet, in order, mapped into memory: what is not looked at is not read."""

    folder: Path
    record: FleetRecord

    def __len__(self) -> int:
        return self.record.shards

    def __getitem__(self, index: int) -> Heads:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The heads of one shard."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.folder} has {len(self)} shards, and no shard {index}")
        index %= len(self)
        place = self.folder / self.record.folder_of(index)
        weights, members = _read_shard(place, self.record, index, hashes=False)
        return Heads(weights, members, self.record.kind)


def open_shards(folder: Path | str) -> SavedFleet:
    """The fleet that `merge` found whole.

    Guarantee: every shard has its manifest, and arrays of the right type, shape and length. What
    is missing, truncated or of another fleet is refused by name.
    """
    folder = Path(folder)
    path = folder / "fleet.json"
    if not path.exists():
        raise RunError(f"{path} is missing: the shards were not merged. Merge them first.")
    saved = SavedFleet(folder, _parse(path, FleetRecord))
    for index in range(len(saved)):
        _ = saved[index]
    return saved


def _write_arrays(folder: Path, fleet: Fleet, record: FleetRecord, index: int) -> dict[str, str]:
    first, count = record.range_of(index)
    files: dict[str, _Hashed] = {}
    with atomic(folder / "weights.npy") as weights, atomic(folder / "members.npy") as members:
        for (name, (kind, columns)), file in zip(
            record.layout.items(), (weights, members), strict=True
        ):
            files[name] = _Hashed(file)
            header = {"descr": kind, "fortran_order": False, "shape": (count, columns)}
            np.lib.format.write_array_header_1_0(files[name], header)  # pyright: ignore[reportArgumentType]
        for start in range(first, first + count, BATCH):
            heads = fleet.heads(start, min(BATCH, first + count - start))
            for name, tensor in zip(files, (heads.weights, heads.members), strict=True):
                kind, _ = record.layout[name]
                files[name].write(tensor.cpu().numpy().astype(kind).tobytes())
    return {name: file.digest.hexdigest() for name, file in files.items()}


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)


def _read_shard(
    place: Path, record: FleetRecord, index: int, *, hashes: bool
) -> tuple[Tensor, Tensor]:
    """The arrays of a shard, mapped into memory, or a `RunError` that names the file."""
    shard = _read_record(place)
    _same_fleet(place / "shard.json", record, shard.fleet)
    if shard.index != index:
        raise RunError(
            f"{place} holds shard {shard.index}: it was renamed. Give it its own name back."
        )
    arrays = []
    for name, (kind, columns) in record.layout.items():
        path = place / name
        shape = (record.range_of(index)[1], columns)
        try:
            # Copy-on-write, so that torch may have it: nothing reaches the file.
            array = np.load(path, mmap_mode="c")
        except (OSError, ValueError, EOFError) as problem:
            raise RunError(f"{path} is missing or truncated. {_remedy(place)}") from problem
        if array.shape != shape or array.dtype.str != kind:
            raise RunError(f"{path} is not of its fleet's type and shape. {_remedy(place)}")
        if hashes and sha256(path) != shard.hashes[name]:
            raise RunError(f"{path} is damaged: its bytes are not those written. {_remedy(place)}")
        arrays.append(torch.from_numpy(array))
    return arrays[0], arrays[1]


def _read_record(place: Path) -> ShardRecord:
    if not place.is_dir():
        _, index, _, shards = place.name.split("-")
        raise RunError(
            f"{place} is missing. Write that shard with the command of the others and --shard "
            f"{int(index) + 1}/{int(shards)}."
        )
    path = place / "shard.json"
    if not path.exists():
        raise RunError(f"{path} is missing. {_remedy(place)}")
    return _parse(path, ShardRecord)


def _parse(path: Path, kind: type[Record]) -> Record:
    try:
        return from_json(kind, read_json(path))
    except SfumatoError as problem:
        raise RunError(f"{path} cannot be read: {problem} {_remedy(path.parent)}") from problem


def _refuse_foreign(folder: Path, record: FleetRecord) -> None:
    """A folder is for one fleet: look at one shard of it, and at what was merged."""
    for place in sorted(folder.glob("shard-*-of-*"))[:1]:
        _same_fleet(place / "shard.json", record, _read_record(place).fleet)
    path = folder / "fleet.json"
    if path.exists():
        _same_fleet(path, record, _parse(path, FleetRecord))


def _same_fleet(path: Path, record: FleetRecord, found: FleetRecord) -> None:
    changes = differences(to_json(record), to_json(found))
    if changes:
        raise RunError(
            f"{path} belongs to another fleet ({'; '.join(changes)}). Keep each fleet in a folder "
            "of its own."
        )


def _remedy(place: Path) -> str:
    return f"Remove {place} and write that shard again."
