from dataclasses import replace

import numpy as np
import pytest
import torch
from folders import save_folder
from hypothesis import given
from hypothesis import strategies as st

from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.errors import ConfigError, DataError, PrivacyError


def images(labels=(0, 1, 2), private=True, channels=1):
    generator = torch.Generator().manual_seed(0)
    shape = (len(labels), channels, 4, 5)
    return Images(
        pixels=torch.randint(0, 256, shape, generator=generator).byte(),
        labels=torch.tensor(labels, dtype=torch.int64),
        classes=("ant", "bee", "cat"),
        name="zoo",
        private=private,
    )


def test_private_images_are_refused_where_no_noise_is_added():
    with pytest.raises(PrivacyError, match=r'the generator would read "zoo"'):
        images().require_public("the generator")
    assert images(private=False).require_public("the generator").name == "zoo"


def test_privacy_travels_with_every_selection():
    first, second = images([0, 1, 2] * 5).split(0.4)
    assert images().select([0]).private
    assert first.private
    assert second.private


def test_a_set_that_private_images_joined_is_private():
    ours, theirs = images([0, 1], private=False), images([2])
    both = ours.joined(replace(theirs, people=torch.tensor([0])), "both")
    assert (both.name, both.private, both.people) == ("both", True, None)
    assert both.labels.tolist() == [0, 1, 2]
    assert torch.equal(both.pixels, torch.cat([ours.pixels, theirs.pixels]))
    assert not ours.joined(ours).private
    with pytest.raises(DataError, match="the same, in one order"):
        ours.joined(theirs.only("cat"))


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.floats(0.05, 0.95),
    st.integers(0, 100),
)
def test_a_split_is_stratified_complete_and_repeatable(labels, share, seed):
    whole = images(labels)
    first, second = whole.split(share, seed)
    again, _ = whole.split(share, seed)
    assert torch.equal(first.pixels, again.pixels)
    assert len(first) == round(sum(share * labels.count(c) for c in range(3)))
    for label in range(3):
        count = int((first.labels == label).sum())
        assert abs(count - share * labels.count(label)) < 1
        assert count + int((second.labels == label).sum()) == labels.count(label)
    together = torch.cat([first.pixels, second.pixels]).flatten(1).tolist()
    assert sorted(together) == sorted(whole.pixels.flatten(1).tolist())


def test_another_seed_draws_another_part():
    whole = images([0, 1, 2] * 20)
    assert not torch.equal(whole.split(0.5, 0)[0].pixels, whole.split(0.5, 1)[0].pixels)


def test_a_public_share_is_public_and_its_rest_is_not():
    public, rest = images([0, 1, 2] * 10).public_share(0.2)
    assert (public.private, rest.private) == (False, True)
    assert (len(public), len(rest)) == (6, 24)
    assert public.name != rest.name


def test_a_public_share_that_leaves_a_class_empty_is_refused():
    with pytest.raises(DataError, match=r'class "cat" with no public image .* Raise the share'):
        images([0] * 50 + [1] * 50 + [2] * 2).public_share(0.04)
    with pytest.raises(DataError, match=r'class "cat" with no private image .* Lower the share'):
        images([0] * 50 + [1] * 50 + [2] * 2).public_share(0.9)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_is_a_fraction(share):
    with pytest.raises(ConfigError, match="share="):
        images().split(share)


def test_images_and_labels_must_match():
    with pytest.raises(DataError, match="2 images and 3 labels"):
        Images(
            pixels=torch.zeros(2, 1, 4, 4, dtype=torch.uint8),
            labels=torch.zeros(3, dtype=torch.int64),
            classes=("a", "b"),
            name="zoo",
            private=True,
        )
    with pytest.raises(DataError, match="outside its 3 classes"):
        images([0, 3])


@pytest.mark.parametrize("channels", [1, 3])
def test_npz_brings_the_same_images_back(tmp_path, channels):
    train, test = images([0, 1, 2, 2], channels=channels), images([2, 0], channels=channels)
    path = train.save_npz(tmp_path / "zoo.npz", test)
    for split, expected in (("train", train), ("test", test)):
        found = load_images(path, split)
        assert torch.equal(found.pixels, expected.pixels)
        assert torch.equal(found.labels, expected.labels)
        assert found.classes == ("ant", "bee", "cat")
        assert found.private


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_brings_the_same_images_back(tmp_path, channels):
    save_folder(images([0, 1, 2, 0], channels=channels), tmp_path / "zoo" / "train")
    save_folder(images([2, 1, 0], channels=channels), tmp_path / "zoo" / "test")
    found = load_images(tmp_path / "zoo", "train", private=False)
    order = [0, 3, 1, 2]
    assert torch.equal(found.pixels, images([0, 1, 2, 0], channels=channels).pixels[order])
    assert found.labels.tolist() == [0, 0, 1, 2]
    assert not found.private
    assert len(load_images(tmp_path / "zoo", "test")) == 3


def test_pixels_keep_their_values_in_the_keras_layout(tmp_path):
    path = images([0, 1, 2], channels=3).save_npz(tmp_path / "zoo.npz")
    with np.load(path) as file:
        assert file["x_train"].shape == (3, 4, 5, 3)
        assert file["x_train"].dtype == np.uint8


def test_pixels_do_not_show_themselves():
    assert len(repr(images([0, 1] * 500))) < 200


def test_only_parts_that_we_split_are_known_as_drawn_parts():
    images = load_images("digits@0-1")
    assert not images.drawn_part
    for part in (*images.split(0.5), *images.public_share(0.1)):
        for made in (part, part.select([0]), part.joined(images), part.only("0")):
            assert made.drawn_part
