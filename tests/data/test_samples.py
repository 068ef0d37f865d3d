"""Samples of a generator, from the files that generators leave."""

import re

import numpy as np
import pytest
import torch

from sfumato.data.arrays import load_samples
from sfumato.data.images import Images
from sfumato.errors import DataError

LIKE = Images(
    pixels=torch.zeros(2, 3, 4, 4, dtype=torch.uint8), labels=torch.tensor([0, 1]),
    classes=("cat", "dog", "owl"), name="pets", private=True,
)  # fmt: skip
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
LABELS = np.array([2, 0, 1, 1, 0, 2])


def load(tmp_path, **arrays):
    np.savez(tmp_path / "made.npz", **arrays)
    return load_samples(tmp_path / "made.npz", LIKE)


@pytest.mark.parametrize(
    "arrays",
    [
        {"samples": PIXELS, "label": np.eye(3)[LABELS]},
        {"samples": PIXELS, "label": LABELS},
        {"samples": PIXELS, "labels": np.eye(3)[LABELS]},
        {"arr_0": PIXELS, "arr_1": LABELS},
        {"x_train": PIXELS, "y_train": LABELS, "classes": np.array(LIKE.classes)},
        {"x_train": PIXELS, "y_train": LABELS[:, None]},
    ],
    ids=["EDM-G++, one hot", "EDM-G++", "DPTrainer", "guided diffusion", "ours", "Keras"],
)
def test_every_layout_gives_the_same_public_images(tmp_path, arrays):
    found = load(tmp_path, **arrays)
    assert (found.pixels.permute(0, 2, 3, 1).numpy() == PIXELS).all()
    assert found.labels.tolist() == LABELS.tolist()
    assert (found.classes, found.private) == (LIKE.classes, False)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"samples": PIXELS}, "has no labels: it holds samples, and x_train and y_train, or"),
        ({"label": LABELS}, "has no images: it holds label"),
        (
            {"samples": PIXELS[:, :3], "label": LABELS},
            'has images of (3, 3, 4) (channels, height, width) and "pets" of (3, 4, 4)',
        ),
        ({"samples": PIXELS[..., 0], "label": LABELS}, "has images of (1, 4, 4)"),
        ({"samples": PIXELS.transpose(0, 3, 1, 2), "label": LABELS}, "Move the channels last"),
        (
            {"samples": PIXELS, "label": LABELS + 1},
            'has a label 3, and the 3 classes of "pets" are numbered from 0',
        ),
        ({"samples": PIXELS, "label": np.eye(4)[LABELS + 1]}, "has a label 3"),
        ({"samples": PIXELS, "label": LABELS % 2}, 'has no image of class "owl"'),
        ({"samples": PIXELS, "label": LABELS[1:]}, "6 images and label 5 labels"),
        ({"samples": PIXELS, "label": LABELS / 2}, "labels are whole numbers"),
        (
            {"x_train": PIXELS, "y_train": LABELS, "classes": np.array(["dog", "cat", "owl"])},
            "are dog, cat, owl, and those of",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_words(tmp_path, arrays, words):
    with pytest.raises(DataError, match=re.escape(words)):
        load(tmp_path, **arrays)
