"""Sets that are known by name, in torchvision's own layout, in miniature."""

import gzip
import struct
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data.load import load_images, load_splits
from sfumato.data.torchvision_sets import SOURCES
from sfumato.errors import DataError

# The faces in these files are not square, and are made so; that it is said has its own test.
pytestmark = pytest.mark.filterwarnings("ignore:.*are not square:sfumato.errors.SfumatoWarning")
HAIR = ("Black_Hair", "Blond_Hair", "Male")


@pytest.fixture
def celeba(tmp_path, monkeypatch):
    """A function that writes images with the attributes given, 1 or -1, and their people."""

    def write(rows, people, names=HAIR):
        root = tmp_path / "celeba"
        (root / "img_align_celeba").mkdir(parents=True)
        files = [f"{i:06d}.jpg" for i in range(1, len(rows) + 1)]
        for i, file in enumerate(files):
            Image.new("RGB", (20, 24), (40 * i, 0, 0)).save(root / "img_align_celeba" / file)

        def table(name, columns, head=()):
            lines = [
                f"{file} {' '.join(map(str, row))}"
                for file, row in zip(files, columns, strict=True)
            ]
            (root / name).write_text("\n".join([*head, *lines, ""]))

        table("list_eval_partition.txt", [(0,)] * len(rows))
        table("identity_CelebA.txt", [(person,) for person in people])
        table("list_attr_celeba.txt", rows, (str(len(rows)), " ".join(names)))
        for name in ("list_bbox_celeba.txt", "list_landmarks_align_celeba.txt"):
            table(name, [(1, 1, 1, 1)] * len(rows), (str(len(rows)), "a b c d"))
        monkeypatch.setattr("torchvision.datasets.CelebA._check_integrity", lambda self: True)
        return tmp_path

    return write


def test_celeba_files_are_read_with_the_label_asked_for(celeba):
    root = celeba([(1, -1), (-1, -1), (1, -1), (-1, -1)], (7, 9, 7, 8), ("Male", "Smiling"))
    images = load_images("celeba", data_root=root, image_size=16)
    assert images.labels.tolist() == [1, 0, 1, 0]
    assert images.classes == ("not Male", "Male")
    assert images.shape == (3, 16, 16)
    people = load_images("celeba:identity", data_root=root, image_size=16)
    assert people.labels.tolist() == [0, 2, 0, 1]
    with pytest.raises(DataError, match='no label "Beard"'):
        load_images("celeba:Beard", data_root=root, image_size=16)


def test_celeba_images_with_just_one_of_several_attributes_are_taken(celeba):
    # Of five images, one has neither colour and one has both; who is on the rest stays known.
    rows = [(-1, 1, 1), (1, 1, -1), (1, -1, 1), (-1, -1, 1), (-1, 1, -1)]
    root = celeba(rows, (7, 3, 9, 9, 7))
    images = load_images("celeba:Black_Hair+Blond_Hair", data_root=root, image_size=16)
    assert images.classes == ("Black_Hair", "Blond_Hair")
    assert images.labels.tolist() == [1, 0, 1]
    assert images.people.tolist() == [0, 1, 0]
    red = images.pixels[:, 0].float().mean(dim=(1, 2))
    torch.testing.assert_close(red, torch.tensor([0.0, 80.0, 160.0]), rtol=0, atol=2)
    turned = load_images("celeba:Blond_Hair+Black_Hair", data_root=root, image_size=16)
    assert turned.labels.tolist() == [0, 1, 0]


def test_some_people_of_celeba_are_taken_and_cut_out_of_their_pictures(celeba):
    root = celeba([(1, -1, 1)] * 5, (7, 30, 9, 9, 7))
    images = load_images("celeba:identity@9,7", data_root=root, centre_crop=20, image_size=16)
    assert images.classes == ("9", "7")
    assert images.labels.tolist() == [1, 0, 0, 1]
    assert images.people.tolist() == [0, 1, 1, 0]
    assert images.shape == (3, 16, 16)
    with pytest.raises(DataError, match=r"000001.jpg is 20x24: there are no 21 pixels"):
        load_images("celeba", data_root=root, centre_crop=21)


def test_a_celeba_attribute_that_is_not_there_is_named(celeba):
    root = celeba([(1, -1, 1), (-1, 1, 1)], (1, 2))
    with pytest.raises(DataError, match=r'no label "Male\+Beard".*Black_Hair.*with \+ between'):
        load_images("celeba:Male+Beard", data_root=root, image_size=16)
    with pytest.raises(DataError, match='"svhn" has no variants'):
        load_images("svhn:Male", data_root=root)


def write_imagenette(root):
    """Images that are not square and of several sizes; in train there are grey ones as well."""
    classes = {"n01440764": (200, 0, 0), "n03888257": (0, 0, 200)}
    for part in ("train", "val"):
        for i, (folder, colour) in enumerate(classes.items()):
            place = root / "imagenette2-160" / part / folder
            place.mkdir(parents=True)
            Image.new("RGB", (160, 200 + i), colour).save(place / "a.JPEG")
            if part == "train":
                Image.new("L", (213, 160), 90).save(place / "b.JPEG")
    return root


def test_imagenette_files_are_read_by_their_first_name(tmp_path):
    train, test = load_splits("imagenette", data_root=write_imagenette(tmp_path), image_size=32)
    assert train.classes == test.classes == ("tench", "parachute")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 1, 1], [0, 1])
    assert (train.shape, test.name) == ((3, 32, 32), "imagenette-test")
    colours = train.pixels.float().mean(dim=(2, 3))
    wanted = torch.tensor([[200.0, 0, 0], [90, 90, 90], [0, 0, 200], [90, 90, 90]])
    torch.testing.assert_close(colours, wanted, rtol=0, atol=3)


def test_imagenette_needs_one_size(tmp_path):
    with pytest.raises(DataError, match=r"differ in size.*--image-size"):
        load_images("imagenette", data_root=write_imagenette(tmp_path))


def test_files_of_numbers_get_the_names_that_the_numbers_have(tmp_path):
    numbers = np.arange(10)
    pixels = np.zeros((10, 4, 4, 3), dtype=np.uint8)
    arrays = {"x_train": pixels, "y_train": numbers, "x_test": pixels, "y_test": numbers}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    images = load_images("cifar10@cat,ship", data_root=tmp_path)
    assert images.classes == ("cat", "ship")
    assert images.labels.tolist() == [0, 1]
    np.savez(tmp_path / "mnist.npz", **arrays)
    assert load_images("mnist", data_root=tmp_path).classes == tuple("0123456789")


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_set_says_where_it_should_be(tmp_path, name):
    with pytest.raises(DataError, match=rf'"{name}" is not under .*--download'):
        load_images(name, data_root=tmp_path)


def test_a_download_that_failed_says_why_and_does_not_advise_itself(tmp_path, monkeypatch):
    def fails(*_, **options):
        assert options["download"]
        raise URLError("no route\nto host")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", fails)
    with pytest.raises(DataError, match=r'"cifar10" could not be fetched .*no route to') as caught:
        load_images("cifar10", data_root=tmp_path, download=True)
    assert "--download" not in str(caught.value)


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
