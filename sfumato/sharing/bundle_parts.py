"""The parts of a bundle on disk: images in one of two formats, and soft labels.

Reading is strict, for a bundle may come from anybody: nothing is unpickled, and a file that holds
more than it should is refused, because what nobody looks at is what leaks.
"""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from sfumato.data.arrays import NpzFile, load_npz, open_npz
from sfumato.data.images import Images
from sfumato.errors import DataError
from sfumato.files import atomic
from sfumato.sharing.card import BundleCard

ARRAYS = {"x_train", "y_train", "x_test", "y_test", "classes"}
COLUMNS = ["file", "label", "class"]


def part_names(card: BundleCard) -> set[str]:
    """The files that a bundle with this card consists of, besides card.json."""
    always = {"card.md", "ledger.jsonl", "soft_labels.npz"}
    if "images.npz" in card.files:
        return always | {"images.npz"}
    pictures = len(card.files) - len(always) - 1
    return always | {"labels.csv"} | {_png_name(index) for index in range(pictures)}


def write_images(folder: Path, images: Images, format: Literal["npz", "png"]) -> None:
    """Write images.npz, or one PNG an image and labels.csv; who is on them is left out."""
    images = replace(images, pixels=images.pixels.cpu(), people=None)
    if format == "npz":
        images.save_npz(folder / "images.npz")
        return
    (folder / "images").mkdir(exist_ok=True)
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(COLUMNS)
    for index, label in enumerate(images.labels.tolist()):
        rows.writerow([_png_name(index), label, images.classes[label]])
        pixels = images.pixels[index].permute(1, 2, 0).numpy()
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        # Not atomic, for speed: the card is written later and has their hashes.
        picture.save(folder / _png_name(index))
    with atomic(folder / "labels.csv") as file:
        file.write(table.getvalue().encode())


def read_images(folder: Path, card: BundleCard) -> Images:
    """The images of a bundle, public by their ledger; `DataError` for anything out of place."""
    read = _read_npz if "images.npz" in card.files else _read_png
    return replace(read(folder, card), name=f"{card.private}-synthetic")


def write_soft_labels(folder: Path, logits: Float[Tensor, "n classes"], temperature: float) -> None:
    """Write soft_labels.npz."""
    with atomic(folder / "soft_labels.npz") as file:
        np.savez_compressed(file, logits=logits.numpy(), temperature=np.float64(temperature))


def read_soft_labels(folder: Path) -> tuple[Float[Tensor, "n classes"], float]:
    """Logits and temperature of a bundle."""
    path = folder / "soft_labels.npz"
    file = _open(path, {"logits", "temperature"})
    logits, temperature = file.headers["logits"], file.headers["temperature"]
    if (
        logits.dtype != np.float32
        or len(logits.shape) != 2
        or temperature.shape != ()
        or temperature.dtype.kind != "f"
    ):
        raise DataError(f"{path} must hold float32 logits, n x classes, and one temperature.")
    arrays = file.read(["logits", "temperature"])
    return torch.from_numpy(arrays["logits"]), float(arrays["temperature"])


def soft_label_problems(
    logits: Float[Tensor, "n classes"], temperature: float, images: int, classes: int
) -> list[str]:
    """What keeps soft labels from being those of this many images and classes."""
    problems = []
    if logits.shape != (images, classes):
        problems.append(
            f"there are {images} images in {classes} classes, and logits for {len(logits)} images "
            f"in {logits.shape[1]} classes: they do not belong together."
        )
    if not logits.isfinite().all():
        problems.append("some logits are not finite: nothing can be learned from them.")
    if not 0 < temperature < math.inf:
        problems.append(f"temperature={temperature:g} must be a positive number.")
    return problems


def _png_name(index: int) -> str:
    return f"images/{index:06d}.png"


def _read_npz(folder: Path, card: BundleCard) -> Images:
    path = folder / "images.npz"
    headers = _open(path, ARRAYS).headers
    if any(0 not in headers[name].shape[:1] for name in ("x_test", "y_test")):
        raise DataError(f"{path} holds test images too, which are no part of a release.")
    return load_npz(path, "train", private=False)


def _open(path: Path, names: set[str]) -> NpzFile:
    """A file with these arrays and no others, none of them unpacked yet."""
    file = open_npz(path)
    if file.headers.keys() != names:
        found = ", ".join(sorted(file.headers))
        raise DataError(f"{path} holds {found}, and should hold {', '.join(sorted(names))}.")
    return file


def _read_png(folder: Path, card: BundleCard) -> Images:
    path = folder / "labels.csv"
    try:
        head, *rows = list(csv.reader(io.StringIO(path.read_bytes().decode())))
        labels = [int(row[1]) for row in rows]
        wanted = [[_png_name(i), str(n), card.classes[n]] for i, n in enumerate(labels)]
    except (OSError, ValueError, IndexError, csv.Error) as problem:
        raise DataError(f"{path} cannot be read ({problem}).") from problem
    if head != COLUMNS or rows != wanted or not rows:
        raise DataError(f"{path} does not name images, labels and classes in their order.")
    return Images(
        pixels=torch.stack([_decode(folder / row[0], card.shape) for row in rows]),
        labels=torch.tensor(labels, dtype=torch.int64),
        classes=card.classes,
        name="images",
        private=False,
    )


def _decode(path: Path, shape: tuple[int, int, int]) -> UInt8[Tensor, "c h w"]:
    channels, height, width = shape
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            kind = (picture.mode, picture.height, picture.width)
            if kind != ("L" if channels == 1 else "RGB", height, width):
                raise DataError(
                    f"{path} is a picture of {kind} (mode, height, width), and the card says "
                    f"{shape} (channels, height, width)."
                )
            pixels = np.array(picture)
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise DataError(f"{path} cannot be read as PNG ({problem}).") from problem
    return torch.from_numpy(pixels).reshape(height, width, channels).permute(2, 0, 1)
