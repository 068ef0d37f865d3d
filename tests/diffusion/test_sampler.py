"""Drawing images: against the exact solution for Gaussian data, and one image at a time."""

from itertools import pairwise
from math import erf, log2, sqrt

import pytest
import torch
from gaussians import MEAN, SHAPE, SPREAD, Exact, denoise, exact, seeds, start, two_heaps

from sfumato.diffusion.denoise import Denoiser
from sfumato.diffusion.sampler import (
    SOLVERS,
    dpm_solver,
    draw_images,
    from_pixels,
    heun,
    noise_schedule,
    start_noise,
    to_pixels,
)
from sfumato.errors import ConfigError, SfumatoError
from sfumato.models.unet import UNet


def test_the_schedule_starts_and_ends_as_asked_and_roots_are_even():
    sigmas = noise_schedule(18)
    assert len(sigmas) == 19
    assert sigmas[0] == 80.0
    assert sigmas[-2] == 0.002
    assert sigmas[-1] == 0.0
    roots = torch.tensor(sigmas[:-1], dtype=torch.float64) ** (1 / 7)
    torch.testing.assert_close(roots.diff(), roots.diff().mean().expand(17))
    assert noise_schedule(2, 0.1, 3.0) == [3.0, 0.1, 0.0]
    assert noise_schedule(3, 1.0, 3.0, rho=1.0) == pytest.approx([3.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 1}, "steps=1 must be at least 2"),
        ({"steps": 5, "sigma_min": 0.0}, "sigma_min=0 must lie above 0"),
        ({"steps": 5, "sigma_max": 0.001}, "below sigma_max=0.001"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        noise_schedule(**settings)


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_an_image_under_noise_is_followed_from_there_to_the_exact_solution(solver):
    base = to_pixels(torch.rand(5, *SHAPE) * 2 - 1)
    noisy = from_pixels(base).double() + 0.7 * start_noise(seeds(5), SHAPE)
    found = draw_images(
        Exact(), None, seeds(5), SHAPE, solver=solver, steps=200, base=base, sigma=0.7, batch_size=2
    )
    wanted = to_pixels(exact(noisy, 0.7, 0.0))
    assert (found.int() - wanted.int()).abs().max() <= 1
    assert len(found.unique()) > 20, "not all is cut off"


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_little_noise_leaves_an_image_as_it_was(solver):
    base = to_pixels(torch.rand(3, *SHAPE) * 2 - 1)
    settings = {"solver": solver, "steps": 4, "base": base, "sigma": 0.003}
    found = draw_images(Exact(), None, seeds(3), SHAPE, **settings)
    assert (found.int() - base.int()).abs().max() <= 2


@pytest.mark.parametrize("solver", [heun, dpm_solver])
def test_a_fixed_start_comes_to_the_exact_solution(solver):
    x = start()
    found = solver(denoise, x, noise_schedule(400))
    torch.testing.assert_close(found, exact(x, 80.0, 0.0), atol=2e-4, rtol=0)


@pytest.mark.parametrize("solver", [heun, dpm_solver])
def test_twice_the_steps_leave_a_quarter_of_the_error(solver):
    """Up to the last sigma: the step to 0 has an error of its own, which no step removes."""
    x = start()
    right = exact(x, 80.0, 0.002)
    errors = [
        float((solver(denoise, x, noise_schedule(steps)[:-1]) - right).abs().max())
        for steps in (40, 80, 160, 320)
    ]
    orders = [log2(a / b) for a, b in pairwise(errors)]
    assert all(1.8 < order < 2.3 for order in orders), orders


def test_eulers_method_would_not_pass_for_one_of_second_order():
    """Heun without its second slope: the test above can tell."""
    x = start()
    right = exact(x, 80.0, 0.002)

    def euler(steps):
        state, sigmas = x, noise_schedule(steps)[:-1]
        for sigma, after in pairwise(sigmas):
            state = state + (after - sigma) * (state - denoise(state, sigma)) / sigma
        return float((state - right).abs().max())

    assert 0.8 < log2(euler(80) / euler(160)) < 1.2


@pytest.mark.parametrize("solver", [heun, dpm_solver])
def test_noise_becomes_the_distribution_of_the_data(solver):
    found = solver(denoise, start(2000), noise_schedule(40))
    assert float(found.mean()) == pytest.approx(MEAN, abs=0.004)
    assert float(found.std()) == pytest.approx(SPREAD, rel=0.02)


@pytest.mark.parametrize("solver", [heun, dpm_solver])
def test_a_mixture_is_drawn_with_both_of_its_heaps(solver):
    found = solver(two_heaps, start(2000, shape=(1, 1, 8)), noise_schedule(40)).flatten()
    upper = found[found > 0]
    assert len(upper) / len(found) == pytest.approx(0.5, abs=0.02)
    assert float(upper.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(upper.std()) == pytest.approx(0.1, rel=0.05)
    inside = float(((upper - 0.5).abs() < 0.1).double().mean())
    assert inside == pytest.approx(erf(sqrt(0.5)), abs=0.02), "and its shape is Gaussian"


def test_heun_asks_35_times_in_18_steps_and_dpm_18_times():
    for solver, count in (("heun", 35), ("dpm", 18)):
        model = Exact()
        draw_images(model, None, seeds(2), SHAPE, solver=solver)
        assert len(model.calls) == count
        assert model.calls[0] == 80.0
        assert model.calls[-1] == pytest.approx(0.002)


@pytest.mark.parametrize("solver", SOLVERS)
def test_images_are_bytes_of_the_exact_solution(solver):
    found = draw_images(Exact(), None, seeds(9), SHAPE, solver=solver, steps=120)
    right = exact(start_noise(seeds(9), SHAPE) * 80, 80.0, 0.0)
    assert found.dtype == torch.uint8
    assert (from_pixels(found) - right.clamp(-1, 1)).abs().max() < 0.6 / 127.5


def network(dropout=0.5):
    """A U-Net as it might be after training: no layer is near zero."""
    torch.manual_seed(0)
    net = UNet(
        channels=3, size=8, classes=5, width=8, multipliers=(1, 2), blocks=1, dropout=dropout
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return Denoiser(net)


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_image_is_the_same_in_batches_of_1_3_and_7(solver):
    labels, shape = torch.tensor([4, 0, 2, 2, 1, 3, 0]), (3, 8, 8)
    order = torch.tensor([5, 2, 0])
    for model in (Exact((-0.6, -0.3, 0.0, 0.3, 0.6)), network()):

        def draw(places, size, model=model):
            return draw_images(
                model, labels[places], seeds(7)[places], shape, solver=solver, steps=6,
                batch_size=size,
            )  # fmt: skip

        alone, *others = (draw(torch.arange(7), size) for size in (1, 3, 7))
        assert len(alone.flatten(1).unique(dim=0)) == 7
        for other, right in [(draw(order, 256), alone[order]), *((each, alone) for each in others)]:
            if isinstance(model, Exact):
                assert torch.equal(other, right), "also with other images, in another order"
            else:  # kernels may round otherwise for other batches, and so a byte may be the next
                gap = (other.int() - right.int()).abs()
                assert gap.max() <= 1
                assert gap.double().mean() < 0.01


def test_each_image_is_of_its_own_label():
    means = (-0.8, 0.0, 0.8)
    labels = torch.tensor([2, 0, 1, 1, 0, 2, 2])
    model = Exact(means, spread=0.02)
    found = draw_images(model, labels, seeds(7), SHAPE, batch_size=3, steps=12)
    right = torch.tensor(means)[labels]
    torch.testing.assert_close(from_pixels(found).mean(dim=(1, 2, 3)), right, atol=0.02, rtol=0)


def test_a_denoiser_is_drawn_from_in_evaluation_mode_and_left_as_it_was():
    model = network().train()
    frozen = model.network.first.eval()
    labels = torch.zeros(2, dtype=torch.int64)
    first, second = (draw_images(model, labels, seeds(2), (3, 8, 8), steps=3) for _ in range(2))
    assert torch.equal(first, second), "there is no dropout in it"
    assert all(module.training == (module is not frozen) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_no_image_at_all_can_be_drawn():
    assert draw_images(Exact(), None, seeds(0), SHAPE).shape == (0, *SHAPE)


def test_bytes_and_images_go_both_ways():
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(to_pixels(from_pixels(every)), every)
    assert from_pixels(every).min() == -1
    assert from_pixels(every).max() == 1
    beyond = torch.tensor([-9.0, 9.0]).reshape(1, 1, 1, 2)
    assert to_pixels(beyond).flatten().tolist() == [0, 255]


@pytest.mark.parametrize(
    ("labels", "options", "words"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, "3 labels and 2 seeds"),
        (None, {"solver": "euler"}, 'solver "euler" is not known: there are heun, dpm'),
        (None, {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (None, {"base": torch.zeros(2, 3, 5, 5).byte()}, r"must be \(2, 3, 4, 4\): one for each"),
    ],
)
def test_what_cannot_be_drawn_is_said(labels, options, words):
    with pytest.raises(ConfigError, match=words):
        draw_images(Exact(), labels, seeds(2), SHAPE, **options)


def test_a_denoiser_that_has_diverged_is_an_error_and_no_image():
    with pytest.raises(SfumatoError, match="not finite"):
        draw_images(Exact((float("nan"),)), None, seeds(2), SHAPE, steps=3)


def test_a_lower_precision_is_for_the_network_alone():
    model, labels = network(), torch.zeros(4, dtype=torch.int64)
    seen = []
    model.network.first.register_forward_hook(lambda _, x, y: seen.append(y.dtype))
    full, low = (
        draw_images(model, labels, seeds(4), (3, 8, 8), steps=4, precision=precision)
        for precision in (torch.float32, torch.bfloat16)
    )
    assert seen == [torch.float32] * 7 + [torch.bfloat16] * 7
    gap = (low.float() - full.float()).abs()
    assert 0 < gap.mean() < 4
