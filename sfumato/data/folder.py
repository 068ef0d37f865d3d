"""Images from a folder tree with one folder a class.

    pictures/cat/1.jpg  pictures/dog/2.png           split by us, one fifth of each class for test
    pictures/train/cat/1.jpg  pictures/test/cat/2.jpg   split by you ("val" works for "test")

Files are decoded in parallel, turned as their EXIF tag says, and resized with antialiasing. Who is
on an image is said by a folder (cat/anna/1.jpg) or by a table (see `people`).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from warnings import warn

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from sfumato.data.classes import find_classes
from sfumato.data.framing import Framing
from sfumato.data.images import Images
from sfumato.data.people import number, people_by_csv, people_by_folder
from sfumato.errors import DataError, SfumatoWarning

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
OTHER_SUFFIXES = (".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif", ".dcm")
TEST_NAMES = ("test", "val", "valid", "validation")
TEST_SHARE = 0.2


def load_folder(
    path: Path,
    split: str,
    *,
    private: bool,
    framing: Framing,
    people: str | None = None,
    listed: str | None = None,
) -> Images:
    """One split of a folder tree. Classes are the folders of train, in alphabetical order.

    `people` is None, "folder", or a table: FILE.csv or FILE.csv:COLUMN, its column "file" holding
    names relative to the folder. With `listed` classes it need not know who is on images of others:
    all are read, since the split is that of the whole folder.
    """
    root, ours = _split_root(path, split)
    classes = _class_names(path if ours else path / "train")
    files, labels = _find(root, classes)
    if private and people is None:
        _tell_nested(files, root)
    name = f"{path.resolve().name}-{split}"
    kept = range(len(classes)) if listed is None else find_classes(listed, classes, name)
    wanted = [file for file, label in zip(files, labels, strict=True) if label in kept]
    images = Images(
        pixels=decode(files, framing),
        labels=torch.tensor(labels),
        classes=classes,
        name=name,
        private=private,
        people=None if people is None else _people(files, wanted, path, root, people),
    )
    if not ours:
        return images
    test, train = images.split(TEST_SHARE, seed=0)
    return test if split == "test" else train


def _tell_nested(files: list[Path], root: Path) -> None:
    """Hint at people, where folders within classes look like theirs: the promise is for images."""
    nested = next((file for file in files if len(file.relative_to(root).parts) > 2), None)
    if nested is not None:
        warn(
            f"there are folders in the classes of {root}, such as {nested.parent.name}. If these "
            "are people, each image of theirs is hidden, and they are not: add --unit person "
            "--people folder.",
            SfumatoWarning,
            stacklevel=2,
        )


def _people(files: list[Path], wanted: list[Path], path: Path, root: Path, source: str) -> Tensor:
    """Who is on each of the files; those that are not wanted show one person each."""
    by_folder = source == "folder"
    names = people_by_folder(wanted, root) if by_folder else people_by_csv(wanted, path, source)
    known = dict(zip(wanted, names, strict=True))
    return number([known.get(file, str(file)) for file in files])


def decode(files: Sequence[Path], framing: Framing) -> UInt8[Tensor, "n c h w"]:
    """Pixels of all files, n c h w; grey when every file is grey.

    Unless the framing gives all files one size, they must have one already.
    """
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda file: _decoded(file, framing), files))
    arrays = [array for array, _ in found]
    _tell_dark(files, max((high for _, high in found), default=0))
    if len({array.shape[:2] for array in arrays}) > 1:
        first = arrays[0].shape[:2]
        other = next(i for i, array in enumerate(arrays) if array.shape[:2] != first)
        raise DataError(
            f"the images differ in size: {files[0]} is {_size(arrays[0])} and {files[other]} is "
            f"{_size(arrays[other])}. Give --image-size to resize them."
        )
    channels = max(array.shape[2] for array in arrays)
    same = [np.broadcast_to(array, (*array.shape[:2], channels)) for array in arrays]
    return torch.from_numpy(np.stack(same)).permute(0, 3, 1, 2).contiguous()


def _tell_dark(files: Sequence[Path], high: int) -> None:
    """Warn of 16-bit images that use so little of their range that few grey levels are left.

    They are not scaled: by how much would depend on private images.
    """
    bits = high.bit_length()
    if 0 < bits < 15:
        warn(
            f"16-bit images such as {files[0]} have values of {bits} bits alone, and as bytes "
            f"{max(1, 2 ** (bits - 8))} grey levels. Convert them first, by a factor that you know "
            "without looking: values of 12 bits times 16, say.",
            SfumatoWarning,
            stacklevel=2,
        )


def decode_file(file: Path, framing: Framing) -> np.ndarray:
    """One file, turned, framed, and grey or in colour as it is: height, width, channels."""
    return _decoded(file, framing)[0]


def _decoded(file: Path, framing: Framing) -> tuple[np.ndarray, int]:
    """The pixels of a file, and the largest value if it is a 16-bit image."""
    try:
        with Image.open(file) as opened:
            picture = ImageOps.exif_transpose(opened)
            high = int(np.asarray(picture).max()) if picture.mode.startswith("I") else 0
            picture = _to_bytes(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise DataError(
            f"{file} cannot be read as an image ({problem}). Replace it or take it away."
        ) from problem
    return _to_array(picture, framing, str(file)), high


def decode_picture(picture: Image.Image, framing: Framing) -> np.ndarray:
    """The same of a picture that is open already."""
    return _to_array(_to_bytes(ImageOps.exif_transpose(picture)), framing, "the picture")


def _to_array(picture: Image.Image, framing: Framing, name: str) -> np.ndarray:
    array = np.asarray(framing.picture(picture, name))
    return array[..., None] if array.ndim == 2 else array


def _to_bytes(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):
        # 16-bit grey, as scanners write it: Pillow's own conversion would cut it off at 255.
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8))
    if picture.has_transparency_data:  # what a viewer would show on white paper
        above = picture.convert("RGBA")
        paper = Image.new("RGBA", above.size, "white")
        plain = "L" if picture.mode in ("1", "L", "LA") else "RGB"
        return Image.alpha_composite(paper, above).convert(plain)
    return picture.convert("L" if picture.mode in ("1", "L") else "RGB")


def _split_root(path: Path, split: str) -> tuple[Path, bool]:
    """Where the split lives, and whether it is ours to make."""
    if not path.is_dir():
        raise DataError(
            f"{path} is neither an .npz file nor a folder with one folder of images a class."
        )
    if not (path / "train").is_dir():
        return path, True
    if split == "train":
        return path / "train", False
    for name in TEST_NAMES:
        if (path / name).is_dir():
            return path / name, False
    raise DataError(f"{path} has a train folder and none of {', '.join(TEST_NAMES)} beside it.")


def _class_names(root: Path) -> tuple[str, ...]:
    folders = sorted(item.name for item in root.iterdir() if item.is_dir() and item.name[0] != ".")
    if not folders:
        raise DataError(f"{root} has no folders in it. Put the images into one folder a class.")
    return tuple(folders)


def _find(root: Path, classes: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    files: list[Path] = []
    labels: list[int] = []
    for name in _class_names(root):
        if name not in classes:
            raise DataError(f"{root / name} is a class that train does not have. Take it away.")
        found = _files(root / name)
        other = [item for item in found if item.suffix.lower() in OTHER_SUFFIXES]
        if other:
            raise DataError(f"{other[0]} is no JPEG, PNG or WebP file. Convert it or take it away.")
        pictures = [item for item in found if item.suffix.lower() in SUFFIXES]
        if not pictures:
            kinds = ", ".join(SUFFIXES)
            raise DataError(f"{root / name} has no images ({kinds}). Fill it or take it away.")
        files += pictures
        labels += [classes.index(name)] * len(pictures)
    return files, labels


def _files(folder: Path) -> list[Path]:
    """All files below a folder, apart from hidden ones and those in hidden folders."""
    items = [
        item
        for item in sorted(folder.rglob("*"))
        if not any(part.startswith(".") for part in item.relative_to(folder).parts)
    ]
    broken = next((item for item in items if not item.exists()), None)
    if broken is not None:
        raise DataError(f"{broken} is a link to nothing. Mend it or take it away.")
    return [item for item in items if item.is_file()]


def _size(array: np.ndarray) -> str:
    return f"{array.shape[1]}x{array.shape[0]}"
