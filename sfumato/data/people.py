"""Who is on which image: for guarantees about people instead of images.

A private step on people samples people, takes up to `most` images of each, and clips what all of
them together change. So the guarantee hides whether a person is in the data at all, with however
many images.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from sfumato.data.example_rng import ExampleRng
from sfumato.errors import ConfigError, DataError

MORE = "fields without a column"


@dataclass(frozen=True)
class People:
    """The images of each person, and how many of them are taken at a time."""

    ids: Int[Tensor, " images"] = field(repr=False)
    """The number of the person on each image: 0 to the number of people less one."""
    most: int = 1

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"images_per_person={self.most} must be at least 1.")

    def __len__(self) -> int:
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    def pick(self, people: Int[Tensor, " k"], seed: int, step: int) -> Int[Tensor, " picked"]:
        """Places of `most` images of each of these people, drawn without repetition.

        Who has fewer images gives each of them more than once.

        Guarantee: what is drawn of one person depends on the seed, the step and how many images
        that person has. It stays the same when others are asked for, join the data, or leave.
        """
        counts = self._counts[people]
        begin = counts.cumsum(0) - counts  # of each person in the rows below
        owner = torch.repeat_interleave(torch.arange(len(people)), counts)
        # A row for each image of these people, named by its turn among those of its person: places
        # in the data move when another person leaves.
        turn = torch.arange(len(owner)) - begin[owner]
        order = ExampleRng.of(seed, step, turn).throw(1)[0].argsort(stable=True)
        order = order[owner[order].argsort(stable=True)]  # shuffled within each person
        taken = order[begin[:, None] + torch.arange(self.most) % counts[:, None]]
        return self._images[self._begin[people][:, None] + turn[taken]].flatten()

    @cached_property
    def _images(self) -> Int[Tensor, " images"]:
        """All places, person by person."""
        return self.ids.argsort(stable=True)

    @cached_property
    def _counts(self) -> Int[Tensor, " people"]:
        return torch.bincount(self.ids, minlength=len(self))

    @cached_property
    def _begin(self) -> Int[Tensor, " people"]:
        return self._counts.cumsum(0) - self._counts


def number_names(names: Sequence[str]) -> Int[Tensor, " images"]:
    """Numbers for the names, in alphabetical order."""
    places = {name: i for i, name in enumerate(sorted(set(names)))}
    return torch.tensor([places[name] for name in names], dtype=torch.int64)


def people_by_folder(files: Sequence[Path], root: Path) -> list[str]:
    """Names of people from `class/PERSON/image`; the same name in two classes is one person."""
    names = []
    for file in files:
        parts = file.relative_to(root).parts
        if len(parts) < 3:
            raise DataError(
                f"{file} lies directly in its class: with people=folder there is one folder per "
                "person below each class, as in sick/anna/1.png."
            )
        names.append(parts[1])
    return names


def people_by_csv(files: Sequence[Path], root: Path, source: str) -> list[str]:
    """Names of people from a table: `FILE.csv` or `FILE.csv:COLUMN`, with a column "file"."""
    path, _, column = source.partition(".csv:")
    path, column = (f"{path}.csv", column) if column else (source, "person")
    try:
        with open(path, newline="", encoding="utf-8-sig") as opened:  # Excel puts a mark first
            reader = csv.DictReader(opened, restkey=MORE)
            table, columns = list(reader), list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"{path} cannot be read as a table ({problem}).") from problem
    for wanted in ("file", column):
        if wanted not in columns:
            others = [name for name in columns if name != "file"]
            hint = f" Say which column: --people {path}:{others[0]}" if others else ""
            hint = hint if wanted == column and "file" in columns else ""
            raise DataError(
                f'{path} needs a column "{wanted}"; it has {", ".join(columns) or "nothing"}.{hint}'
            )
    person_of: dict[str, str] = {}
    for line, row in enumerate(table, start=2):
        if MORE in row:
            raise DataError(
                f"{path}, line {line}: there are more fields than the {len(columns)} columns. Put "
                "a field with a comma in it into quotes."
            )
        file, person = (row["file"] or "").strip(), (row[column] or "").strip()
        name = Path(file).as_posix()
        if person_of.setdefault(name, person) != person:
            raise DataError(
                f'{path}, line {line}: "{file}" shows "{person}" and "{person_of[name]}". An image '
                "belongs to one person: join those who are on images together."
            )
    names = [file.relative_to(root).as_posix() for file in files]
    unknown = [name for name in names if not person_of.get(name)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise DataError(f'{path} names no person for "{unknown[0]}"{more}: every image needs one.')
    return [person_of[name] for name in names]
