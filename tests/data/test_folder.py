"""What a folder of your own holds besides good images, and what is said about it."""

import numpy as np
import pytest
from PIL import Image

from sfumato.data.load import load_images
from sfumato.errors import DataError, SfumatoWarning


@pytest.fixture
def scans(tmp_path):
    """Ten grey images in each of two classes."""
    for place in range(20):
        folder = tmp_path / "scans" / ("sick" if place % 2 else "well")
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(place).integers(0, 256, (8, 8)).astype(np.uint8)
        Image.fromarray(noise).save(folder / f"{place}.png")
    return tmp_path / "scans"


def write_deep(folder, highest):
    deep = np.linspace(0, highest, 64).astype(np.uint16).reshape(8, 8)
    for path in folder.rglob("*.png"):
        Image.fromarray(deep).save(path)


def test_sixteen_bits_that_are_hardly_used_are_warned_of(scans):
    write_deep(scans, 4095)
    with pytest.warns(SfumatoWarning, match=r"values of 12 bits alone, and as bytes 16 grey level"):
        images = load_images(scans)
    assert images.pixels.max() == 15  # a factor that depends on private images is not taken
    write_deep(scans, 40000)
    assert load_images(scans).pixels.max() == 40000 // 256


def test_folders_within_classes_are_a_hint_at_people(scans):
    for place, path in enumerate(sorted(scans.rglob("*.png"))):
        (path.parent / f"anna{place % 7}").mkdir(exist_ok=True)
        path.rename(path.parent / f"anna{place % 7}" / path.name)
    with pytest.warns(SfumatoWarning, match=r"such as anna0.*add --unit person --people folder"):
        load_images(scans)
    assert load_images(scans, people="folder").people is not None
    load_images(scans, private=False)


def test_hidden_files_are_no_images(scans):
    before = load_images(scans)
    Image.new("L", (8, 8)).save(scans / "sick" / ".hidden.png")
    (scans / "well" / "._5.png").write_bytes(b"what a Mac leaves")
    (scans / "well" / ".thumbnails").mkdir()
    Image.new("L", (8, 8)).save(scans / "well" / ".thumbnails" / "1.png")
    assert load_images(scans).pixels.equal(before.pixels)


def test_a_link_to_nothing_is_refused(scans):
    (scans / "sick" / "gone.png").symlink_to(scans / "elsewhere.png")
    with pytest.raises(DataError, match=r"gone\.png is a link to nothing"):
        load_images(scans)


def test_a_table_of_people_need_not_know_classes_that_are_left_out(scans, tmp_path):
    (scans / "unclear").mkdir()
    for place in range(3):
        Image.new("L", (8, 8), place).save(scans / "unclear" / f"{place}.png")
    rows = [f"{path.parent.name}/{path.name},{path.stem}" for path in scans.glob("[sw]*/*.png")]
    (tmp_path / "who.csv").write_text("\n".join(["file,person", *rows]))
    images = load_images(f"{scans}@sick,well", people=str(tmp_path / "who.csv"))
    assert images.people is not None
    assert len(images.people.unique()) == len(images) == 16
    with pytest.raises(DataError, match='names no person for "unclear/0'):
        load_images(scans, people=str(tmp_path / "who.csv"))
