"""Membership scores against slow, obvious ones, on models that remember and models that do not."""

import math
import statistics

import pytest
import torch

from sfumato.attacks import membership
from sfumato.attacks.membership import lira_offline, lira_online, log_odds, loss_scores, rmia
from sfumato.attacks.shadow_models import draw_halves
from sfumato.errors import DataError
from sfumato.metrics.leakage import roc


def shadow_world(models=16, images=40, memory=0.0, seed=0):
    """Log-odds of shadow models that add `memory` for training images, and who has which image."""
    generator = torch.Generator().manual_seed(seed)
    hardness = 2 * torch.randn(images, generator=generator).double()
    inside = draw_halves(models, images, seed)
    noise = torch.randn(models, images, generator=generator).double()
    return hardness + noise + memory * inside, inside, hardness


def target(hardness, members, memory=0.0, seed=1):
    noise = torch.randn(len(hardness), generator=torch.Generator().manual_seed(seed)).double()
    return hardness + noise + memory * members


def auc(scores, members):
    return roc(-scores[members].numpy(), -scores[~members].numpy()).auc


def test_log_odds_are_those_of_the_softmax_and_stay_finite_where_it_rounds():
    logits = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(7) % 5
    p = logits.double().softmax(-1)[:, torch.arange(7), labels]
    assert torch.allclose(log_odds(logits, labels), (p / (1 - p)).log())
    sure = torch.tensor([[400.0, 0.0, 0.0], [-400.0, 0.0, 0.0]])
    found = log_odds(sure, torch.zeros(2, dtype=torch.int64))
    assert torch.allclose(found, torch.tensor([400.0, -400.0]).double() - math.log(2))
    assert torch.equal(loss_scores(found).argsort(), found.argsort())


@pytest.mark.parametrize("own_variance", [False, True])
def test_lira_is_the_ratio_of_two_gaussians_image_by_image(monkeypatch, own_variance):
    shadows, inside, hardness = shadow_world(memory=1.0)
    monkeypatch.setattr(membership, "ENOUGH", 2 if own_variance else 1000)
    phi = target(hardness, torch.arange(40) < 20, 1.0)
    sides = []
    for side in (inside, ~inside):
        values = [[float(v) for v, s in zip(shadows[:, i], side[:, i], strict=True) if s]
                  for i in range(40)]  # fmt: skip
        spread = [statistics.variance(v) for v in values]
        if not own_variance:  # eight models each: the mean of the images' variances
            spread = [statistics.mean(spread)] * 40
        sides.append([(statistics.mean(v), s) for v, s in zip(values, spread, strict=True)])
    online, offline = lira_online(phi, shadows, inside), lira_offline(phi, shadows, inside)
    for i in range(40):
        logs = [statistics.NormalDist(m, math.sqrt(v)).pdf(float(phi[i])) for m, v in
                (sides[0][i], sides[1][i])]  # fmt: skip
        assert float(online[i]) == pytest.approx(math.log(logs[0] / logs[1]), abs=1e-9)
        mean, variance = sides[1][i]
        below = statistics.NormalDist(mean, math.sqrt(variance)).cdf(float(phi[i]))
        assert statistics.NormalDist().cdf(float(offline[i])) == pytest.approx(below, abs=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_rmia_counts_the_population_that_an_image_beats(gamma):
    shadows, inside, hardness = shadow_world(memory=1.0)
    phi, population, others = target(hardness, True), hardness[:9] + 0.5, shadows[:, :9] - 0.5
    found = rmia(phi, shadows, inside, population, others, gamma=gamma, share=0.4)
    sigmoid = lambda v: 1 / (1 + math.exp(-float(v)))  # noqa: E731
    for i in range(40):
        out = [sigmoid(v) for v, s in zip(shadows[:, i], inside[:, i], strict=True) if not s]
        ratio = sigmoid(phi[i]) / (0.7 * statistics.mean(out) + 0.3)
        beaten = [
            ratio / (sigmoid(z) / (0.7 * statistics.mean(map(sigmoid, column)) + 0.3)) > gamma
            for z, column in zip(population, others.T, strict=True)
        ]
        assert float(found[i]) == pytest.approx(statistics.mean(beaten))


def attacks(memory):
    shadows, inside, hardness = shadow_world(models=16, images=2400, memory=memory, seed=3)
    members = torch.arange(2000) < 1000
    phi = target(hardness[:2000], members, memory, seed=4)
    population = target(hardness[2000:], False, seed=5)
    # The population is in no shadow model.
    apart = shadows[:, 2000:] - memory * inside[:, 2000:]
    rest = shadows[:, :2000], inside[:, :2000]
    scores = {
        "loss": loss_scores(phi),
        "online": lira_online(phi, *rest),
        "offline": lira_offline(phi, *rest),
        "rmia": rmia(phi, *rest, population, apart),
    }
    return {name: auc(score, members) for name, score in scores.items()}


def test_a_model_that_remembers_is_caught_and_shadows_help():
    found = attacks(memory=2.0)
    assert found["loss"] > 0.6
    assert min(found["online"], found["offline"], found["rmia"]) > found["loss"] + 0.08
    assert found["online"] > 0.88  # the best there is has Phi(2 / sqrt 2) = 0.92


def test_of_a_model_that_has_seen_nothing_no_attack_finds_anything():
    # The deviation of an AUC of 1,000 against 1,000 is 0.013.
    assert all(abs(value - 0.5) < 0.045 for value in attacks(memory=0.0).values())


def test_an_image_that_all_models_learnt_is_named():
    shadows = torch.zeros(4, 3).double()
    inside = torch.tensor([[True, True, False]] * 2 + [[False, True, True]] * 2)
    for score in (lira_online, lira_offline):
        with pytest.raises(DataError, match="image 1 is on one side"):
            score(torch.zeros(3).double(), shadows, inside)
    with pytest.raises(DataError, match="population"):
        rmia(shadows[0], shadows, inside, shadows[0, :0], shadows[:, :0])


def test_models_that_all_say_the_same_give_finite_scores():
    inside = draw_halves(4, 6, 0)
    phi = torch.tensor([0.0, 50.0, -50.0, 1.0, 0.0, 0.0]).double()
    for score in (lira_online, lira_offline):
        assert bool(torch.isfinite(score(phi, torch.zeros(4, 6).double(), inside)).all())
