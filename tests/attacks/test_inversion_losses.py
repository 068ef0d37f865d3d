"""Losses of an inversion, against slow code, and what the target's own unit is for."""

from math import acosh

import pytest
import torch

from sfumato.attacks.inversion_loss import (
    LOSSES,
    InversionLoss,
    cross_entropy,
    logit_loss,
    margin_loss,
    margin_scale,
    margins,
    poincare,
)

LABELS = torch.tensor([3, 2, 4, 2, 1, 3])
"""Some are first answers, and some are not."""


def answers(scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(6, 5, generator=generator, dtype=dtype)


def gradient(loss, logits, labels):
    logits = logits.clone().requires_grad_(True)
    loss(logits, labels).backward()
    return logits.grad


def slow_margins(logits, labels):
    for row, wanted in zip(logits.tolist(), labels.tolist(), strict=True):
        yield row[wanted] - max(value for place, value in enumerate(row) if place != wanted)


def slow_poincare(row, wanted):
    size = sum(abs(value) for value in row)
    u = [value / size for value in row]
    v = [1 - 1e-4 if place == wanted else 0.0 for place in range(len(row))]
    apart = sum((a - b) ** 2 for a, b in zip(u, v, strict=True))
    rim = (1 - sum(a * a for a in u)) * (1 - sum(b * b for b in v))
    return acosh(1 + 2 * apart / rim)


def test_a_margin_is_the_lead_over_the_best_other_class():
    logits = answers()
    slow = torch.tensor(list(slow_margins(logits, LABELS)), dtype=torch.float64)
    torch.testing.assert_close(margins(logits, LABELS), slow)
    torch.testing.assert_close(margin_loss(logits, LABELS), -slow.mean())
    assert (slow < 0).any()
    assert (slow > 0).any()


def test_the_logit_loss_is_of_the_wanted_logit_alone():
    logits = answers()
    wanted = -sum(row[label] for row, label in zip(logits, LABELS, strict=True)) / 6
    torch.testing.assert_close(logit_loss(logits, LABELS), wanted)
    assert (gradient(logit_loss, logits, LABELS) != 0).sum() == 6


@pytest.mark.parametrize("lead", [-50.0, 0.5, 20.0, 1000.0])
def test_the_margin_pulls_two_logits_by_one_however_sure_the_target_is(lead):
    logits = torch.tensor([[lead, 0.0, -1.0], [-2.0, 0.0, lead]])
    found = gradient(margin_loss, logits, torch.tensor([0, 2])) * len(logits)
    wanted = torch.tensor([[-1.0, 1.0, 0.0], [0.0, 1.0, -1.0]])
    assert torch.equal(found, wanted)


def test_the_gradient_of_cross_entropy_vanishes_where_the_target_is_sure():
    logits = torch.tensor([[30.0, 0.0, -1.0]])
    assert gradient(cross_entropy, logits, torch.tensor([0])).abs().max() < 1e-9
    assert gradient(margin_loss, logits, torch.tensor([0])).abs().max() == 1


def test_poincare_is_the_distance_in_the_ball():
    logits = answers()
    rows = zip(logits.tolist(), LABELS.tolist(), strict=True)
    slow = sum(slow_poincare(row, label) for row, label in rows) / 6
    assert poincare(logits, LABELS).item() == pytest.approx(slow, rel=1e-9)
    narrow = poincare(logits.float(), LABELS).item()
    assert narrow == pytest.approx(slow, rel=1e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_is_that_of_finite_differences(name):
    logits = answers().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, LABELS), [logits])


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_at_a_corner_and_at_nothing_a_loss_and_its_gradient_are_finite(name, wanted):
    for row in ([7.0, 0.0, 0.0], [-7.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1e4, -1e4, 1e4]):
        logits, labels = torch.tensor([row]), torch.tensor([wanted])
        assert LOSSES[name](logits, labels).isfinite()
        assert gradient(LOSSES[name], logits, labels).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_falls_when_the_wanted_logit_rises(name):
    logits = answers()
    nearer = logits.scatter_add(1, LABELS[:, None], torch.full((6, 1), 0.5, dtype=torch.float64))
    assert LOSSES[name](nearer, LABELS) < LOSSES[name](logits, LABELS)


def test_the_unit_is_the_usual_lead_of_the_first_answer():
    logits = answers(dtype=torch.float32)
    leads = [sorted(row)[-1] - sorted(row)[-2] for row in logits.tolist()]
    assert margin_scale(logits) == pytest.approx(sum(leads) / 6)
    assert margin_scale(torch.zeros(4, 3)) > 0  # a target that never decides is no division by 0


@pytest.mark.parametrize("louder", [0.01, 1.6, 300.0])
@pytest.mark.parametrize("name", LOSSES)
def test_in_its_own_unit_a_louder_target_is_no_other_target(name, louder):
    quiet, public = answers(dtype=torch.float32), answers(2.0, torch.float32).flip(0)
    before = InversionLoss(name, margin_scale(public))
    after = InversionLoss(name, margin_scale(louder * public))
    torch.testing.assert_close(after(louder * quiet, LABELS), before(quiet, LABELS))


def test_without_the_unit_a_louder_target_outweighs_the_discriminator():
    logits = answers(dtype=torch.float32)
    plain = InversionLoss("margin")
    torch.testing.assert_close(plain(1.6 * logits, LABELS), 1.6 * plain(logits, LABELS))


def test_a_wish_is_worked_out_in_float32():
    logits = answers(dtype=torch.float32).bfloat16()
    found = InversionLoss("cross-entropy", 2.0)(logits, LABELS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, cross_entropy(logits.float() / 2, LABELS))
