"""The release bundle: a folder that can be handed to anybody, and its check.

    images.npz | images/000000.png ... and labels.csv     the images and their labels
    soft_labels.npz     logits (float32, n x classes) and the temperature they are meant for
    ledger.jsonl        every use of private data that went into it, inherited ones too
    card.md             what is guaranteed, for people
    card.json           the same for programs, with the hash of each other file; written last

The card vouches for the files and the ledger for the card, so a check finds what was lost, added,
swapped or claimed without payment. It is no signature: anyone who invents a ledger and hashes all
files again can lie, and only the maker's name stands against that.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.config import dumps, from_json
from sfumato.data.images import Images
from sfumato.errors import ConfigError, DataError, RunError, SfumatoError
from sfumato.files import atomic, read_json, read_lines, sha256
from sfumato.privacy.ledger import Ledger
from sfumato.sharing.bundle_parts import (
    part_names,
    read_images,
    read_soft_labels,
    soft_label_problems,
    write_images,
    write_soft_labels,
)
from sfumato.sharing.card import BundleCard, card_problems, card_remarks, make_card, this_version
from sfumato.sharing.card_words import markdown

OURS = re.compile(
    r"images/\d{6,}\.png|images\.npz|labels\.csv|soft_labels\.npz|ledger\.jsonl|card\.(md|json)"
    r"|\.[^/]*\.draft"
)
"""What a bundle, or a writer that was killed, may have left in a folder."""


@dataclass(frozen=True)
class Verdict:
    """What a check found. `card` is None if it could not even be read."""

    card: BundleCard | None
    problems: list[str]
    """Each says what is wrong and what to do; with any, the bundle must not be trusted."""
    remarks: list[str]
    """What is no fault, and must be known."""

    @property
    def ok(self) -> bool:
        """Whether the bundle is whole and its ledger pays for its guarantee."""
        return not self.problems


def write_bundle(
    folder: Path | str,
    images: Images,
    logits: Float[Tensor, "n classes"],
    ledger: Ledger,
    *,
    format: Literal["npz", "png"] = "npz",
    k: int,
    model: str,
    public: str,
    temperature: float,
    moved: dict[str, float],
    near_copies: dict[str, float] | None = None,
) -> BundleCard:
    """Write images, soft labels, ledger and card to a folder, in place of a bundle already there.

    Guarantee: the guarantee on the card is derived from `ledger`, images marked private are
    refused, and what a killed writer leaves does not pass for a bundle. One whose ledger forbids a
    release is written too, and says so. `moved` holds mean and largest; `near_copies` holds share,
    threshold and standard_error, paid for under stage "card". Nothing is written if any of it is
    refused.
    """
    images.require_public("writing a bundle")
    folder, logits = Path(folder), logits.detach().to("cpu", torch.float32)
    if format not in ("npz", "png"):
        raise ConfigError(f'format="{format}" must be "npz" or "png".')
    if not len(images) or images.shape[0] not in (1, 3):
        raise DataError(
            f'"{images.name}" has {len(images)} images of {images.shape} (channels, height, '
            "width). A bundle holds at least one image, grey or RGB."
        )
    problems = soft_label_problems(logits, temperature, len(images), len(images.classes))
    if problems:
        raise DataError(f'"{images.name}": {problems[0]} Give the logits of these very images.')
    card = make_card(
        images,
        ledger,
        k=k,
        model=model,
        public=public,
        moved=moved,
        near_copies=near_copies,
    )
    _clear(folder)
    write_images(folder, images, format)
    write_soft_labels(folder, logits, temperature)
    records = [dumps(dict(record)) + "\n" for record in ledger.records()]
    _write_text(folder / "ledger.jsonl", "".join(records))
    _write_text(folder / "card.md", markdown(card))
    card = replace(card, files={name: sha256(folder / name) for name in _contents(folder)})
    _write_text(folder / "card.json", dumps(card, indent=1) + "\n")
    return card


def read_bundle(folder: Path | str) -> tuple[Images, Float[Tensor, "n classes"], float, BundleCard]:
    """Images, logits, temperature and card of a bundle whose files are those on its card.

    That is all that is checked here; `verify_bundle` checks the guarantee.
    """
    folder = Path(folder)
    card = _read_card(folder)
    problems = _file_problems(folder, card)
    if problems:
        raise RunError(f"{folder}: {problems[0]}")
    return read_images(folder, card), *read_soft_labels(folder), card


def verify_bundle(folder: Path | str) -> Verdict:
    """Check that a bundle is whole, its parts fit, and its ledger pays for its guarantee.

    Raises `RunError` for a folder that is no bundle at all; whatever else is wrong is a problem.
    """
    folder = Path(folder)
    _require_card(folder)
    try:
        card = _read_card(folder)
    except SfumatoError as problem:
        return Verdict(None, [f"{problem} {MEND}"], [])
    problems = _file_problems(folder, card)
    for check in (_ledger_problems, _image_problems, _soft_label_problems, _word_problems):
        problems += _told(check, folder, card)
    return Verdict(card, problems, card_remarks(card))


MEND = "Get the bundle again, or write it again."


def _require_card(folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}.")
    if (folder / "bundle" / "card.json").is_file():
        raise RunError(f"{folder} is a run, and its bundle is {folder / 'bundle'}: give that.")
    if not (folder / "card.json").is_file():
        raise RunError(
            f"{folder} is no bundle: it has no card.json, which is written last. Give the folder "
            "of a bundle, or write it again if that was cut short."
        )


def _read_card(folder: Path) -> BundleCard:
    _require_card(folder)
    try:
        record = read_json(folder / "card.json")
        if isinstance(record, dict):  # older cards do not say
            record = {"neighbours": "data sets", **record}
        return from_json(BundleCard, record)
    except ConfigError as problem:
        raise RunError(f"{folder / 'card.json'} is no card: {problem}") from problem


def _clear(folder: Path) -> None:
    """Make room for a bundle. The old card goes first: what is half replaced is no bundle."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file. Give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    names = _contents(folder)
    strange = [name for name in names if not OURS.fullmatch(name)]
    if strange:
        raise RunError(
            f"{folder} holds {strange[0]}, which is no part of a bundle and would be handed on "
            "with it. Choose an empty folder."
        )
    for name in sorted(names, key=lambda name: name != "card.json"):
        (folder / name).unlink()
    if (folder / "images").is_dir():
        (folder / "images").rmdir()


def _contents(folder: Path) -> list[str]:
    """Names of all that lies in a folder and its folders, hidden or not."""
    items = (item for item in folder.rglob("*") if item.is_symlink() or not item.is_dir())
    return sorted(item.relative_to(folder).as_posix() for item in items)


def _write_text(path: Path, text: str) -> None:
    with atomic(path) as file:
        file.write(text.encode())


def _told(
    check: Callable[[Path, BundleCard], list[str]], folder: Path, card: BundleCard
) -> list[str]:
    """What a check finds; that it cannot even read its file is a problem too."""
    try:
        return check(folder, card)
    except SfumatoError as problem:
        return [f"{problem} {MEND}"]


def _file_problems(folder: Path, card: BundleCard) -> list[str]:
    there, listed, parts = set(_contents(folder)) - {"card.json"}, set(card.files), part_names(card)
    problems = [f"{name} is missing. {MEND}" for name in sorted((listed | parts) - there)]
    for name in sorted(there - (listed & parts)):
        problems.append(
            f"{name} is not on the card, or no part of a bundle: nothing speaks for it. Take it "
            "away, or write the bundle again."
        )
    for name in sorted(there & listed):
        path = folder / name
        if path.is_symlink() or not path.is_file() or sha256(path) != card.files[name]:
            problems.append(f"{name} has changed since the card was written. {MEND}")
    return problems


def _ledger_problems(folder: Path, card: BundleCard) -> list[str]:
    path = folder / "ledger.jsonl"
    # A run may lose a torn last line, which it never relied on; here every line was relied on.
    if not path.is_file() or not path.read_bytes().endswith(b"\n"):
        raise RunError(f"{path} is missing or cut short, so that nothing is paid for.")
    return card_problems(card, Ledger.from_records(read_lines(path)))


def _image_problems(folder: Path, card: BundleCard) -> list[str]:
    images = read_images(folder, card)
    pairs = {
        "classes": (card.classes, images.classes),
        "shape": (card.shape, images.shape),
        "images": (card.images, len(images)),
    }
    return [
        f"card.json says {name}={stated!r}, and the images themselves {found!r}. {MEND}"
        for name, (stated, found) in pairs.items()
        if stated != found
    ]


def _soft_label_problems(folder: Path, card: BundleCard) -> list[str]:
    found = soft_label_problems(*read_soft_labels(folder), card.images, len(card.classes))
    return [f"{problem} {MEND}" for problem in found]


def _word_problems(folder: Path, card: BundleCard) -> list[str]:
    path = folder / "card.md"
    if card.made_by != this_version() or not path.is_file():
        return []
    same = path.read_bytes() == markdown(card).encode()
    return [] if same else [f"card.md does not say what card.json says. {MEND}"]
