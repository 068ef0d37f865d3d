"""Images from an `.npz` file in the Keras layout: x_train, y_train, x_test, y_test; and samples.

Images are n h w (grey) or n h w c with 1 or 3 channels; bytes, or floats between 0 and 1. Labels
are whole numbers. An optional `classes` array names the classes; optional `people_train` and
`people_test` say, by a number or a name, who is on each image. Nothing is ever unpickled.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import IO, NamedTuple
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from sfumato.data.classes import require_same_classes
from sfumato.data.framing import Framing
from sfumato.data.images import Images, keras_layout
from sfumato.data.memory_guard import require_memory
from sfumato.errors import DataError
from sfumato.files import atomic

PARTS = ("train", "test")
KERAS = ("x_train", "y_train", "x_test", "y_test")
LAYOUTS = (("x_train", "y_train"), ("samples", "label"), ("samples", "labels"), ("arr_0", "arr_1"))
"""Where a file has samples and their labels: ours, EDM-G++'s, DPTrainer's, guided diffusion's."""


def load_npz(path: Path, split: str, *, private: bool, name: str | None = None) -> Images:
    """One split of the file. The classes are those of the whole file, so that splits agree."""
    return load_npz_splits(path, (split,), private=private, name=name)[0]


def load_npz_splits(
    path: Path,
    splits: Sequence[str],
    *,
    private: bool,
    name: str | None = None,
    framing: Framing | None = None,
) -> list[Images]:
    """Several splits, each array read once; framed, if a framing is given."""
    file = open_npz(path)
    file.require(KERAS, "The Keras layout needs")
    for split in PARTS:
        _check_pair(file, f"x_{split}", f"y_{split}")
    _check_parts(file, framing)
    people = [f"people_{split}" for split in splits]
    arrays = file.read(
        [*(f"x_{split}" for split in splits), "y_train", "y_test", "classes", *people]
    )
    labels = {split: _labels(arrays[f"y_{split}"], f"{path}: y_{split}") for split in PARTS}
    values = np.unique(np.concatenate([*labels.values()]))
    classes = _class_names(arrays, values, path)
    found = []
    for split in splits:
        own = labels[split] if "classes" in arrays else np.searchsorted(values, labels[split])
        images = Images(
            pixels=torch.from_numpy(_pixels(arrays.pop(f"x_{split}"), f"{path}: x_{split}")),
            labels=torch.from_numpy(own.astype(np.int64)),
            classes=classes,
            name=f"{name or path.resolve().stem}-{split}",
            private=private,
            people=_people(arrays, split, path),
        )
        found.append(images if framing is None else framing.images(images))
    return found


def load_samples(path: Path, like: Images) -> Images:
    """Public images that a generator left in a file, for use beside those of `like`.

    LAYOUTS has the arrays that hold them. A label is the place of its class in those of `like`, or
    a row with its highest number there. Raises `DataError` if labels are missing, if size, colour
    or classes are others, or if a class has no image.
    """
    file = open_npz(path)
    pair = next((pair for pair in LAYOUTS if set(pair) <= file.headers.keys()), None)
    if pair is None:
        layouts = ", or ".join(" and ".join(names) for names in LAYOUTS)
        images = any(name in file.headers for name, _ in LAYOUTS)
        raise DataError(
            f"{path} has no {'labels' if images else 'images'}: it holds "
            f"{', '.join(file.headers) or 'nothing'}, and {layouts} are wanted. Samples need "
            "labels: draw them by a class-conditional generator, and keep what it was asked for."
        )
    file.require(pair)
    shape = _check_pixels(file.headers[pair[0]], f"{path}: {pair[0]}")
    if shape[1:] != like.shape:
        raise DataError(
            f'{path} has images of {shape[1:]} (channels, height, width) and "{like.name}" '
            f"of {like.shape}: they must be alike."
        )
    one_hot = file.headers[pair[1]].shape[1:] not in ((), (1,))
    _check_pair(file, *pair, one_hot=one_hot)
    arrays = file.read([*pair, "classes"])
    pixels, labels = _pixels(arrays.pop(pair[0]), f"{path}: {pair[0]}"), arrays[pair[1]]
    labels = _labels(labels.argmax(1) if one_hot else labels, f"{path}: {pair[1]}")
    _require_classes(path, arrays.get("classes"), labels, like)
    return Images(
        pixels=torch.from_numpy(pixels),
        labels=torch.from_numpy(labels),
        classes=like.classes,
        name=path.stem,
        private=False,
    )


def save_npz_pieces(
    path: Path,
    splits: Mapping[str, tuple[Int[Tensor, " n"], Iterable[UInt8[Tensor, "k c h w"]]]],
    *,
    classes: tuple[str, ...],
    shape: tuple[int, int, int],
    note: str = "",
) -> Path:
    """Write labels and images of each split, which come piece by piece and are never all in memory.

    `load_npz` reads it back; `read_note` has the note.
    """
    empty = torch.empty(0, *shape, dtype=torch.uint8)
    with atomic(path) as file, ZipFile(file, "w", ZIP_DEFLATED) as archive:

        def write(name: str, array: np.ndarray) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)

        for split in PARTS:
            labels, pieces = splits.get(split, (torch.empty(0, dtype=torch.int64), ()))
            with archive.open(f"x_{split}.npy", "w", force_zip64=True) as member:
                kind = np.lib.format.header_data_from_array_1_0(keras_layout(empty))
                kind["shape"] = (len(labels), *kind["shape"][1:])
                np.lib.format.write_array_header_1_0(member, kind)
                written = 0
                for piece in pieces:
                    member.write(keras_layout(piece).tobytes())
                    written += len(piece)
            assert written == len(labels), f"{written} images and {len(labels)} labels"
            write(f"y_{split}", labels.numpy())
        write("classes", np.array(classes, dtype=np.str_))
        if note:
            write("note", np.array(note))
    return path


def read_npz_note(path: Path) -> str | None:
    """What `save_npz_pieces` noted in a file; None if it wrote no such file."""
    try:
        arrays = open_npz(path).read(["note"])
    except DataError:  # whatever it is, it is not ours
        return None
    return str(arrays["note"]) if "note" in arrays else None


def _require_classes(
    path: Path, names: np.ndarray | None, labels: np.ndarray, like: Images
) -> None:
    """Refuse samples of other classes than `like` has, or of only some of them."""
    known = like.classes if names is None else tuple(map(str, names.ravel()))
    require_same_classes(known, str(path), like.classes, like.name)
    found, wanted = set(labels.tolist()), set(range(len(like.classes)))
    if found - wanted:
        raise DataError(
            f"{path} has a label {min(found - wanted)}, and the {len(wanted)} classes of "
            f'"{like.name}" are numbered from 0.'
        )
    if wanted - found:
        name = like.classes[min(wanted - found)]
        raise DataError(f'{path} has no image of class "{name}". Every class needs some.')


def _people(arrays: dict[str, np.ndarray], split: str, path: Path) -> torch.Tensor | None:
    if f"people_{split}" not in arrays:
        return None
    names = arrays[f"people_{split}"]
    if names.dtype.kind not in "iuUS" or names.shape[1:] not in ((), (1,)):
        raise DataError(f"{path}: people_{split} must be one whole number or name per image.")
    numbers = np.unique(names, return_inverse=True)[1]
    return torch.from_numpy(numbers.ravel().astype(np.int64))


class ArrayHeader(NamedTuple):
    """What an array is, as the file says before its data."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class NpzFile:
    """An .npz file by its headers: what is in it is checked before anything is unpacked."""

    path: Path
    headers: dict[str, ArrayHeader]

    def require(self, names: Sequence[str], why: str = "") -> None:
        """Refuse a file without these arrays, or where reading one of them would run code."""
        missing = [name for name in names if name not in self.headers]
        if missing:
            raise DataError(
                f"{self.path} has no array {missing[0]}; it holds "
                f"{', '.join(self.headers) or 'none'}. {why} {', '.join(names)}."
            )
        if any(self.headers[name].dtype.hasobject for name in names):
            raise DataError(
                f"{self.path} holds an object array, and opening it would run code from the file. "
                "Save plain arrays of one shape instead."
            )
        if any(self.headers[name].dtype.kind == "V" for name in names):
            raise DataError(f"{self.path} has entries that are no plain arrays of numbers.")

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Those of these arrays that are there, if memory has room for them."""
        found = [name for name in dict.fromkeys(names) if name in self.headers]
        self.require(found)
        sizes = (self.headers[name] for name in found)
        # Images are rearranged into bytes: a copy beside what is read.
        needed = sum(header.nbytes + math.prod(header.shape) for header in sizes)
        require_memory(needed, f"the arrays of {self.path}", "Give a smaller file.")
        with _reading(self.path), self.path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            return {name: file[name] for name in found}


def open_npz(path: Path) -> NpzFile:
    """The headers of a file. Raises `DataError` for what is no .npz file, or a damaged one."""
    headers = {}
    with _reading(path):
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("no file")
    with _reading(path), path.open("rb") as opened, ZipFile(opened) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in headers:
                raise ValueError(f"{name} is there twice")
            if name == member.filename:
                headers[name] = ArrayHeader((member.file_size,), np.dtype("V1"))  # no array
                continue
            with archive.open(member) as data:
                headers[name] = header = _read_header(data)
                whole = data.tell() + header.nbytes == member.file_size
                if not whole and not header.dtype.hasobject:
                    raise ValueError(f"{name} is not as long as its header says")
    return NpzFile(path, headers)


def _read_header(data: BufferedIOBase | IO[bytes]) -> ArrayHeader:
    version = np.lib.format.read_magic(data)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = readers[version](data)
    return ArrayHeader(shape, dtype)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except PermissionError:
        raise DataError(f"{path} may not be read by you.") from None
    except Exception as problem:  # a damaged file can break the reader anywhere
        # Not what numpy says: it advises to trust the file.
        raise DataError(f"{path} is damaged or no .npz file.") from problem


def _check_pair(file: NpzFile, images: str, labels: str, *, one_hot: bool = False) -> None:
    """Refuse images and labels that cannot belong together, by their headers."""
    shape = _check_pixels(file.headers[images], f"{file.path}: {images}")
    header = file.headers[labels]
    if not one_hot:
        _check_labels(header, f"{file.path}: {labels}")
    if shape[0] != header.shape[0]:
        raise DataError(
            f"{file.path}: {images} has {shape[0]} images and {labels} {header.shape[0]} labels. "
            "Each image needs one label."
        )


def _check_parts(file: NpzFile, framing: Framing | None) -> None:
    """Refuse train and test images that cannot be of one kind."""
    train, test = file.headers["x_train"], file.headers["x_test"]
    if not train.shape[0] or not test.shape[0]:
        return
    if "f" in train.dtype.kind + test.dtype.kind and train.dtype.kind != test.dtype.kind:
        raise DataError(
            f"{file.path}: x_train is of type {train.dtype} and x_test of {test.dtype}. One scale "
            "is needed for both: give bytes, or floats from 0 to 1."
        )
    resized = framing is not None and framing != Framing()
    if not resized and train.shape[1:3] != test.shape[1:3]:
        raise DataError(
            f"{file.path}: x_train has images of {train.shape[1:3]} (height, width) and x_test of "
            f"{test.shape[1:3]}. Give --image-size, or make them alike."
        )


def _check_pixels(header: ArrayHeader, where: str) -> tuple[int, int, int, int]:
    """Count, channels, height and width."""
    shape = (*header.shape, 1) if len(header.shape) == 3 else header.shape
    if len(shape) != 4 or shape[-1] not in (1, 3):
        hint = " Move the channels last." if len(shape) == 4 and shape[1] in (1, 3) else ""
        raise DataError(f"{where} has shape {header.shape}, not n h w or n h w 3.{hint}")
    if min(shape[1:3]) == 0:
        raise DataError(f"{where} has images without pixels: shape {header.shape}.")
    if header.dtype.kind not in "iuf":
        raise DataError(f"{where} is of type {header.dtype}: images are bytes, or floats in 0..1.")
    count, height, width, channels = shape
    return count, channels, height, width


def _check_labels(header: ArrayHeader, where: str) -> None:
    if header.shape[1:] not in ((), (1,)) or not header.shape:
        raise DataError(f"{where} has shape {header.shape}: labels are one number per image.")
    if not np.issubdtype(header.dtype, np.integer):
        raise DataError(f"{where} is of type {header.dtype}: labels are whole numbers.")


def _pixels(array: np.ndarray, where: str) -> np.ndarray:
    """Images whose header was checked, as bytes, n c h w."""
    array = array[..., None] if array.ndim == 3 else array
    return np.ascontiguousarray(_bytes(array, where).transpose(0, 3, 1, 2))


def _bytes(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all():
            raise DataError(f"{where} holds NaN or infinity. Clean the images first.")
        if low < 0 or high > 1:
            raise DataError(
                f"{where} holds floats from {low:g} to {high:g}. Give bytes, or floats from 0 to 1."
            )
        return np.round(array * 255).astype(np.uint8)
    if low < 0 or high > 255:
        raise DataError(f"{where} holds values from {low:g} to {high:g}, not bytes (0 to 255).")
    return array.astype(np.uint8)


def _labels(array: np.ndarray, where: str) -> np.ndarray:
    """Labels whose header was checked."""
    array = array.ravel()
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < 2**63:
        raise DataError(f"{where} holds labels below 0 or beyond 2^63: classes count from 0.")
    return array.astype(np.int64)


def _class_names(arrays: dict[str, np.ndarray], values: np.ndarray, path: Path) -> tuple[str, ...]:
    if "classes" not in arrays:
        return tuple(str(value) for value in values)
    names = arrays["classes"]
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: classes must be a list of names, one a class.")
    wrong = values[values >= len(names)]
    if len(wrong):
        raise DataError(
            f"{path} has a label {wrong.min()}, and the {len(names)} classes that it names are "
            "numbered from 0."
        )
    return tuple(str(name) for name in names)
