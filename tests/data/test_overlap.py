"""Sets side by side: what is in both is found, and what differs is said."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.data.overlap import overlap, require_alike, to_grey
from sfumato.errors import DataError, PrivacyError


def images(count, seed=0, shape=(1, 6, 5), name="zoo"):
    generator = torch.Generator().manual_seed(seed)
    return Images(
        pixels=torch.randint(0, 256, (count, *shape), generator=generator).byte(),
        labels=torch.zeros(count, dtype=torch.int64),
        classes=("ant",),
        name=name,
        private=name == "faces",
    )


def of(values):
    """Images of one pixel with these values."""
    return replace(
        images(len(values)), pixels=torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)
    )


def plant(source, place, target, at):
    target.pixels[at] = source.pixels[place]


def test_one_planted_image_is_found():
    a, b = images(20), images(30, seed=1)
    assert overlap(a, b).tolist() == []
    plant(b, 17, a, at=4)
    assert overlap(a, b).tolist() == [4]
    assert overlap(b, a).tolist() == [17]


def test_every_copy_is_found_in_order():
    a, b = images(20), images(30, seed=1)
    for place in (9, 2, 19):
        plant(b, 0, a, at=place)
    plant(b, 0, b, at=29)
    assert overlap(a, b).tolist() == [2, 9, 19]
    assert overlap(b, a).tolist() == [0, 29]


def test_copies_inside_one_set_are_no_overlap():
    a = images(20)
    plant(a, 0, a, at=1)
    assert len(overlap(a, images(20, seed=1))) == 0


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_the_overlap_is_that_of_the_obvious_search(a, b):
    assert overlap(of(a), of(b)).tolist() == [i for i, value in enumerate(a) if value in b]


def test_a_flipped_or_slightly_changed_image_is_another():
    a, b = images(20), images(30, seed=1)
    a.pixels[4] = b.pixels[17].flip(-1)
    plant(b, 18, a, at=5)
    a.pixels[5, 0, 3, 3] ^= 1
    assert len(overlap(a, b)) == 0


def test_images_are_known_however_they_lie_in_memory():
    a = images(8, shape=(3, 6, 5))
    strided = replace(a, pixels=a.pixels.contiguous(memory_format=torch.channels_last))
    assert overlap(strided, a).tolist() == list(range(8))
    every_other = replace(a.select(range(4)), pixels=a.pixels[1::2])
    assert overlap(a, every_other).tolist() == [1, 3, 5, 7]


def test_sixty_thousand_against_sixty_thousand_finds_the_one():
    a, b = images(60_000, shape=(1, 28, 28)), images(60_000, seed=1, shape=(1, 28, 28))
    plant(b, 59_999, a, at=31_000)
    assert overlap(a, b).tolist() == [31_000]


def test_the_train_and_test_patches_share_none():
    train, test = load_images("patches", "train"), load_images("patches", "test")
    require_alike(train, test)


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((1, 8, 8), "Give --image-size N."),
        ((3, 6, 5), "Give --grey."),
        ((3, 8, 8), "Give --image-size N and --grey."),
    ],
)
def test_sets_of_other_shapes_are_named_with_the_remedy(shape, remedy):
    private, public = images(4, name="faces"), images(4, shape=shape, name="clouds")
    with pytest.raises(DataError) as caught:
        require_alike(private, public)
    assert str(caught.value) == (
        f'"faces" has images of (1, 6, 5) (channels, height, width) and "clouds" of {shape}: '
        f"they must be alike. {remedy}"
    )
    with pytest.raises(DataError, match="must be alike"):
        overlap(public, private)


def test_private_images_among_the_public_are_refused_by_place():
    private, public = images(20, name="faces"), images(30, seed=1, name="clouds")
    require_alike(private, public)
    plant(public, 17, private, at=4)
    with pytest.raises(PrivacyError) as caught:
        require_alike(private, public)
    assert str(caught.value) == (
        '1 image is both in "faces", which is private (at 4), and in "clouds", which is public: '
        "such images would be used without noise, as if they were public. Leave them out of one "
        "of the sets."
    )


@pytest.mark.parametrize(("count", "places"), [(5, "0, 1, 2, 3, 4"), (7, "0, 1, 2, 3, 4, …")])
def test_only_the_first_few_places_are_listed(count, places):
    private = images(7, name="faces")
    with pytest.raises(PrivacyError, match=rf"{count} images are both .* \(at {places}\)"):
        require_alike(private, replace(private.select(range(count)), name="clouds"))


def test_empty_sets_are_alike():
    require_alike(images(0, name="faces"), images(3))
    require_alike(images(3, name="faces"), images(0))


def test_grey_is_the_luma_that_pillow_computes():
    colour = images(5000, shape=(3, 6, 5))  # more than one piece
    grey = to_grey(colour)
    assert grey.shape == (1, 6, 5)
    assert (grey.name, grey.labels is colour.labels) == (colour.name, True)
    stacked = colour.pixels.permute(0, 2, 3, 1).reshape(-1, 5, 3).numpy()
    expected = np.asarray(Image.fromarray(stacked).convert("L")).astype(int)
    difference = np.abs(grey.pixels.reshape(-1, 5).numpy().astype(int) - expected)
    # Pillow's weights are rounded to 16 bits, which turns about one tie in a thousand around.
    assert difference.max() <= 1
    assert difference.mean() < 0.002


def test_each_grey_level_stored_in_colour_comes_back_as_it_was():
    grey = of(list(range(256)))
    colour = replace(grey, pixels=grey.pixels.expand(-1, 3, -1, -1))
    assert torch.equal(to_grey(colour).pixels, grey.pixels)
    assert len(overlap(grey, to_grey(colour))) == 256


def test_grey_images_stay_as_they_are_and_privacy_travels():
    grey = images(3)
    assert to_grey(grey) is grey
    assert to_grey(images(3, shape=(3, 6, 5), name="faces")).private
    assert len(to_grey(images(0, shape=(3, 6, 5)))) == 0


def test_channels_that_are_no_colours_are_refused():
    with pytest.raises(DataError, match='"zoo" has 4 channels'):
        to_grey(images(3, shape=(4, 6, 5)))
