"""What is asked before images are read: whether they have room, and whether all can be used."""

import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import save_folder
from PIL import Image, ImageOps
from unchecked import unchecked

from sfumato.commands.train import command as train
from sfumato.data.arrays import load_samples
from sfumato.data.images import Images
from sfumato.data.load import load_images, load_splits
from sfumato.errors import ConfigError, DataError, SfumatoError, SfumatoWarning
from sfumato.runs import open_run
from sfumato.sharing.bundle_parts import read_soft_labels

LABELS = np.arange(40) % 2


@pytest.fixture
def scans(tmp_path):
    """Forty digits of two classes, as files."""
    digits = load_images("digits@0,1")
    save_folder(digits.split(40 / len(digits))[0], tmp_path / "scans")
    return tmp_path / "scans"


def write_header(archive, name, shape, data=b"", dtype="|u1"):
    """An array whose header may say anything."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        member.write(data)


def calls(monkeypatch, owner, name):
    """A list that grows by the first argument, whenever the function is called."""
    seen, real = [], getattr(owner, name)

    def counted(first, *rest, **options):
        seen.append(first)
        return real(first, *rest, **options)

    monkeypatch.setattr(owner, name, counted)
    return seen


@pytest.mark.parametrize("source", ["folder", "npz", "digits"])
def test_a_size_that_memory_cannot_hold_is_refused_before_any_work(source, scans, monkeypatch):
    decoded = calls(monkeypatch, ImageOps, "exif_transpose")
    path = {"folder": scans, "npz": scans.parent / "scans.npz", "digits": "digits"}[source]
    if source == "npz":
        load_images(scans).save_npz(path, load_images(scans, "test"))
        decoded.clear()
    for load in (load_images, load_splits):
        with pytest.raises(SfumatoError, match=r"100000 x 100000 need .* GB .*--image-size"):
            load(path, image_size=100_000)
    assert not decoded


def test_images_that_memory_cannot_hold_as_they_are_are_refused(scans, monkeypatch):
    monkeypatch.setattr("sfumato.data.memory_guard.free_memory", lambda: 40 * 28 * 28 - 1)
    with pytest.raises(DataError, match="GB are free"):
        load_images(scans)
    monkeypatch.setattr("sfumato.data.memory_guard.free_memory", lambda: 40 * 28 * 28)
    load_images(scans)


def peak_of(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("why", ["count", "room", "length"])
def test_a_file_that_unpacks_to_far_more_is_refused_by_its_headers(why, tmp_path, monkeypatch):
    path, size = tmp_path / "bomb.npz", 60_000_000
    monkeypatch.setattr("sfumato.data.memory_guard.free_memory", lambda: size)
    labels = np.arange(60 if why == "room" else 40) % 2
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        shape = {"count": (size // 100, 10, 10), "room": (60, 1000, 1000), "length": (40, 10, 10)}
        write_header(archive, "x_train", shape[why], bytes(size))
        for name, array in (("x_test", np.zeros((40, 10, 10), np.uint8)), ("y_test", LABELS)):
            write_header(archive, name, array.shape, array.tobytes(), array.dtype.str)
        write_header(archive, "y_train", labels.shape, labels.tobytes(), labels.dtype.str)
    assert path.stat().st_size < size / 100

    def load():
        with pytest.raises(DataError, match=r"bomb\.npz"):
            load_images(path)

    assert peak_of(load) < size / 6


def test_soft_labels_and_samples_that_unpack_to_far_more_are_refused_by_their_headers(tmp_path):
    size = 60_000_000
    for file, name in (("soft_labels.npz", "logits"), ("samples.npz", "samples")):
        with zipfile.ZipFile(tmp_path / file, "w", zipfile.ZIP_DEFLATED) as archive:
            write_header(archive, name, (size // 4, 1), bytes(size), "<f8")
            write_header(archive, "label", (1,), bytes(8), "<i8")

    def load():
        with pytest.raises(DataError):
            read_soft_labels(tmp_path)
        with pytest.raises(DataError):
            load_samples(tmp_path / "samples.npz", load_images("digits"))

    digits = peak_of(lambda: load_images("digits"))
    assert peak_of(load) < digits + size / 6


def test_each_file_and_each_array_is_read_once(scans, monkeypatch, tmp_path):
    decoded = calls(monkeypatch, ImageOps, "exif_transpose")
    train, test = load_splits(scans)
    assert len(decoded) == 40
    train.save_npz(tmp_path / "scans.npz", test)
    read = []
    real = np.lib.npyio.NpzFile.__getitem__
    monkeypatch.setattr(
        np.lib.npyio.NpzFile, "__getitem__", lambda file, key: read.append(key) or real(file, key)
    )
    again = load_splits(tmp_path / "scans.npz")
    assert sorted(read) == ["classes", "x_test", "x_train", "y_test", "y_train"]
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(again, (train, test), strict=True))


def test_one_split_is_that_part_of_both(scans):
    for split, whole in zip(("train", "test"), load_splits(scans), strict=True):
        alone = load_images(scans, split)
        assert torch.equal(alone.pixels, whole.pixels)
        assert (alone.name, alone.drawn_part) == (whole.name, True)


def test_files_are_decoded_into_the_memory_of_the_images_alone(scans):
    for file in scans.rglob("*.png"):
        Image.new("RGB", (400, 400)).save(file)
    assert peak_of(lambda: load_images(scans)) < 1.6 * 40 * 400 * 400 * 3


def test_all_bad_files_are_named_at_once_the_first_twenty_and_a_count(scans):
    bad = sorted(scans.rglob("*.png"))[:25]
    for place, file in enumerate(bad):
        whole = file.read_bytes()
        file.write_bytes([b"", b"no image", whole[: len(whole) // 2]][place % 3])
    with pytest.raises(DataError, match="25 files") as caught:
        load_splits(scans)
    told = str(caught.value)
    assert all(str(file) in told for file in bad[:20])
    assert str(bad[20]) not in told
    assert "5 more" in told


@pytest.mark.parametrize("what", ["class", "file"])
def test_a_name_that_is_not_utf8_is_refused_before_anything_is_decoded(what, scans, monkeypatch):
    decoded = calls(monkeypatch, ImageOps, "exif_transpose")
    old = scans / "1"
    old = old if what == "class" else next(old.iterdir())
    old.rename(Path(str(old.parent / "caf") + "\udce9" + old.suffix))
    with pytest.raises(DataError, match="UTF-8") as caught:
        load_images(scans)
    str(caught.value).encode()
    assert not decoded


def test_numbers_of_people_are_closed_up():
    pixels = torch.zeros(5, 1, 4, 4, dtype=torch.uint8)
    people = torch.tensor([7, -3, 7, 100, 9])
    images = Images(
        pixels=pixels, labels=torch.arange(5) % 2, classes=("a", "b"), name="x", private=True,
        people=people,
    )  # fmt: skip
    assert images.people is not None
    assert images.people.tolist() == [1, 0, 1, 3, 2]


@pytest.mark.parametrize("labels", [torch.rand(5), torch.zeros(5, 1, dtype=torch.int64)])
def test_labels_that_are_no_whole_numbers_are_refused(labels):
    pixels = torch.zeros(5, 1, 4, 4, dtype=torch.uint8)
    with unchecked(), pytest.raises(DataError, match="whole number"):
        Images(pixels=pixels, labels=labels, classes=("a",), name="x", private=True)


def test_data_root_may_be_a_string(tmp_path):
    digits = load_images("digits")
    digits.save_npz(tmp_path / "mnist.npz", load_images("digits", "test"))
    assert torch.equal(load_images("mnist", data_root=str(tmp_path)).pixels, digits.pixels)


def test_what_is_cut_off_images_that_are_not_square_is_said(scans, tmp_path):
    Image.new("L", (300, 100)).save(next(scans.rglob("*.png")))
    with pytest.warns(SfumatoWarning, match=r"1 of 40 .*67%"):
        load_images(scans, image_size=28)
    arrays = {"x_train": np.zeros((40, 10, 20), np.uint8), "y_train": LABELS}
    path = tmp_path / "a.npz"
    np.savez(path, **arrays, x_test=arrays["x_train"], y_test=LABELS)
    with pytest.warns(SfumatoWarning, match=r"40 of 40 .*50%"):
        load_images(path, image_size=8)
    load_images(path, image_size=8, centre_crop=10)  # as was asked for


def test_the_warning_about_unused_bits_names_a_file_that_has_sixteen(scans):
    deep = sorted(scans.rglob("*.png"))[7]
    Image.fromarray(np.full((28, 28), 4000, np.uint16)).save(deep)
    with pytest.warns(SfumatoWarning, match=rf"such as {deep} have values of 12 bits"):
        load_images(scans)


def test_a_table_with_a_field_too_many_or_another_column_says_what_to_do(scans, tmp_path):
    files = sorted(scans.rglob("*.png"))
    rows = [f"{file.relative_to(scans)},{place % 7}" for place, file in enumerate(files)]
    table = tmp_path / "who.csv"
    table.write_text("\n".join(["file,patient", *rows]))
    with pytest.raises(DataError, match=rf"--people {table}:patient"):
        load_images(scans, people=str(table))
    assert load_images(scans, people=f"{table}:patient").people is not None
    table.write_text("\n".join(["file,person", rows[0] + ",more", *rows[1:]]))
    with pytest.raises(DataError, match=r"line 2"):
        load_images(scans, people=str(table))


def test_a_table_that_does_not_know_all_files_says_how_many(scans, tmp_path):
    files = [file.relative_to(scans) for file in sorted(scans.rglob("*.png"))]
    rows = [f"{file},{place % 7}" for place, file in enumerate(files)]
    (tmp_path / "who.csv").write_text("\n".join(["file,person", *rows[5:]]))
    with pytest.raises(DataError, match=rf'"{files[0]}" and 4 more'):
        load_images(scans, people=str(tmp_path / "who.csv"))
    (tmp_path / "who.csv").write_text("file,person\n")
    with pytest.raises(DataError, match=rf'"{files[0]}" and 39 more'):
        load_images(scans, people=str(tmp_path / "who.csv"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"people_train": np.full(40, np.nan), "people_test": LABELS}, "people_train"),
        ({"people_train": np.zeros((40, 2), int), "people_test": LABELS}, "people_train"),
        ({"classes": np.array(["a", "a"])}, "two classes of one name"),
        ({"x_train": np.zeros((40, 8, 8, 3), np.uint8)}, "Give --grey"),
        ({"x_test": np.zeros((40, 9, 8), np.uint8)}, "Give --image-size"),
        ({"x_train": np.zeros(40, [("a", "u1")])}, "plain arrays"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused_by_name(changes, word, tmp_path):
    pixels = np.zeros((40, 8, 8), np.uint8)
    arrays = {"x_train": pixels, "y_train": LABELS, "x_test": pixels, "y_test": LABELS, **changes}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=word):
        load_splits(tmp_path / "a.npz")


def test_a_pipe_is_no_file_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(DataError, match=r"a\.npz"):
        load_images(tmp_path / "a.npz")


def test_a_crop_that_is_larger_than_files_is_one_error_before_they_are_decoded(scans, monkeypatch):
    decoded = calls(monkeypatch, ImageOps, "exif_transpose")
    with pytest.raises(DataError, match=r"28x28.*--centre-crop"):
        load_images(scans, centre_crop=29)
    assert not decoded


def test_a_name_that_no_file_can_hold_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        open_run(train.Config(data="caf\udce9", epsilon=8.0), verb="train", out=tmp_path / "run")
    str(caught.value).encode()


@pytest.mark.parametrize("inside", [False, True])
def test_a_folder_that_may_not_be_read_is_no_empty_one(inside, scans, monkeypatch):
    locked = scans / "1" / "more" if inside else scans / "1"
    locked.mkdir(exist_ok=True)
    real = Path.iterdir

    def iterdir(path):
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(DataError, match=rf"{locked} cannot be read"):
        load_images(scans)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (3, {}),
        (None, {}),
        ("digits", {"image_size": "8"}),
        ("digits", {"centre_crop": 8.5}),
        ("mnist", {"data_root": None}),
        (".", {"people": 3}),
        ("~nobody-of-this-name/x", {}),
        ("x" * 5000 + ".npz", {}),
        ("a\0b", {}),
    ],
)
def test_what_names_no_images_is_refused_in_words(source, options):
    with unchecked(), pytest.raises(SfumatoError):
        load_splits(source, **options)


def test_a_table_is_read_before_images_are_decoded(scans, monkeypatch):
    decoded = calls(monkeypatch, ImageOps, "exif_transpose")
    with pytest.raises(DataError, match="nowhere"):
        load_images(scans, people="nowhere.csv")
    assert not decoded
