"""Random views: where they are the image, how they move it, and that gradients come back."""

import pytest
import torch
import torch.nn.functional as F

from sfumato.attacks.random_views import Views, random_view

STILL = Views(least_area=1.0, degrees=0.0, jitter=0.0, mirror=False)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def photos(n=6, channels=3, size=9):
    return torch.rand(n, channels, size, size, generator=rng(9))


def only(**settings):
    """One movement alone."""
    still = {"least_area": 1.0, "degrees": 0.0, "jitter": 0.0, "mirror": False}
    return Views(**(still | settings))


@pytest.mark.parametrize("size", [8, 9, 28])
def test_without_movement_a_view_is_the_image(size):
    images = photos(size=size)
    torch.testing.assert_close(random_view(STILL, images, rng()), images, atol=1e-5, rtol=0)


def test_with_a_mirror_alone_about_half_are_mirrored_and_the_rest_are_not():
    images = photos(400, 1, 6)
    found = random_view(only(mirror=True), images, rng())
    same = (found - images).abs().amax(dim=(1, 2, 3)) < 1e-5
    turned = (found - images.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-5
    assert torch.equal(same, ~turned)
    assert 150 < turned.sum() < 250


def test_a_mirrored_view_is_the_mirror_of_the_view_it_would_have_been():
    images = photos(20)
    plain, found = (
        random_view(Views(degrees=30, mirror=mirror), images, rng()) for mirror in (False, True)
    )
    same = (found - plain).abs().amax(dim=(1, 2, 3)) < 1e-4
    turned = (found - plain.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-4
    assert torch.equal(same, ~turned)
    assert 0 < turned.sum() < 20


def test_a_turn_is_within_its_degrees_and_keeps_the_middle():
    side = 41
    images = torch.zeros(200, 1, side, side)
    images[:, :, side // 2, side - 6] = images[:, :, side // 2, side // 2] = 1.0
    found = random_view(only(degrees=20.0), images, rng())
    torch.testing.assert_close(found[:, 0, 20, 20], torch.ones(200), atol=1e-4, rtol=0)
    outer = found[:, 0, :, 26:]
    rows = torch.arange(side) - 20.0
    columns = torch.arange(26, side) - 20.0
    weight = outer.sum(dim=(1, 2))
    down = (outer.sum(dim=2) * rows).sum(dim=1) / weight
    right = (outer.sum(dim=1) * columns).sum(dim=1) / weight
    angles = torch.rad2deg(torch.atan2(down, right))
    assert 17 < angles.max() < 21
    assert -21 < angles.min() < -17


def test_a_crop_is_a_part_of_the_image_and_no_smaller_than_allowed():
    """A ramp tells where a view's edges came from: values are places."""
    side = 32
    ramp = ((torch.arange(side) + 0.5) / side).expand(300, 1, side, side).contiguous()
    found = random_view(only(least_area=0.5), ramp, rng())
    widths = (found[:, 0, 0, -1] - found[:, 0, 0, 0]) * side / (side - 1)
    assert 0.5**0.5 - 1e-2 < widths.min() < 0.75
    assert 0.97 < widths.max() < 1.01
    assert found.min() < 0.04
    assert found.max() > 0.96
    middles = found[:, 0, 0].mean(dim=1)
    assert (middles - 0.5).abs().max() > 0.1


def test_brightness_and_contrast_change_by_as_much_as_asked():
    images = 0.4 + 0.2 * photos(300)
    found = random_view(only(jitter=0.2), images, rng())
    brighter = found.mean(dim=(1, 2, 3)) / images.mean(dim=(1, 2, 3))
    starker = found.std(dim=(1, 2, 3)) / images.std(dim=(1, 2, 3))
    for change in (brighter, starker):
        assert 0.799 < change.min() < 0.82
        assert 1.18 < change.max() < 1.201
    assert torch.corrcoef(torch.stack([brighter, starker]))[0, 1].abs() < 0.2


def test_views_stay_between_0_and_1():
    hard = (photos(200) > 0.5).float()
    found = random_view(Views(jitter=0.9), hard, rng())
    assert found.min() == 0
    assert found.max() == 1


def test_gradients_flow_to_every_pixel_and_are_those_of_finite_differences():
    images = (0.3 + 0.4 * photos(3, 1, 5)).requires_grad_(True)
    goal = torch.rand(3, 1, 5, 5, generator=rng(3))
    views = Views(least_area=0.9)
    (random_view(views, images, rng()) * goal).sum().backward()
    assert (images.grad.flatten(1) != 0).float().mean() > 0.9
    step = torch.randn(3, 1, 5, 5, generator=rng(4)) * 1e-2
    with torch.no_grad():
        ends = [(random_view(views, images + way * step, rng()) * goal).sum() for way in (1, -1)]
    torch.testing.assert_close((images.grad * step).sum() * 2, ends[0] - ends[1], rtol=1e-2, atol=0)


def test_a_view_is_a_function_of_its_generator():
    images, views = photos(), Views()
    assert torch.equal(random_view(views, images, rng(1)), random_view(views, images, rng(1)))
    assert not torch.equal(random_view(views, images, rng(1)), random_view(views, images, rng(2)))
    rolling = rng(1)
    assert not torch.equal(random_view(views, images, rolling), random_view(views, images, rolling))


@pytest.mark.parametrize(
    "views", [only(least_area=0.5), only(degrees=20.0), only(jitter=0.3), only(mirror=True)]
)
def test_each_image_is_seen_in_its_own_way(views):
    images = photos(1).expand(8, -1, -1, -1)
    found = random_view(views, images, rng())
    different = found.flatten(1).mul(100).round().unique(dim=0)
    assert len(different) == (2 if views.mirror else 8)


def test_half_precision_is_seen_in_float32():
    found = random_view(Views(), photos().half(), rng())
    assert found.dtype == torch.float32
    assert F.mse_loss(found, photos()) < 0.2
