"""Movements: each alone does what its condition says, and conditions tell all that was done."""

from math import cos, log, pi, sin

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from sfumato.diffusion.geometry import SHIFT, SIZE, GeometricChange, apply_geometry
from sfumato.errors import ConfigError

SIDE = 32


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def photos(n=6, channels=3, size=9):
    return 2 * torch.rand(n, channels, size, size, generator=rng(9)) - 1


def told(**places):
    """Conditions of one image, by name."""
    names = ["mirror", "down", "size", "cosine", "sine", "along", "across", "right", "below"]
    return torch.tensor([[float(places.get(name, 0)) for name in names]])


def grid(height=SIDE, width=SIDE):
    """Columns and rows, from the middle."""
    rows, columns = torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2
    return columns.expand(height, width), rows[:, None].expand(height, width)


def hill(x, y, wide=5.0, high=3.0, right=3.0, below=-2.0):
    """A smooth picture that is a function of the place, so it can be had anywhere."""
    return (-(((x - right) / wide) ** 2) - ((y - below) / high) ** 2).exp()


def picture(x, y):
    return hill(x, y)[None, None]


def test_with_no_probability_nothing_is_done_and_nothing_is_told():
    images = photos(50)
    moved, conditions = GeometricChange(probability=0.0)(images, rng())
    assert torch.equal(moved, images)
    assert conditions.shape == (50, 9)
    assert not conditions.any()


@pytest.mark.parametrize("size", [8, 9, 28])
def test_flips_are_exact(size):
    image = photos(1, size=size)
    assert torch.equal(apply_geometry(image, told()), image)
    assert torch.equal(apply_geometry(image, told(mirror=1)), image.flip(3))
    assert torch.equal(apply_geometry(image, told(down=1)), image.flip(2))
    assert torch.equal(apply_geometry(image, told(mirror=1, down=1)), image.flip(2, 3))


@pytest.mark.parametrize("size", [8, 9, 28])
def test_almost_no_movement_is_almost_the_image(size):
    """Resampling itself has no shift and no blur."""
    image = photos(1, size=size)
    torch.testing.assert_close(apply_geometry(image, told(size=1e-5)), image, atol=1e-4, rtol=0)


def test_a_shift_moves_a_ramp_by_its_eighths():
    x, y = grid()
    for ramp, name, apart in ((x, "right", (0, 1)), (y, "below", (1, 0))):
        image = (ramp / SIDE)[None, None]
        for units in (1.0, -0.53):
            pixels = SHIFT * SIDE * units
            inside = slice(10, -10)
            found = apply_geometry(image, told(**{name: units}))[..., inside, inside]
            torch.testing.assert_close(
                found, image[..., inside, inside] - pixels / SIDE, atol=0.05 / SIDE, rtol=0
            )
        whole = apply_geometry(photos(1, size=SIDE), told(**{name: 1.0}))
        down, right = (4 * part for part in apart)
        torch.testing.assert_close(
            whole[..., down:, right:],
            photos(1, size=SIDE)[..., : SIDE - down, : SIDE - right],
            atol=1e-4,
            rtol=0,
        )


def test_what_comes_in_from_outside_is_reflected():
    image = photos(1, size=16)
    found = apply_geometry(image, told(right=1.0))
    torch.testing.assert_close(found[..., :2], image[..., :2].flip(3), atol=1e-4, rtol=0)
    far = apply_geometry(image, told(right=6.3, below=-9.1, size=-4.0))
    assert far.isfinite().all()
    assert far.std() > 0.2


def test_a_size_is_a_power_of_two_fifths_about_the_middle():
    x, y = grid()
    for units in (1.0, -1.5, 5.0):
        factor = 2 ** (SIZE * units)
        found = apply_geometry(picture(x, y), told(size=units))
        inside = slice(8, -8)
        right = picture(x / factor, y / factor)
        torch.testing.assert_close(
            found[..., inside, inside], right[..., inside, inside], atol=0.02, rtol=0
        )
    assert 2 ** (SIZE * 5) == 2


@pytest.mark.parametrize("degrees", [90.0, -90.0, 180.0, 30.0, -135.0])
def test_a_turn_is_that_of_torchvision_and_goes_from_right_to_down(degrees):
    angle = degrees * pi / 180
    condition = told(cosine=cos(angle) - 1, sine=sin(angle))
    x, y = grid()
    found = apply_geometry(picture(x, y), condition)
    # torchvision turns the other way round.
    theirs = vision.rotate(picture(x, y), -degrees, InterpolationMode.BILINEAR)
    inside = ((x**2 + y**2).sqrt() < SIDE / 2 - 2)[None, None]
    assert ((found - theirs).abs() * inside).max() < 0.05
    exact = picture(cos(angle) * x + sin(angle) * y, cos(angle) * y - sin(angle) * x)
    assert ((found - exact).abs() * inside).max() < 0.02
    if degrees % 90 == 0:
        whole = photos(1, size=10)
        right = whole.rot90(round(-degrees / 90), (2, 3))
        torch.testing.assert_close(apply_geometry(whole, condition), right, atol=1e-4, rtol=0)


def test_a_disk_is_the_same_from_every_side():
    x, y = grid()
    radius = (x**2 + y**2).sqrt()
    disk = ((SIDE / 3 - radius) / 2).sigmoid()[None, None]
    inside = radius < SIDE / 2 - 2
    for angle in (0.3, 2.0, -1.1):
        found = apply_geometry(disk, told(cosine=cos(angle) - 1, sine=sin(angle)))
        torch.testing.assert_close(found[..., inside], disk[..., inside], atol=0.02, rtol=0)


def test_a_stretch_makes_wider_what_it_makes_lower_along_its_axis():
    x, y = grid()
    inside = (..., slice(6, -6), slice(6, -6))
    for units in (2.0, -1.0):
        factor = 2 ** (SIZE * units)
        found = apply_geometry(picture(x, y), told(along=units))
        torch.testing.assert_close(
            found[inside], picture(x / factor, y * factor)[inside], atol=0.02, rtol=0
        )
    # Along the falling diagonal, of which right and down are equal parts.
    falling, rising = (x + y) / 2, (x - y) / 2
    factor = 2 ** (SIZE * 2)
    right = picture(falling / factor + rising * factor, falling / factor - rising * factor)
    torch.testing.assert_close(
        apply_geometry(picture(x, y), told(across=2.0))[inside], right[inside], atol=0.02, rtol=0
    )


def test_movements_are_made_one_after_the_other_in_the_order_of_their_conditions():
    """Flip, size, turn, stretch, shift: the same picture as from one movement at a time."""
    x, y = grid(48, 48)
    image = hill(x, y, 4.0, 3.0, 4.0, -3.0)[None, None]
    steps = [
        {"mirror": 1},
        {"size": 0.8},
        {"cosine": cos(0.7) - 1, "sine": sin(0.7)},
        {"along": 0.9, "across": -0.7},
        {"right": 0.6, "below": -0.4},
    ]
    apart = image
    for step in steps:
        apart = apply_geometry(apart, told(**step))
    together = apply_geometry(image, told(**{k: v for step in steps for k, v in step.items()}))
    torch.testing.assert_close(together, apart, atol=0.05, rtol=0)
    wrong = image
    for step in reversed(steps):
        wrong = apply_geometry(wrong, told(**step))
    assert (together - wrong).abs().max() > 0.3


def test_images_need_not_be_square():
    x, y = grid(24, 40)
    inside = (x.abs() < 9) & (y.abs() < 9)
    turned = apply_geometry(picture(x, y), told(cosine=-1, sine=1))
    torch.testing.assert_close(turned[..., inside], picture(y, -x)[..., inside], atol=1e-3, rtol=0)
    shifted = apply_geometry(picture(x, y), told(right=0.4, below=1.0))
    right = picture(x - 2, y - 3)
    torch.testing.assert_close(shifted[..., inside], right[..., inside], atol=1e-3, rtol=0)


def test_each_condition_is_drawn_as_often_and_as_far_as_it_should_be():
    n = 40_000
    drawn = GeometricChange(probability=0.12).draw(n, rng())
    mirrored, inverted, size, cosine, sine, along, across, right, below = drawn.T
    share = {"abs": 4 * (0.12 * 0.88 / n) ** 0.5}
    assert float(mirrored.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(inverted.mean()) == pytest.approx(0.06, **share)
    for made in (size, sine, along, right, below):
        assert float((made != 0).double().mean()) == pytest.approx(0.12, **share)
    assert float((across != 0).double().mean()) == pytest.approx(0.06, **share), "half are level"
    for normal in (size, right, below, along.hypot(across)):
        assert float(normal[normal != 0].square().mean()) == pytest.approx(1, abs=0.1)
    turned = sine != 0
    torch.testing.assert_close((cosine + 1).square() + sine.square(), torch.ones(n))
    angles = torch.atan2(sine, cosine + 1)[turned].sort().values
    even = torch.linspace(-pi, pi, len(angles))
    assert (angles - even).abs().max() < 0.2, "turns are even, all the way round"
    tilted = across != 0
    axes = torch.atan2(across, along)[tilted].sort().values
    assert (axes - torch.linspace(-pi, pi, len(axes))).abs().max() < 0.3
    both = (size != 0) & (right != 0)
    assert float(both.double().mean()) == pytest.approx(0.12**2, abs=0.003), "apart from others"
    assert torch.equal(right != 0, below != 0)


def test_without_a_mirror_no_image_is_mirrored():
    drawn = GeometricChange(probability=0.5, mirror=False).draw(500, rng())
    assert not drawn[:, 0].any()
    assert drawn[:, 1:].any(dim=0).all()


def test_conditions_tell_all_that_was_done():
    images = photos(200, size=16)
    moved, conditions = GeometricChange(probability=0.5)(images, rng())
    assert torch.equal(apply_geometry(images, conditions), moved)
    untouched = ~conditions.any(dim=1)
    assert torch.equal((moved == images).flatten(1).all(dim=1), untouched)
    assert 0 < int(untouched.sum()) < 60


def test_what_is_done_to_an_image_is_not_a_matter_of_the_others():
    images, conditions = photos(8, size=16), GeometricChange(probability=0.5).draw(8, rng())
    each = [apply_geometry(images[i : i + 1], conditions[i : i + 1]) for i in range(8)]
    torch.testing.assert_close(apply_geometry(images, conditions), torch.cat(each))


def test_pixels_stay_between_minus_1_and_1_in_the_precision_they_came_in():
    hard = (photos(50) > 0).float() * 2 - 1
    moved, conditions = GeometricChange(probability=1.0)(hard.bfloat16(), rng())
    assert moved.dtype == torch.bfloat16
    assert conditions.dtype == torch.float32
    assert float(moved.min()) == -1
    assert float(moved.max()) == 1


def test_geometry_is_a_function_of_its_generator_and_may_have_nothing_to_do():
    geometry, images = GeometricChange(probability=0.5), photos()
    first, again, other = (geometry(images, rng(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    moved, conditions = geometry(images[:0], rng())
    assert moved.shape == (0, 3, 9, 9)
    assert conditions.shape == (0, 9)


def test_a_probability_beyond_1_is_refused():
    with pytest.raises(ConfigError, match=r"probability=1.2 must lie between 0 and 1"):
        GeometricChange(probability=1.2)


def test_stretches_that_are_one_map_have_one_condition():
    """Wider along an axis is higher across it: with both signs of the draw the numbers agree."""
    x, y = grid()
    image = picture(x, y)
    angle = 0.4
    matrix = SIZE * log(2) * torch.tensor([[cos(angle), sin(angle)], [sin(angle), -cos(angle)]])
    undone = torch.linalg.matrix_exp(-matrix)
    right = picture(undone[0, 0] * x + undone[0, 1] * y, undone[1, 0] * x + undone[1, 1] * y)
    found = apply_geometry(image, told(along=cos(angle), across=sin(angle)))
    torch.testing.assert_close(found[..., 4:-4, 4:-4], right[..., 4:-4, 4:-4], atol=0.02, rtol=0)
