"""What a person has at hand becomes images of the kind that a network was trained on."""

import pytest
import torch
from PIL import Image

from sfumato.data.convert import ImageKind
from sfumato.data.load import load_images
from sfumato.errors import DataError

GREY = ImageKind(shape=(1, 8, 8), classes=("a", "b"))
COLOUR = ImageKind(shape=(3, 8, 8), classes=("a", "b"))


def noise(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, shape, generator=generator).to(torch.uint8)


def picture(pixels):
    array = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def test_one_image_or_several_in_any_form_are_the_same_images(tmp_path):
    pixels = noise(3, 3, 8, 8)
    pictures = [picture(one) for one in pixels]
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for one, path in zip(pictures, paths, strict=True):
        one.save(path)
    for given in (pixels, list(pixels), pictures, paths, [str(paths[0]), pictures[1], pixels[2]]):
        assert COLOUR.gather(given).pixels.equal(pixels)
    for given in (pixels[0], pictures[0], paths[0], str(paths[0])):
        assert COLOUR.gather(given).pixels.equal(pixels[:1])


def test_files_are_framed_as_those_of_a_folder_are(tmp_path):
    for label in ("a", "b"):
        (tmp_path / "folder" / label).mkdir(parents=True)
        for i in range(5):
            picture(noise(3, 20 + i, 30)).save(tmp_path / "folder" / label / f"{i}.png")
    framing = {"centre_crop": 16, "image_size": 8}
    known = load_images(tmp_path / "folder", "test", **framing).pixels
    kind = ImageKind(shape=(3, 8, 8), classes=("a", "b"), centre_crop=16)
    found = kind.gather(sorted((tmp_path / "folder").rglob("*.png"))).pixels
    assert all(any(one.equal(other) for other in found) for one in known)


def test_pixels_are_framed_as_a_set_in_memory_and_those_of_the_right_size_are_left():
    framed = load_images("digits", "test", centre_crop=20, image_size=8)
    kind = ImageKind(shape=(1, 8, 8), classes=framed.classes, centre_crop=20)
    assert kind.gather(load_images("digits", "test")).pixels.equal(framed.pixels)
    assert kind.gather(framed).pixels.equal(framed.pixels)


def test_grey_becomes_colour_and_colour_its_grey():
    grey = noise(2, 1, 8, 8)
    colour = COLOUR.gather(grey).pixels
    assert colour.equal(grey.expand(-1, 3, -1, -1))
    assert GREY.gather(colour).pixels.equal(grey)
    assert GREY.gather(picture(colour[0])).pixels.equal(grey[:1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no images were given"),
        (torch.zeros(1, 8, 8), r"one of float32, 1 x 8 x 8"),
        (noise(8, 8), r"one of uint8, 8 x 8"),
        (noise(2, 8, 8), "only red, green and blue"),
        ("nowhere.png", "nowhere.png cannot be read as an image"),
    ],
)
def test_what_is_no_image_is_refused_in_words(given, message):
    with pytest.raises(DataError, match=message):
        GREY.gather(given)


def test_a_network_for_images_that_are_no_squares_takes_them_as_they_are():
    wide = ImageKind(shape=(1, 8, 12), classes=("a", "b"))
    assert wide.gather(noise(1, 8, 12)).shape == (1, 8, 12)
    with pytest.raises(DataError, match=r"1 x 9 x 12, and the network takes 1 x 8 x 12"):
        wide.gather(noise(1, 9, 12))
