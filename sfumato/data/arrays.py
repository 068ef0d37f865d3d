"""Images from an `.npz` file in the Keras layout: x_train, y_train, x_test, y_test; and samples.

Images are n h w (grey) or n h w c with 1 or 3 channels; bytes, or floats between 0 and 1. Labels
are whole numbers. An optional `classes` array names the classes; optional `people_train` and
`people_test` say, by a number or a name, who is on each image. Nothing is ever unpickled.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from sfumato.data.classes import require_same
from sfumato.data.images import Images, keras_layout
from sfumato.errors import DataError
from sfumato.files import atomic

LAYOUTS = (
    ("x_train", "y_train"), ("samples", "label"), ("samples", "labels"), ("arr_0", "arr_1")
)  # fmt: skip
"""Where a file has samples and their labels: ours, EDM-G++'s, DPTrainer's, guided diffusion's."""


def load_npz(path: Path, split: str, *, private: bool, name: str | None = None) -> Images:
    """One split of the file. The classes are those of the whole file, so that splits agree."""
    arrays = _read(path)
    pixels = _pixels(arrays[f"x_{split}"], f"{path}: x_{split}")
    labels = _labels(arrays[f"y_{split}"], f"{path}: y_{split}")
    if len(pixels) != len(labels):
        raise DataError(
            f"{path}: x_{split} has {len(pixels)} images and y_{split} {len(labels)} labels. "
            "Each image needs one label."
        )
    both = [_labels(arrays[key], f"{path}: {key}") for key in ("y_train", "y_test")]
    values = np.unique(np.concatenate(both))
    classes = _class_names(arrays, values, path)
    if "classes" not in arrays:
        labels = np.searchsorted(values, labels)
    return Images(
        pixels=torch.from_numpy(pixels),
        labels=torch.from_numpy(labels.astype(np.int64)),
        classes=classes,
        name=f"{name or path.resolve().stem}-{split}",
        private=private,
        people=_people(arrays, split),
    )


def load_samples(path: Path, like: Images) -> Images:
    """Public images that a generator left in a file, for use beside those of `like`.

    LAYOUTS has the arrays that hold them. A label is the place of its class in those of `like`, or
    a row with its highest number there. Raises `DataError` if labels are missing, if size, colour
    or classes are others, or if a class has no image.
    """
    arrays, there = _arrays(path, tuple(name for pair in LAYOUTS for name in (*pair, "classes")))
    pair = next((pair for pair in LAYOUTS if set(pair) <= arrays.keys()), None)
    if pair is None:
        layouts = ", or ".join(" and ".join(names) for names in LAYOUTS)
        images = any(name in arrays for name, _ in LAYOUTS)
        raise DataError(
            f"{path} has no {'labels' if images else 'images'}: it holds "
            f"{', '.join(there) or 'nothing'}, and {layouts} are wanted. Samples need labels: "
            "draw them by a class-conditional generator, and keep what it was asked for."
        )
    pixels, labels = _pixels(arrays[pair[0]], f"{path}: {pair[0]}"), arrays[pair[1]]
    labels = labels.argmax(1) if labels.ndim == 2 and labels.shape[1] > 1 else labels
    labels = _labels(labels, f"{path}: {pair[1]}")
    if pixels.shape[1:] != like.shape:
        raise DataError(
            f'{path} has images of {pixels.shape[1:]} (channels, height, width) and "{like.name}" '
            f"of {like.shape}: they must be alike."
        )
    _require_classes(path, arrays.get("classes"), labels, like)
    return Images(
        pixels=torch.from_numpy(pixels), labels=torch.from_numpy(labels), classes=like.classes,
        name=path.stem, private=False,
    )  # fmt: skip


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

        for split in ("train", "test"):
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


def read_note(path: Path) -> str | None:
    """What `save_npz_pieces` noted in a file; None if it wrote no such file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return str(file["note"]) if "note" in file else None
    except Exception:  # whatever it is, it is not ours
        return None


def _require_classes(
    path: Path, names: np.ndarray | None, labels: np.ndarray, like: Images
) -> None:
    """Refuse samples of other classes than `like` has, or of only some of them."""
    known = like.classes if names is None else tuple(map(str, names.ravel()))
    require_same(known, str(path), like.classes, like.name)
    found, wanted = set(labels.tolist()), set(range(len(like.classes)))
    if found - wanted:
        raise DataError(
            f"{path} has a label {min(found - wanted)}, and the {len(wanted)} classes of "
            f'"{like.name}" are numbered from 0.'
        )
    if wanted - found:
        name = like.classes[min(wanted - found)]
        raise DataError(f'{path} has no image of class "{name}". Every class needs some.')


def _people(arrays: dict[str, np.ndarray], split: str) -> torch.Tensor | None:
    if f"people_{split}" not in arrays:
        return None
    numbers = np.unique(arrays[f"people_{split}"], return_inverse=True)[1]
    return torch.from_numpy(numbers.ravel().astype(np.int64))


def _read(path: Path) -> dict[str, np.ndarray]:
    needed = ("x_train", "y_train", "x_test", "y_test")
    arrays, there = _arrays(path, (*needed, "classes", "people_train", "people_test"))
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise DataError(
            f"{path} has no array {missing[0]}; it holds {', '.join(there) or 'none'}."
            f" The Keras layout needs {', '.join(needed)}."
        )
    return arrays


def _arrays(path: Path, wanted: tuple[str, ...]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those of the wanted arrays that are there, and the names of all."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {key: file[key] for key in wanted if key in file}, file.files
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except PermissionError:
        raise DataError(f"{path} may not be read by you.") from None
    except Exception as problem:  # a damaged file can break the reader anywhere
        if "Object arrays cannot be loaded" in str(problem):
            raise DataError(
                f"{path} holds an object array, and opening it would run code from the file. Save "
                "plain arrays of one shape instead."
            ) from problem
        # Not what numpy says: it advises to trust the file.
        raise DataError(f"{path} is damaged or no .npz file.") from problem


def _pixels(array: np.ndarray, where: str) -> np.ndarray:
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3):
        hint = " Move the channels last." if array.ndim == 4 and array.shape[1] in (1, 3) else ""
        raise DataError(f"{where} has shape {array.shape}, not n h w or n h w 3.{hint}")
    if min(array.shape[1:3]) == 0:
        raise DataError(f"{where} has images without pixels: shape {array.shape}.")
    return np.ascontiguousarray(_bytes(array, where).transpose(0, 3, 1, 2))


def _bytes(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind not in "iuf":
        raise DataError(f"{where} is of type {array.dtype}: images are bytes, or floats in 0..1.")
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
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"{where} has shape {array.shape}: labels are one number an image.")
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{where} is of type {array.dtype}: labels are whole numbers.")
    if len(array) and int(array.max()) >= 2**63:
        raise DataError(f"{where} holds labels beyond 2^63.")
    return array.astype(np.int64)


def _class_names(arrays: dict[str, np.ndarray], values: np.ndarray, path: Path) -> tuple[str, ...]:
    if "classes" not in arrays:
        return tuple(str(value) for value in values)
    names = arrays["classes"]
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: classes must be a list of names, one a class.")
    wrong = values[(values < 0) | (values >= len(names))]
    if len(wrong):
        raise DataError(
            f"{path} has a label {wrong.min()}, and the {len(names)} classes that it names are "
            "numbered from 0."
        )
    return tuple(str(name) for name in names)
