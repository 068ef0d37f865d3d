"""Good files of every kind, and every kind of bad ones with the message they get."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data.load import load_images, load_splits
from sfumato.errors import ConfigError, DataError, SfumatoWarning


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


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_npz_arrays_of_bytes_integers_or_unit_floats_are_read(tmp_path, dtype):
    scale = 255 if dtype == np.float32 else 1
    pixels = (np.arange(96).reshape(6, 4, 4) / scale).astype(dtype)
    images = load_images(write_npz(tmp_path / "a.npz", x_train=pixels, x_test=pixels[:2]))
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
        (
            {"x_train": np.full((6, 4, 4), np.nan), "x_test": np.zeros((2, 4, 4))},
            "x_train holds NaN",
        ),
        ({"x_train": np.full((6, 4, 4), 17.0), "x_test": np.zeros((2, 4, 4))}, "floats from 17"),
        ({"x_train": np.zeros((6, 4, 4))}, "x_train is of type float64 and x_test of uint8"),
        ({"x_test": np.zeros((2, 5, 5), np.uint8)}, "x_test of .*--image-size"),
        ({"x_train": np.full((6, 4, 4), 300)}, "not bytes"),
        ({"x_train": np.full((6, 4, 4), "a")}, "of type <U1"),
        ({"x_train": np.full((6, 4, 4), 1j)}, "of type complex128"),
        ({"x_train": np.zeros((6, 3, 4, 4), np.uint8)}, "Move the channels last"),
        ({"x_train": np.zeros((6, 16), np.uint8)}, r"shape \(6, 16\)"),
        ({"x_train": np.zeros((6, 0, 4), np.uint8)}, "without pixels"),
        ({"x_train": np.array([object()] * 6)}, "object array"),
        ({"y_train": np.array([object()] * 6)}, "object array"),
        ({"y_train": np.zeros(6)}, "whole numbers"),
        ({"y_train": np.zeros((6, 2), int)}, "one number per image"),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(2, int)}, "one class only"),
        ({"y_train": np.zeros(6, int), "y_test": np.ones(2, int)}, "one class only"),
        ({"y_train": np.full(6, 2**64 - 1, np.uint64)}, "beyond 2"),
        ({"x_train": np.zeros((0, 4, 4), np.uint8), "y_train": np.zeros(0, int)}, "no images"),
        ({"classes": np.array(["a", "b"])}, "has a label 2, and the 2 classes"),
        (
            {"y_train": np.array([-1, 0] * 3), "classes": np.array(["a", "b", "c"])},
            "y_train holds labels below 0",
        ),
        ({"y_train": np.array([-5, -4, -3] * 2), "y_test": np.array([-4, -3])}, "below 0"),
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


def test_what_is_transparent_lies_on_white(tmp_path):
    for name, alpha in (("seen", 255), ("unseen", 0)):
        (tmp_path / name).mkdir()
        Image.new("RGBA", (4, 4), (10, 20, 30, alpha)).save(tmp_path / name / "a.png")
        Image.new("RGBA", (4, 4), (10, 20, 30, alpha)).save(tmp_path / name / "b.png")
    images, _ = load_splits(tmp_path)
    assert images.pixels[images.labels == 0][0, :, 0, 0].tolist() == [10, 20, 30]
    assert images.pixels[images.labels == 1][0].unique().tolist() == [255]


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


def test_files_of_other_kinds_are_left_out_with_one_warning(tmp_path):
    root = write_folder(tmp_path / "pets", sizes=[(8, 8)] * 10)
    before = load_images(root)
    for name in ("old.gif", "scan.tiff", "more.TIFF"):
        Image.new("L", (8, 8)).save(root / "cat" / name)
    for name in ("notes.txt", "Thumbs.db", "no_ending"):
        (root / "dog" / name).write_text("not an image")
    with pytest.warns(SfumatoWarning) as told:
        images = load_images(root)
    assert torch.equal(images.pixels, before.pixels)
    (warning,) = told
    assert "6 files" in str(warning.message)
    assert "2 .tiff" in str(warning.message)


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


def test_no_source_is_not_the_folder_one_stands_in(tmp_path, monkeypatch):
    for name in ("ill", "well"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("L", (4, 4), i).save(tmp_path / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    assert load_images(".").classes == ("ill", "well")
    for source in ("", "@ill"):
        with pytest.raises(DataError, match=f'"{source}" is neither a file, a folder nor'):
            load_images(source)


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
