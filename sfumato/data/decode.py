"""Image files as bytes: turned as their EXIF tag says, framed, decoded in parallel into one tensor.

The heads of all files are read first, which is quick: they say whether the images have room in
memory, how much of them would be cut off, and which are no images at all.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from warnings import warn

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from sfumato.data.framing import Framing
from sfumato.errors import DataError, SfumatoWarning

SHOWN = 20
GREY = ("1", "L", "LA")
Found = TypeVar("Found")


class ImageHeader(NamedTuple):
    """What a file says of its image before its pixels."""

    size: tuple[int, int]
    """Height and width, before it is turned."""
    channels: int


class Decoded(NamedTuple):
    """The pixels of a file, h w c, and its largest value if it is a 16-bit image."""

    pixels: np.ndarray
    high: int


def decode(files: Sequence[Path], framing: Framing, name: str) -> UInt8[Tensor, "n c h w"]:
    """Pixels of all files of the set called `name`; grey when every file is grey.

    Unless the framing gives all files one size, they must have one already. Raises one `DataError`
    for all files that cannot be read.
    """
    return decode_parts([files], framing, name)[0]


def decode_parts(
    parts: Sequence[Sequence[Path]], framing: Framing, name: str
) -> list[UInt8[Tensor, "n c h w"]]:
    """The same of several parts of a set, such as train and test, one by one."""
    bad: dict[Path, DataError] = {}
    with ThreadPoolExecutor() as pool:
        heads = [_each(pool, _read_head, files, bad) for files in parts]
        for files, some in zip(parts, heads, strict=True):
            for file, head in zip(files, some, strict=True):
                if head is not None:
                    framing.require_crop(head.size, str(file))
        known = [head for some in heads for head in some if head is not None]
        if known:
            framing.require_room(len(known), max(head.channels for head in known), known[0].size)
            framing.tell_cut([head.size for head in known], name)
        made = []
        for files, some in zip(parts, heads, strict=True):
            channels = max((head.channels for head in some if head is not None), default=1)
            made.append(_decode_part(files, framing, channels, pool, bad))
    if bad:
        raise all_bad([str(bad[file]) for files in parts for file in files if file in bad])
    return made


def decode_file(file: Path, framing: Framing) -> np.ndarray:
    """One file, turned, framed, and grey or in colour as it is: height, width, channels."""
    try:
        return _decoded(file, framing).pixels
    except DataError as problem:
        raise all_bad([str(problem)]) from problem


def decode_picture(picture: Image.Image, framing: Framing) -> np.ndarray:
    """The same of a picture that is open already."""
    return _to_array(_to_bytes(ImageOps.exif_transpose(picture)), framing, "the picture")


def all_bad(problems: Sequence[str]) -> DataError:
    """One error for all files that cannot be used: the first of them, and how many there are."""
    if len(problems) == 1:
        return DataError(f"{problems[0]} Replace it or take it away.")
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    listed = "\n  ".join([*problems[:SHOWN], *more])
    return DataError(
        f"{len(problems)} files cannot be used. Replace them or take them away.\n  {listed}"
    )


def _each(
    pool: ThreadPoolExecutor,
    work: Callable[[Path], Found],
    files: Sequence[Path],
    bad: dict[Path, DataError],
) -> list[Found | None]:
    """What the work finds for each file; None for those that are bad, which it notes down."""

    def tried(file: Path) -> Found | None:
        try:
            return None if file in bad else work(file)
        except DataError as problem:
            bad[file] = problem
            return None

    return list(pool.map(tried, files))


def _decode_part(
    files: Sequence[Path],
    framing: Framing,
    channels: int,
    pool: ThreadPoolExecutor,
    bad: dict[Path, DataError],
) -> UInt8[Tensor, "n c h w"]:
    """All files in one array, whose size is that of the first."""
    rows = {file: row for row, file in enumerate(files)}
    assert len(rows) == len(files), "a file is listed twice"
    pixels = np.empty((0, channels, 1, 1), dtype=np.uint8)

    def store(file: Path) -> tuple[Path, tuple[int, ...], int]:
        nonlocal pixels
        array, high = _decoded(file, framing)
        if not len(pixels):
            pixels = np.empty((len(files), channels, *array.shape[:2]), dtype=np.uint8)
        if pixels.shape[2:] == array.shape[:2]:
            pixels[rows[file]] = array.transpose(2, 0, 1)  # grey fills all channels
        return file, array.shape[:2], high

    found = []
    while not len(pixels) and len(found) < len(files):  # one alone, which makes the array
        found += _each(pool, store, files[len(found) : len(found) + 1], bad)
    found += _each(pool, store, files[len(found) :], bad)
    if not bad:
        _require_one_size([(file, size) for file, size, _ in found])
        _tell_dark(*max(((high, file) for file, _, high in found), default=(0, Path())))
    return torch.from_numpy(pixels)


def _require_one_size(found: Sequence[tuple[Path, tuple[int, ...]]]) -> None:
    for file, size in found:
        if size != found[0][1]:
            raise DataError(
                f"the images differ in size: {found[0][0]} is {_told(found[0][1])} and {file} is "
                f"{_told(size)}. Give --image-size to resize them."
            )


def _tell_dark(high: int, file: Path) -> None:
    """Warn of 16-bit images that use so little of their range that few grey levels are left.

    They are not scaled: by how much would depend on private images.
    """
    bits = high.bit_length()
    if 0 < bits < 15:
        warn(
            f"16-bit images such as {file} have values of {bits} bits alone, and as bytes "
            f"{max(1, 2 ** (bits - 8))} grey levels. Convert them first, by a factor that you know "
            "without looking: values of 12 bits times 16, say.",
            SfumatoWarning,
            stacklevel=2,
        )


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """A file as an image; what is none is a `DataError` that names it, without a remedy."""
    try:
        with Image.open(file) as opened:
            yield opened
    except UnidentifiedImageError:
        raise DataError(f"{file} cannot be read as an image (it is empty or no image).") from None
    except Exception as problem:  # a damaged file can break its decoder anywhere
        raise DataError(f"{file} cannot be read as an image ({problem}).") from problem


def _read_head(file: Path) -> ImageHeader:
    with _opened(file) as opened:
        grey = opened.mode in GREY or opened.mode.startswith("I")
        return ImageHeader((opened.height, opened.width), 1 if grey else 3)


def _decoded(file: Path, framing: Framing) -> Decoded:
    with _opened(file) as opened:
        picture = ImageOps.exif_transpose(opened)
        high = int(np.asarray(picture).max()) if picture.mode.startswith("I") else 0
        picture = _to_bytes(picture)
    return Decoded(_to_array(picture, framing, str(file)), high)


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
        plain = "L" if picture.mode in GREY else "RGB"
        return Image.alpha_composite(paper, above).convert(plain)
    return picture.convert("L" if picture.mode in GREY else "RGB")


def _told(size: tuple[int, ...]) -> str:
    return f"{size[1]}x{size[0]}"
