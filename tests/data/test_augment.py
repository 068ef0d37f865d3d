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
from sfumato.data.example_rng import ExampleRng

CHANGES = {
    "crop": lambda x, g: random_crop(x, 3, g),
    "flip": random_flip,
    "cutout": lambda x, g: cutout(x, 4, g),
    "colour": lambda x, g: random_colour(x, 0.4, g),
    "affine": lambda x, g: random_affine(x, 0.1, g),
    "all": Augmentation(crop=2, flip=True, cutout=3, colour=0.2, affine=0.1),
}


def rng(n=6, seed=0):
    return ExampleRng.of(seed, torch.arange(n))


def batch(n=6, channels=3, dtype=torch.float32):
    return torch.rand(n, channels, 12, 10, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_type_and_range_are_kept(change, channels):
    for dtype in (torch.float32, torch.float64):
        images = CHANGES[change](batch(channels=channels, dtype=dtype), rng())
        assert images.shape == (6, channels, 12, 10)
        assert images.dtype == dtype
        assert 0 <= float(images.min()) <= float(images.max()) <= 1


@pytest.mark.parametrize("change", CHANGES)
def test_an_example_is_changed_without_looking_at_the_others(change):
    images = batch()
    others = images.clone()
    others[1:] = torch.rand_like(others[1:])
    assert torch.equal(CHANGES[change](images, rng())[0], CHANGES[change](others, rng())[0])


@pytest.mark.parametrize("change", CHANGES)
def test_the_dice_decide_and_examples_differ(change):
    same = batch(n=1).expand(32, -1, -1, -1)
    assert torch.equal(CHANGES[change](same, rng(32)), CHANGES[change](same, rng(32)))
    assert not torch.equal(CHANGES[change](same, rng(32)), CHANGES[change](same, rng(32, 1)))
    assert len({image.numpy().tobytes() for image in CHANGES[change](same, rng(32))}) > 1


@pytest.mark.parametrize("change", CHANGES)
def test_an_empty_batch_stays_empty(change):
    assert CHANGES[change](batch(n=0), rng(0)).shape == (0, 3, 12, 10)


def test_a_crop_is_a_window_of_the_reflected_image():
    images = batch(n=20)
    padded = torch.nn.functional.pad(images, [2] * 4, mode="reflect")
    for image, frame in zip(random_crop(images, 2, rng(20)), padded, strict=True):
        windows = [frame[:, i : i + 12, j : j + 10] for i in range(5) for j in range(5)]
        assert any(torch.equal(image, window) for window in windows)


def test_a_flip_mirrors_about_half_of_the_images():
    images = batch(n=400)
    flipped = random_flip(images, rng(400))
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 150 < sum(mirrored) < 250


def test_a_cutout_greys_one_square():
    covered = cutout(torch.zeros(200, 1, 12, 10), 4, rng(200)) == 0.5
    assert int(covered.sum(dim=(1, 2, 3)).max()) == 16
    rows = covered.any(dim=3).sum(dim=2)
    columns = covered.any(dim=2).sum(dim=2)
    assert torch.equal(rows * columns, covered.sum(dim=(2, 3)))


def test_a_cutout_covers_about_half_of_the_images():
    # The square is larger than the image, so that an image that has one is grey all over.
    covered = cutout(torch.zeros(400, 1, 6, 6), 16, rng(400)) == 0.5
    shares = covered.flatten(1).float().mean(dim=1)
    assert set(shares.tolist()) == {0.0, 1.0}
    assert 150 < int(shares.sum()) < 250


def test_an_affine_change_of_no_strength_changes_nothing():
    images = batch()
    assert torch.allclose(random_affine(images, 0.0, rng()), images, atol=1e-5)


def test_no_augmentation_is_the_default():
    images = batch()
    assert Augmentation()(images, rng()) is images


@pytest.mark.parametrize("change", CHANGES)
def test_an_example_keeps_its_change_when_another_joins(change):
    images = batch()
    places = torch.tensor([0, 1, 3, 4, 5])
    all_of_them = CHANGES[change](images, ExampleRng.of(0, 7, torch.arange(6)))
    without_one = CHANGES[change](images[places], ExampleRng.of(0, 7, places))
    torch.testing.assert_close(without_one, all_of_them[places])


def test_dice_are_fair_and_streams_are_unlike():
    thrown = ExampleRng.of(3, 1, torch.arange(20_000)).throw(4)
    assert torch.allclose(thrown.mean(dim=1), torch.tensor(0.5), atol=0.01)
    assert torch.allclose(thrown.var(dim=1), torch.tensor(1 / 12), atol=0.003)
    assert float(torch.corrcoef(thrown)[0, 1:].abs().max()) < 0.03
    neighbours = torch.corrcoef(torch.stack([thrown[0, :-1], thrown[0, 1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.03
    whole = ExampleRng.of(3, 2, torch.arange(20_000)).integers(5, 1)
    assert torch.bincount(whole.flatten()).min() > 3700
    next_step = ExampleRng.of(3, 2, torch.arange(20_000)).throw(1)
    assert abs(float(torch.corrcoef(torch.cat([thrown[:1], next_step]))[0, 1])) < 0.03
