"""Guidance: the exact ratio mends a wrong model, and a discriminator learns the ratio."""

from dataclasses import replace

import pytest
import torch
from gaussians import MEAN, SHAPE, SPREAD, Exact, denoise, exact, seeds, start
from torch import nn

from sfumato.data.images import Images
from sfumato.diffusion.discriminator_guidance import (
    DiscriminatorGuide,
    density_ratio_gradient,
    discriminator_step,
    telling_loss,
)
from sfumato.diffusion.sampler import (
    SOLVERS,
    dpm_solver,
    draw_images,
    from_pixels,
    heun,
    noise_schedule,
    to_pixels,
)
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.models.noisy_discriminator import NoisyDiscriminator
from sfumato.runs import Run
from sfumato.training.plain import shuffled_batches, train_plainly


def wrong_mean(x, sigma):
    return denoise(x, sigma, mean=-0.1)


def exact_ratio(x, sigma, labels=None):
    """The gradient of log N(MEAN, s^2) / N(-0.1, s^2) with noise of sigma on both."""
    return torch.full_like(x, (MEAN + 0.1) / (SPREAD**2 + sigma**2))


@pytest.mark.parametrize("solver", [heun, dpm_solver])
def test_the_exact_guide_turns_a_wrong_model_into_the_right_one(solver):
    x = start(50)
    right = exact(x, 80.0, 0.0)
    means, errors = [], []
    for steps in (18, 80, 160):
        gap = solver(wrong_mean, x, noise_schedule(steps), exact_ratio) - right
        means.append(abs(float(gap.mean())))
        errors.append(float(gap.abs().max()))
    assert means[0] < 0.04, "18 steps take the mean nine tenths of the way and more"
    assert errors[1] < 4e-3
    assert errors[2] < errors[1] / 3, "guided steps are of second order too"
    alone = solver(wrong_mean, x, noise_schedule(160))
    torch.testing.assert_close(alone, exact(x, 80.0, 0.0, mean=-0.1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("solver", [heun, dpm_solver])
def test_a_guide_that_falls_silent_is_not_undone(solver):
    """In the range of its sigmas it moves images by as much as the equation says, and stays so."""
    mean, low, high = -0.1, 0.5, 5.0

    def push(x, sigma):
        return exact_ratio(x, sigma) if low <= sigma <= high else None

    x = start(20)
    moved = solver(wrong_mean, x, noise_schedule(300), push) - exact(x, 80.0, 0.0, mean)
    # What the right mean gains over the wrong one between two sigmas, and what is left of it at 0.
    gain = SPREAD * ((SPREAD**2 + low**2) ** -0.5 - (SPREAD**2 + high**2) ** -0.5)
    torch.testing.assert_close(moved, torch.full_like(x, (MEAN - mean) * gain), atol=0.01, rtol=0)


@pytest.mark.parametrize("solver", [heun, dpm_solver])
def test_what_a_guide_said_before_a_silence_is_forgotten(solver):
    x, sigmas = start(3), noise_schedule(8)
    loud = torch.full_like(x, 100.0)
    pushes = [
        {sigmas[0]: loud} | {sigma: torch.zeros_like(x) for sigma in later}
        for later in (sigmas[2:], [])
    ]
    first, second = (solver(denoise, x, sigmas, lambda _, s, p=p: p.get(s)) for p in pushes)
    assert torch.equal(first, second)
    assert not torch.equal(first, solver(denoise, x, sigmas))


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_guide_moves_images_by_its_weight_and_knows_their_labels(solver):
    model, labels = Exact((-0.1, -0.1)), torch.tensor([0, 1] * 20)
    told = []

    def guide(x, sigma, labels):
        told.append(sigma)
        assert x.dtype == torch.float32
        return exact_ratio(x, sigma) * labels[:, None, None, None]

    def means(weight, guide=guide):
        found = draw_images(
            model, labels, seeds(40), SHAPE, solver=solver, steps=60, guide=guide,
            guide_weight=weight, batch_size=7,
        )  # fmt: skip
        return from_pixels(found).unflatten(0, (20, 2)).mean(dim=(0, 2, 3, 4))

    free = means(1.0, None)
    for weight in (1.0, 0.5):
        moved = means(weight) - free
        assert float(moved[0]) == 0
        assert float(moved[1]) == pytest.approx(0.5 * weight, abs=0.05)
    assert len(told) == 2 * 6 * 60, "once a step, of either solver"
    assert torch.equal(means(0.0), free)
    assert torch.equal(means(1.0, lambda *_: None), free), "a guide may be silent"


SIDE, WIDE = 8, 0.25


def pattern(label):
    """What real images of a class have, and made ones lack: bright at the top, or at the left."""
    slope = torch.linspace(0.3, -0.3, SIDE)
    return (slope[:, None] if label == 0 else slope[None, :]).expand(1, SIDE, SIDE)


def heap(n, real, private=False):
    """Images of two classes, N(pattern, WIDE^2) or N(0, WIDE^2) in every pixel."""
    generator = torch.Generator().manual_seed(int(real))
    labels = torch.arange(n) % 2
    x = WIDE * torch.randn(n, 1, SIDE, SIDE, generator=generator)
    if real:
        x = x + torch.stack([pattern(0), pattern(1)])[labels]
    name = "real" if real else "made"
    return Images(
        pixels=to_pixels(x), labels=labels, classes=("a", "b"), name=name, private=private
    )


def small(classes=2, width=16):
    torch.manual_seed(0)
    return NoisyDiscriminator(channels=1, size=SIDE, classes=classes, width=width)


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained_on():
    """A discriminator of 300 real images and 1000 made ones."""
    model, made = small(), heap(1000, real=False)
    step = discriminator_step(model, heap(300, real=True), made, CPU, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in shuffled_batches(len(made), 32, 0, 120, seed=0):
        step(batch)
        optimizer.step()
    return model


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("sigma", [0.1, 0.3, 1.0])
def test_a_discriminator_learns_the_gradient_of_the_known_ratio(trained_on, sigma, label):
    """For two Gaussians it is the difference of means over the variance, everywhere."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 1, SIDE, SIDE, generator=generator) * (WIDE**2 + sigma**2) ** 0.5
    x = x + 0.5 * pattern(label)
    labels = torch.full((64,), label)
    found = density_ratio_gradient(trained_on, x, torch.full((64,), sigma), labels).mean(dim=0)
    right = pattern(label) / (WIDE**2 + sigma**2)
    assert torch.cosine_similarity(found.flatten(), right.flatten(), dim=0) > 0.8
    assert 0.3 < found.norm() / right.norm() < 2.0


def test_images_drawn_with_a_discriminator_are_more_like_real_ones_of_their_class(trained_on):
    model, labels = Exact((0.0, 0.0), WIDE), torch.tensor([0, 1] * 30)
    free, guided = (
        from_pixels(draw_images(model, labels, seeds(60), (1, SIDE, SIDE), guide=guide))
        for guide in (None, DiscriminatorGuide(trained_on))
    )
    for label in (0, 1):
        change = (guided - free)[labels == label].mean(dim=0)
        right = pattern(label)
        assert torch.cosine_similarity(change.flatten(), right.flatten(), dim=0) > 0.8
        assert 0.3 < change.norm() / right.norm() < 1.5


class Known(nn.Module):
    """A discriminator whose logit is the sum of the pixels times a number."""

    def __init__(self, slope=1.0):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))
        self.seen = []

    def forward(self, x, sigma, labels=None):
        self.seen.append((x.detach(), sigma, labels))
        return self.slope * x.sum(dim=(1, 2, 3))


def test_a_guide_is_silent_outside_of_its_sigmas():
    model, x = Known(3.0), torch.zeros(2, 1, 4, 4)
    guide = DiscriminatorGuide(model, lowest=0.1, highest=2.0)
    assert guide(x, 0.09, None) is None
    assert guide(x, 2.1, None) is None
    assert not model.seen
    with torch.no_grad():
        for sigma in (0.1, 1.0, 2.0):
            assert torch.equal(guide(x, sigma, None), torch.full_like(x, 3.0))
    assert model.slope.grad is None
    with pytest.raises(ConfigError, match="from sigma 2 to 1 never speaks"):
        DiscriminatorGuide(model, lowest=2.0, highest=1.0)


def test_the_gradient_is_that_of_the_log_ratio_of_d_clipped():
    x = torch.linspace(-13, 13, 27).reshape(27, 1, 1, 1)
    found = density_ratio_gradient(Known(), x, torch.ones(27)).flatten()
    d = x.double().flatten().requires_grad_(True)
    share = d.sigmoid().clamp(1e-5, 1 - 1e-5)
    (share / (1 - share)).log().sum().backward()
    torch.testing.assert_close(found.double(), d.grad, atol=1e-6, rtol=0)
    assert found.tolist() == [0.0] * 2 + [1.0] * 23 + [0.0] * 2


def test_what_a_discriminator_says_of_an_image_is_not_a_matter_of_the_others(trained_on):
    x = torch.randn(6, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    sigma, labels = torch.linspace(0.1, 3, 6), torch.tensor([0, 1, 1, 0, 1, 0])
    assert trained_on.training, "dropout is off only while it is asked"
    whole = density_ratio_gradient(trained_on, x, sigma, labels)
    parts = [
        density_ratio_gradient(trained_on, x[i : i + 1], sigma[i : i + 1], labels[i : i + 1])
        for i in range(6)
    ]
    torch.testing.assert_close(whole, torch.cat(parts), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(whole, density_ratio_gradient(trained_on, x, sigma, 1 - labels))


def test_batches_are_half_real_and_half_made_however_many_there_are():
    model, made = Known(), heap(50, real=False)
    step = discriminator_step(model, heap(4, real=True), made, CPU)
    numbers = [step(batch) for batch in shuffled_batches(50, 10, 0, 5, seed=0)]
    assert all(each["batch"] == 20 for each in numbers)
    labels = torch.cat([labels[10:] for _, _, labels in model.seen])
    assert labels.sum() == 25, "an epoch has each made image once, under its label"
    for x, sigma, labels in model.seen:
        assert len(x) == len(sigma) == len(labels) == 20


def test_the_loss_is_cross_entropy_under_log_normal_noise():
    model, n = Known(), 8000
    images = torch.full((n, 1, 2, 2), 0.25)
    generator = torch.Generator().manual_seed(0)
    loss = telling_loss(model, images, torch.zeros(n, dtype=torch.int64), n // 4, generator)
    ((x, sigma, _),) = model.seen
    assert float(sigma.log().mean()) == pytest.approx(-1.2, abs=0.06)
    assert float(sigma.log().std()) == pytest.approx(1.2, rel=0.05)
    noise = (x - images) / sigma[:, None, None, None]
    assert float(noise.mean()) == pytest.approx(0, abs=0.03)
    assert float(noise.std()) == pytest.approx(1, rel=0.03)
    d = x.sum(dim=(1, 2, 3)).double().sigmoid()
    right = -torch.cat([d[: n // 4].log(), (1 - d[n // 4 :]).log()]).mean()
    assert float(loss.detach()) == pytest.approx(float(right), rel=1e-3)


def test_a_training_that_was_cut_ends_with_the_same_weights(tmp_path):
    real, made = heap(20, real=True), heap(24, real=False)

    def train(name, cut=None):
        model = small(width=8)
        step = discriminator_step(model, real, made, CPU, seed=3)

        def cutting(batch):
            if batch.step == cut:
                raise KeyboardInterrupt
            return step(batch)

        (tmp_path / name).mkdir(exist_ok=True)
        run = Run(tmp_path / name)
        train_plainly(model, 24, cutting, run, epochs=2, lr=1e-2, batch_size=8)
        return model.state_dict()

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("cut", cut=3)
    torch.testing.assert_close(train("cut"), whole, rtol=0, atol=0)


def test_private_images_teach_no_discriminator():
    with pytest.raises(PrivacyError, match='training a discriminator would read "real"'):
        discriminator_step(small(), heap(4, real=True, private=True), heap(4, real=False), CPU)


def test_images_that_are_not_alike_are_not_told_apart():
    real, made = heap(4, real=True), heap(4, real=False)
    for other in (replace(made, classes=("b", "a")), replace(made, pixels=made.pixels[..., :6])):
        with pytest.raises(DataError, match="images of one size and the same classes"):
            discriminator_step(small(), real, other, CPU)


def test_a_discriminator_runs_in_bfloat16_and_answers_in_float32(trained_on):
    x = torch.randn(6, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([0, 1] * 3)
    full = DiscriminatorGuide(trained_on)(x, 0.5, labels)
    low = DiscriminatorGuide(trained_on, precision=torch.bfloat16)(x, 0.5, labels)
    assert low.dtype == torch.float32
    assert not torch.equal(low, full)
    assert torch.cosine_similarity(low.flatten(), full.flatten(), dim=0) > 0.99
