import pytest
import torch

from sfumato.data.augment import (
    Augmentation,
    cutout,
    random_affine,
    random_colour,
    random_crop,
    random_flip,
)

CHANGES = {
    "crop": lambda x, g: random_crop(x, 3, g),
    "flip": random_flip,
    "cutout": lambda x, g: cutout(x, 4, g),
    "colour": lambda x, g: random_colour(x, 0.4, g),
    "affine": lambda x, g: random_affine(x, 0.1, g),
    "all": Augmentation(crop=2, flip=True, cutout=3, colour=0.2, affine=0.1),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(n=6, channels=3, dtype=torch.float32):
    return torch.rand(n, channels, 12, 10, generator=seeded(9)).to(dtype)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_type_and_range_are_kept(change, channels):
    for dtype in (torch.float32, torch.float64):
        images = CHANGES[change](batch(channels=channels, dtype=dtype), seeded())
        assert images.shape == (6, channels, 12, 10)
        assert images.dtype == dtype
        assert 0 <= float(images.min()) <= float(images.max()) <= 1


@pytest.mark.parametrize("change", CHANGES)
def test_an_example_is_changed_without_looking_at_the_others(change):
    images = batch()
    others = images.clone()
    others[1:] = torch.rand_like(others[1:])
    assert torch.equal(CHANGES[change](images, seeded())[0], CHANGES[change](others, seeded())[0])


@pytest.mark.parametrize("change", CHANGES)
def test_the_generator_decides_and_examples_differ(change):
    same = batch(n=1).expand(32, -1, -1, -1)
    assert torch.equal(CHANGES[change](same, seeded()), CHANGES[change](same, seeded()))
    assert not torch.equal(CHANGES[change](same, seeded()), CHANGES[change](same, seeded(1)))
    assert len({image.numpy().tobytes() for image in CHANGES[change](same, seeded())}) > 1


@pytest.mark.parametrize("change", CHANGES)
def test_an_empty_batch_stays_empty(change):
    assert CHANGES[change](batch(n=0), seeded()).shape == (0, 3, 12, 10)


def test_a_crop_is_a_window_of_the_reflected_image():
    images = batch(n=20)
    padded = torch.nn.functional.pad(images, [2] * 4, mode="reflect")
    for image, frame in zip(random_crop(images, 2, seeded()), padded, strict=True):
        windows = [frame[:, i : i + 12, j : j + 10] for i in range(5) for j in range(5)]
        assert any(torch.equal(image, window) for window in windows)


def test_a_flip_mirrors_about_half_of_the_images():
    images = batch(n=400)
    flipped = random_flip(images, seeded())
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 150 < sum(mirrored) < 250


def test_a_cutout_greys_one_square():
    covered = cutout(torch.zeros(200, 1, 12, 10), 4, seeded()) == 0.5
    assert int(covered.sum(dim=(1, 2, 3)).max()) == 16
    rows = covered.any(dim=3).sum(dim=2)
    columns = covered.any(dim=2).sum(dim=2)
    assert torch.equal(rows * columns, covered.sum(dim=(2, 3)))


def test_an_affine_change_of_no_strength_changes_nothing():
    images = batch()
    assert torch.allclose(random_affine(images, 0.0, seeded()), images, atol=1e-5)


def test_no_augmentation_is_the_default():
    images = batch()
    assert Augmentation()(images, seeded()) is images
