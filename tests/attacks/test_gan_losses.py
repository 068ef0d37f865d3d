"""The losses of the two games, against their definitions."""

from math import exp, log

import pytest
import torch

from sfumato.attacks.gan_losses import (
    feature_matching,
    hinge_discriminator,
    hinge_generator,
    real_or_fake,
    soft_cross_entropy,
)


def draws(*shape, seed=0):
    """Numbers in float64, well away from each other and from the kinks of a hinge."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def soft(*shape, seed=0):
    return draws(*shape, seed=seed).softmax(dim=1)


CASES = {
    "hinge_discriminator": (hinge_discriminator, (draws(5), draws(7, seed=1))),
    "hinge_generator": (hinge_generator, (draws(5),)),
    "real_or_fake": (real_or_fake, (draws(5, 3), draws(7, 3, seed=1))),
    "soft_cross_entropy": (soft_cross_entropy, (draws(5, 3), soft(5, 3, seed=1))),
    "feature_matching": (feature_matching, (draws(5, 4), draws(7, 4, seed=1))),
}


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def slow_hinge_discriminator(real, fake):
    return mean(max(0, 1 - s) for s in real) + mean(max(0, 1 + s) for s in fake)


def slow_hinge_generator(fake):
    return -mean(fake)


def slow_real_or_fake(real, fake):
    def realness(row):
        return sum(exp(v) for v in row) / (1 + sum(exp(v) for v in row))

    return mean(-log(realness(row)) for row in real) + mean(-log(1 - realness(r)) for r in fake)


def slow_soft_cross_entropy(logits, wanted):
    def one(row, goal):
        total = sum(exp(v) for v in row)
        return -sum(p * log(exp(v) / total) for v, p in zip(row, goal, strict=True))

    return mean(one(row, goal) for row, goal in zip(logits, wanted, strict=True))


def slow_feature_matching(real, fake):
    columns = zip(zip(*real, strict=True), zip(*fake, strict=True), strict=True)
    return mean(abs(mean(a) - mean(b)) for a, b in columns)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_what_its_formula_says(name):
    loss, inputs = CASES[name]
    slow = globals()[f"slow_{name}"]
    assert loss(*inputs).item() == pytest.approx(slow(*(x.tolist() for x in inputs)), rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_its_gradient_is_that_of_finite_differences(name):
    loss, inputs = CASES[name]
    assert torch.autograd.gradcheck(loss, [x.clone().requires_grad_(True) for x in inputs])


@pytest.mark.parametrize("name", CASES)
def test_it_is_worked_out_in_float32_also_of_bfloat16_under_autocast(name):
    loss, inputs = CASES[name]
    low = [x.bfloat16() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(*low)
    assert found.dtype == torch.float32
    exact = loss(*(x.double() for x in low))
    assert found.item() == pytest.approx(exact.item(), rel=1e-5)


def test_beyond_the_hinge_nothing_more_is_gained():
    real = torch.tensor([1.5, 9.0], requires_grad=True)
    fake = torch.tensor([-1.5, -9.0], requires_grad=True)
    hinge_discriminator(real, fake).backward()
    assert not real.grad.any()
    assert not fake.grad.any()


def test_huge_logits_lose_nothing_and_overflow_nowhere():
    logits = torch.tensor([[300.0, -300.0], [-300.0, -301.0]], requires_grad=True)
    loss = real_or_fake(logits[:1], logits[1:])
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.isfinite().all()
    wrong = real_or_fake(logits[1:].detach(), logits[:1].detach())
    assert wrong.item() == pytest.approx(600, abs=1)
    assert real_or_fake(torch.full((1, 1), 40.0), torch.full((1, 1), -200.0)).item() > 0


def test_the_entropy_of_logits_is_the_cross_entropy_to_themselves():
    sure, torn = torch.tensor([[50.0, 0.0, 0.0]]), torch.zeros(1, 3)
    assert soft_cross_entropy(sure, sure.softmax(dim=1)).item() == pytest.approx(0, abs=1e-6)
    assert soft_cross_entropy(torn, torn.softmax(dim=1)).item() == pytest.approx(log(3))


def test_matched_features_do_not_care_which_image_has_them():
    features = torch.randn(6, 4)
    assert feature_matching(features, features.flip(0)).item() == pytest.approx(0, abs=1e-6)
