"""Images from a folder tree with one folder per class.

    pictures/cat/1.jpg  pictures/dog/2.png           split by us, one fifth of each class for test
    pictures/train/cat/1.jpg  pictures/test/cat/2.jpg   split by you ("val" works for "test")

JPEG, PNG and WebP files are read; other files are left out with a warning, and hidden ones without.
Who is on an image is said by a folder (cat/anna/1.jpg) or by a table (see `people`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from warnings import warn

import torch
from torch import Tensor

from sfumato.config import why_no_text
from sfumato.data.classes import find_classes
from sfumato.data.decode import all_bad, decode_parts
from sfumato.data.framing import Framing
from sfumato.data.images import Images
from sfumato.data.people import number_names, people_by_csv, people_by_folder
from sfumato.errors import DataError, SfumatoWarning

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
TEST_NAMES = ("test", "val", "valid", "validation")
TEST_SHARE = 0.2


def load_folder(
    path: Path,
    splits: Sequence[str],
    *,
    private: bool,
    framing: Framing,
    people: str | None = None,
    listed: str | None = None,
) -> list[Images]:
    """Splits of a folder tree, each file decoded once. Classes are the folders of train, sorted.

    `people` is None, "folder", or a table: FILE.csv or FILE.csv:COLUMN, its column "file" holding
    names relative to the folder. With `listed` classes it need not know who is on images of others:
    all are read, since the split is that of the whole folder.
    """
    stem = path.resolve().name
    try:
        roots, ours = _roots(path, splits)
        classes = _class_names(path if ours else path / "train")
        found = [_find(root, classes) for root in roots]
    except OSError as problem:
        raise DataError(f"{problem.filename} cannot be read ({problem.strerror}).") from problem
    _tell_left_out([file for _, _, others in found for file in others])
    kept = range(len(classes)) if listed is None else find_classes(listed, classes, stem)
    shown: list[Tensor | None] = []
    for root, (files, labels, _) in zip(roots, found, strict=True):
        if private and people is None:
            _tell_nested(files, root)
        wanted = [file for file, label in zip(files, labels, strict=True) if label in kept]
        shown.append(None if people is None else _people(files, wanted, path, root, people))
    pixels = decode_parts([files for files, _, _ in found], framing, stem)
    parts = [
        Images(
            pixels=some,
            labels=torch.tensor(labels),
            classes=classes,
            name=stem,
            private=private,
            people=who,
        )
        for some, (_, labels, _), who in zip(pixels, found, shown, strict=True)
    ]
    if ours:
        test, train = parts[0].split(TEST_SHARE, seed=0)
        parts = [test if split == "test" else train for split in splits]
    named = zip(parts, splits, strict=True)
    return [replace(part, name=f"{stem}-{split}") for part, split in named]


def _tell_left_out(files: Sequence[Path]) -> None:
    """Say which files are no images that can be read, and are left out."""
    if files:
        kinds = Counter(file.suffix.lower() or "without an ending" for file in files)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5))
        warn(
            f"{len(files)} files are left out, since they are no JPEG, PNG or WebP ({listed}): "
            f"{files[0]}, for one. Convert those that are images.",
            SfumatoWarning,
            stacklevel=2,
        )


def _tell_nested(files: list[Path], root: Path) -> None:
    """Hint at people, where folders in classes look like theirs: the guarantee is for images."""
    nested = next((file for file in files if len(file.relative_to(root).parts) > 2), None)
    if nested is not None:
        warn(
            f"there are folders in the classes of {root}, such as {nested.parent.name}. If these "
            "are people, each of their images is hidden, and they are not: add --unit person "
            "--people folder.",
            SfumatoWarning,
            stacklevel=2,
        )


def _people(files: list[Path], wanted: list[Path], path: Path, root: Path, source: str) -> Tensor:
    """Who is on each of the files; those that are not wanted show one person each."""
    by_folder = source == "folder"
    names = people_by_folder(wanted, root) if by_folder else people_by_csv(wanted, path, source)
    known = dict(zip(wanted, names, strict=True))
    return number_names([known.get(file, str(file)) for file in files])


def _roots(path: Path, splits: Sequence[str]) -> tuple[list[Path], bool]:
    """Where each split lives; or the one folder of all, whose split is ours to make."""
    if not path.is_dir():
        raise DataError(
            f"{path} is neither an .npz file nor a folder with one folder of images per class."
        )
    if not (path / "train").is_dir():
        return [path], True
    return [_root(path, split) for split in splits], False


def _root(path: Path, split: str) -> Path:
    if split == "train":
        return path / "train"
    for name in TEST_NAMES:
        if (path / name).is_dir():
            return path / name
    raise DataError(f"{path} has a train folder and none of {', '.join(TEST_NAMES)} beside it.")


def _class_names(root: Path) -> tuple[str, ...]:
    folders = sorted(item.name for item in root.iterdir() if item.is_dir() and item.name[0] != ".")
    if not folders:
        raise DataError(f"{root} has no folders in it. Put the images into one folder per class.")
    for name in folders:
        _require_utf8(root / name)
    return tuple(folders)


def _find(root: Path, classes: tuple[str, ...]) -> tuple[list[Path], list[int], list[Path]]:
    """Image files, their labels, and files of other kinds."""
    files: list[Path] = []
    labels: list[int] = []
    others: list[Path] = []
    for name in _class_names(root):
        if name not in classes:
            raise DataError(f"{root / name} is a class that train does not have. Take it away.")
        found = _files(root / name)
        pictures = [item for item in found if item.suffix.lower() in SUFFIXES]
        if not pictures:
            kinds = ", ".join(SUFFIXES)
            raise DataError(f"{root / name} has no images ({kinds}). Fill it or take it away.")
        files += pictures
        labels += [classes.index(name)] * len(pictures)
        others += [item for item in found if item.suffix.lower() not in SUFFIXES]
    return files, labels, others


def _files(folder: Path) -> list[Path]:
    """All files below a folder, apart from hidden ones and those in hidden folders."""
    items = [
        item
        for item in sorted(folder.rglob("*"))
        if not any(part.startswith(".") for part in item.relative_to(folder).parts)
    ]
    for place in (folder, *(item for item in items if item.is_dir())):
        next(place.iterdir(), None)  # a folder that may not be read is no empty one
    broken = [item for item in items if not item.exists()]
    if broken:
        raise all_bad([f"{item} is a link to nothing." for item in broken])
    files = [item for item in items if item.is_file()]
    for file in files:
        _require_utf8(file)
    return files


def _require_utf8(path: Path) -> None:
    """Refuse a name that no text can hold: classes and people are called by theirs."""
    why = why_no_text(path.name)
    if why:
        raise DataError(f"{path.parent}: {why}.")
