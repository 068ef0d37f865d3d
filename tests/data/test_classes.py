"""Some of the classes of a set, and the middle of its pictures: data for attacks on others."""

import numpy as np
import pytest
import torch
from people import portraits
from PIL import Image

from sfumato.data.classes import find_classes
from sfumato.data.load import load_images, load_splits
from sfumato.errors import ConfigError, DataError, SfumatoWarning

# The folders here have folders of people in them, who are asked for in some tests alone.
pytestmark = pytest.mark.filterwarnings("ignore:there are folders in the classes")

MNIST = ("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four")
PETS = ("ant", "bee", "cat", "dog")
PEOPLE = ("1", "10", "11", "2", "3")  # folders, in alphabetical order


@pytest.mark.parametrize(
    ("listed", "classes", "places"),
    [
        ("1-3", MNIST, [1, 2, 3]),
        ("4,0", MNIST, [4, 0]),
        ("4 - four,0-1", MNIST, [4, 0, 1]),
        ("dog, ant", PETS, [3, 0]),
        ("2-3,ant", PETS, [2, 3, 0]),
        ("1-3", PEOPLE, [0, 3, 4]),
        ("2-10", PEOPLE, [3, 4, 1]),
        ("11", PEOPLE, [2]),
        ("0", ("1", "0"), [1]),
        ("7-9", ("0003", "0007", "0009"), [1, 2]),
        ("0-2,8-12", ("0-2", "4-6", "8-12"), [0, 2]),
        ("a@b,c", ("a@b", "c", "d"), [0, 1]),
    ],
)
def test_names_go_before_numbers_and_numbers_that_are_names_before_places(listed, classes, places):
    assert find_classes(listed, classes, "zoo") == places


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("cow", r'"zoo" has no class "cow". There are: ant, bee, cat, dog, or by place 0 to 3'),
        ("2-4", r'no class "2-4". There are: ant'),
        ("3-1", r'no class "3-1"'),
        ("-1", r'no class "-1"'),
        ("", r'no class "". There are: ant'),
        ("ant,,bee", r'no class ""'),
        ("0-2,cat", r'class "cat" of "zoo" is listed twice'),
    ],
)
def test_what_is_no_class_is_named_with_those_there_are(listed, message):
    with pytest.raises(DataError, match=message):
        find_classes(listed, PETS, "zoo")


def test_a_number_is_no_place_where_classes_are_called_by_numbers():
    with pytest.raises(DataError, match=r'no class "0-1". There are: 3, 7, 9\.'):
        find_classes("0-1", ("3", "7", "9"), "zoo")
    with pytest.raises(DataError, match=r"0, 1, .*19, … \(500 in all\)"):
        find_classes("x", [str(i) for i in range(500)], "zoo")


def test_only_these_classes_are_kept_and_numbered_in_the_order_asked_for():
    digits = load_images("digits")
    some = load_images("digits@7,0-1")
    assert some.classes == ("7", "0", "1")
    assert some.labels.bincount().tolist() == [400] * 3
    for label, digit in enumerate((7, 0, 1)):
        assert torch.equal(some.pixels[some.labels == label], digits.pixels[digits.labels == digit])
    assert torch.equal(digits.only([7, 0, 1]).pixels, some.pixels)
    assert torch.equal(digits.only([7, 0, 1]).labels, some.labels)
    # Nothing is put in another order: what is left follows as it did.
    where = torch.isin(digits.labels, torch.tensor([0, 1, 7]))
    assert torch.equal(some.pixels, digits.pixels[where])


def test_both_halves_of_a_split_by_class_are_the_whole_and_share_nothing():
    private, _ = load_splits("digits@0-4")
    public, test = load_splits("digits@5-9", private=False)
    assert (private.name, private.private) == ("digits@0-4-train", True)
    assert (public.name, test.name, public.private) == (
        "digits@5-9-train",
        "digits@5-9-test",
        False,
    )
    assert public.classes == test.classes == ("5", "6", "7", "8", "9")
    both = torch.cat([private.pixels, public.pixels]).flatten(1).tolist()
    assert sorted(both) == sorted(load_images("digits").pixels.flatten(1).tolist())


@pytest.mark.parametrize(
    ("places", "message"),
    [([0, 3], "no class at place 3"), ([-1], "place -1"), ([1, 1], "twice")],
)
def test_places_must_be_there_and_once(places, message):
    with pytest.raises(DataError, match=message):
        portraits().only(places)


def test_people_stay_known():
    whole = portraits(n=60, people=12)
    some = whole.only("c,a")
    kept = whole.labels != 1
    assert some.name == "portraits@c,a"
    assert some.private
    assert torch.equal(some.labels, torch.where(whole.labels[kept] == 2, 0, 1))
    same = whole.people[kept]
    assert torch.equal(some.people[:, None] == some.people, same[:, None] == same)


def test_one_class_alone_is_nothing_to_train_on():
    with pytest.raises(DataError, match=r'"digits@3-train" has one class only, "3"'):
        load_images("digits@3")
    assert len(load_images("digits@3", "test")) == 100


def write_folder(root, names=("ann", "bob", "cy"), each=5, size=(20, 24)):
    for i, name in enumerate(names):
        for person in range(each):
            folder = root / name / f"p{person}"
            folder.mkdir(parents=True)
            colour = (40 * i, 10 * person, 255)
            Image.new("RGB", size, colour).save(folder / "1.png")
    return root


def test_classes_of_a_folder_are_taken_from_the_split_of_the_whole(tmp_path):
    root = write_folder(tmp_path / "faces")
    for split in ("train", "test"):
        whole = load_images(root, split, people="folder")
        some = load_images(f"{root}@cy,ann", split, people="folder")
        assert some.name == f"faces@cy,ann-{split}"
        assert some.classes == ("cy", "ann")
        assert torch.equal(some.pixels, whole.pixels[whole.labels != 1])
        assert some.people is not None
    with pytest.raises(DataError, match=r'"faces" has no class "dan". There are: ann, bob, cy'):
        load_images(f"{root}@dan")


def test_an_at_in_a_path_that_is_there_belongs_to_the_path(tmp_path):
    root = write_folder(tmp_path / "me@home" / "faces@ann,bob")
    write_folder(tmp_path / "me@home" / "faces", names=("ann", "bob"))
    assert load_images(root).classes == ("ann", "bob", "cy")
    assert load_images(root).name == "faces@ann,bob-train"
    assert load_images(f"{root}@bob,cy").classes == ("bob", "cy")
    other = write_folder(tmp_path / "me@home" / "other", names=("a@b", "c", "d"))
    assert load_images(f"{other}@a@b,c").classes == ("a@b", "c")


def test_a_name_with_classes_finds_what_the_name_finds(tmp_path):
    arrays = {
        "x_train": np.zeros((6, 4, 4), np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": np.zeros((3, 4, 4), np.uint8),
        "y_test": np.array([0, 1, 2]),
        "classes": np.array(["cat", "deer", "truck"]),
    }
    np.savez(tmp_path / "cifar10.npz", **arrays)
    np.savez(tmp_path / "celeba-identity.npz", **arrays)
    train, test = load_splits("cifar10@truck,cat", data_root=tmp_path)
    assert (train.name, train.labels.tolist()) == ("cifar10@truck,cat-train", [1, 0, 1, 0])
    assert test.labels.tolist() == [1, 0]
    identity = load_images("celeba:identity@0-1", data_root=tmp_path)
    assert (identity.name, identity.classes) == ("celeba:identity@0-1-train", ("cat", "deer"))
    assert load_images(f"{tmp_path}/cifar10.npz@1-2").name == "cifar10@1-2-train"


def test_a_source_that_is_not_there_is_named_as_it_was_typed():
    with pytest.raises(DataError, match=r'"mnits@0-4" is neither .* Did you mean "mnist"'):
        load_images("mnits@0-4")
    with pytest.raises(DataError, match='"@0-4" is neither'):
        load_images("@0-4")
    many = ",".join(str(i) for i in range(5000))  # longer than any file's name may be
    with pytest.raises(DataError, match="is neither a file"):
        load_images(f"nowhere@{many}")
    with pytest.raises(DataError, match='no class "10"'):
        load_images(f"digits@{many}")


def test_splits_of_other_people_are_refused(monkeypatch):
    monkeypatch.setattr(
        "sfumato.data.load._read",
        lambda *_: [portraits().only("a,b"), portraits().only("a,c")],
    )
    with pytest.raises(DataError, match=r'classes of "portraits@a,b" are a, b, and those of'):
        load_splits("portraits")


def test_the_middle_is_cut_out_of_files_and_arrays_alike(tmp_path):
    for name in ("ann", "bob"):
        (tmp_path / "faces" / name).mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (10, 27, 23), np.uint8)
    for i, picture in enumerate(noise):
        Image.fromarray(picture).save(tmp_path / "faces" / ("ann", "bob")[i % 2] / f"{i}.png")
    labels = np.arange(10) % 2
    path = tmp_path / "faces.npz"
    np.savez(path, x_train=noise, y_train=labels, x_test=noise, y_test=labels)
    arrays = load_images(path, centre_crop=10)
    assert arrays.pixels.tolist() == noise[:, None, 8:18, 6:16].tolist()
    wanted = {row.tobytes() for row in noise[:, 8:18, 6:16]}
    files = torch.cat([p.pixels for p in load_splits(tmp_path / "faces", centre_crop=10)])
    assert {row.numpy().tobytes() for row in files} == wanted


def test_the_crop_comes_before_the_resizing_and_once(tmp_path):
    # White in the middle 12 pixels and black around: nothing black is left, at any size.
    picture = np.zeros((24, 20, 3), np.uint8)
    picture[6:18, 4:16] = 255
    root = write_folder(tmp_path / "faces")
    for i, file in enumerate(root.rglob("*.png")):
        larger = np.pad(picture, ((i, i), (i, i), (0, 0)))  # files may differ in size
        Image.fromarray(larger).save(file)
    for size in (6, 12, 16):
        images = load_images(root, centre_crop=12, image_size=size)
        assert images.shape == (3, size, size)
        assert int(images.pixels.min()) == 255
    assert load_images(root, centre_crop=12).shape == (3, 12, 12)
    with pytest.warns(SfumatoWarning, match="17% of an image"):
        assert int(load_images(root, image_size=12).pixels.min()) == 0
    digits = load_images("digits")
    assert torch.equal(
        load_images("digits", centre_crop=20).pixels, digits.pixels[:, :, 4:24, 4:24]
    )
    assert load_images("digits", centre_crop=20, image_size=28).shape == (1, 28, 28)


def test_a_crop_larger_than_the_picture_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r'"digits-train" is 28x28.*no 29 pixels.*--centre-crop'):
        load_images("digits", centre_crop=29)
    root = write_folder(tmp_path / "faces")
    with pytest.raises(DataError, match=r"1.png is 20x24: there are no 21 pixels"):
        load_images(root, centre_crop=21)
    with pytest.raises(ConfigError, match="centre_crop=0"):
        load_images("digits", centre_crop=0)
