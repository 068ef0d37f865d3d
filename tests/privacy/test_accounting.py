"""Prices against published and independently computed ones."""

import math
from collections import Counter

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from samples import few
from scipy.stats import norm

from sfumato.errors import ConfigError
from sfumato.privacy.accounting import (
    LEAST_DELTA,
    epsilon,
    price,
    shuffled_epsilon,
)
from sfumato.privacy.budget import Budget, Plan, make_plan, steps_within
from sfumato.privacy.releases import Mechanism, Release

PRV_ALLOWANCE = 0.04
"""The specs' PRV tables were searched with an error allowance on epsilon, so they ask for slightly
too much noise: by the PLD accountant their plans cost up to this much less than the target."""


def pld(rate: float, noise: float, steps: int, delta: float = 1e-5, relation="add-or-remove"):
    return price(Counter({Mechanism(rate, noise): steps}), delta, relation)


def rdp(rate: float, noise: float, steps: int, delta: float = 1e-5):
    return price(Counter({Mechanism(rate, noise): steps}), delta, accountant="rdp")


# specs/dp_training.md 1.5: 50,000 examples in batches of 1,000, delta 1e-5.
@few(
    ("claimed", "epochs", "gdp_noise", "true_epsilon", "noise", "rdp_noise"),
    [
        (1, 1, 0.811, 2.11, 1.055, 1.216),
        (1, 3, 1.133, 1.25, 1.279, 1.392),
        (1, 5, 1.367, 1.12, 1.484, 1.582),
        (2, 1, 0.620, 4.47, 0.828, 0.918),
        (2, 3, 0.780, 3.18, 0.930, 1.011),
        (2, 5, 0.894, 2.66, 1.011, 1.084),
        (4, 1, 0.515, 7.38, 0.647, 0.703),
    ],
)
def test_the_table_of_claimed_and_true_epsilons_holds(
    claimed, epochs, gdp_noise, true_epsilon, noise, rdp_noise
):
    assert pld(0.02, gdp_noise, 50 * epochs) == pytest.approx(true_epsilon, rel=0.005)
    assert claimed - PRV_ALLOWANCE < pld(0.02, noise, 50 * epochs) <= claimed
    budget = Budget(epsilon=claimed, delta=1e-5)
    plan = make_plan(budget, size=50_000, batch_size=1000, epochs=epochs)
    assert 0.98 * noise < plan.noise_multiplier <= noise
    assert rdp(0.02, rdp_noise, 50 * epochs) == pytest.approx(claimed, rel=0.01)


@pytest.mark.parametrize(
    ("noise", "epochs", "expected"),
    [(0.811, 1, 5.6), (1.133, 3, 7.2), (0.620, 1, 7.7), (0.780, 3, 11.4)],
)
def test_shuffling_costs_what_unamplified_gaussians_cost(noise, epochs, expected):
    assert shuffled_epsilon(noise, epochs, 1e-5) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("epochs", "releases"), [(0.1, 1), (1, 1), (1.01, 2), (1.9, 2), (2 + 1e-9, 2), (2.5, 3)]
)
def test_a_part_of_a_shuffled_epoch_costs_what_a_whole_one_does(epochs, releases):
    # Some examples have come once more in it, and nobody says which.
    gaussians = price(Counter({Mechanism(1.0, 1.2): releases}), 1e-5)
    assert shuffled_epsilon(1.2, epochs, 1e-5) == gaussians


# specs/synthesis.md A5: rate 1/12, 12 steps an epoch, delta 1e-5.
@few(
    ("target", "epochs", "rdp_noise", "noise"),
    [
        (1, 30, 6.53, 6.13),
        (2, 30, 3.56, 3.33),
        (3, 30, 2.55, 2.39),
        (4, 30, 2.04, 1.92),
        (6, 30, 1.53, 1.44),
        (8, 30, 1.27, 1.21),
        (1, 50, 8.36, 7.85),
        (2, 50, 4.51, 4.23),
        (3, 50, 3.20, 3.00),
        (4, 50, 2.53, 2.38),
        (6, 50, 1.86, 1.75),
        (8, 50, 1.52, 1.44),
    ],
)
def test_the_noise_table_of_the_diffusion_warm_up_holds(target, epochs, rdp_noise, noise):
    # The table has two digits after the point: allow for their rounding on top.
    cost = pld(1 / 12, noise, 12 * epochs)
    assert 0.995 * target - PRV_ALLOWANCE < cost <= 1.005 * target
    budget = Budget(epsilon=target, delta=1e-5)
    plan = make_plan(budget, size=48_000, batch_size=4_000, epochs=epochs)
    assert 0.98 * noise < plan.noise_multiplier <= 1.005 * noise
    assert rdp(1 / 12, rdp_noise, 12 * epochs) == pytest.approx(target, rel=0.01)


# specs/synthesis.md B1: what the published teachers cost, by PRV and by RDP.
@few(
    ("size", "batch", "epochs", "noise", "prv", "renyi"),
    [
        (60_000, 128, 4, 0.8, 0.87, 1.54),
        (60_000, 128, 14, 0.5, 7.99, 9.43),
        (60_000, 50, 30, 1.0, 0.79, 0.95),
        (60_000, 128, 20, 0.5, 9.15, 10.66),
        (50_000, 128, 12, 0.5, 8.17, 9.64),
    ],
)
def test_the_published_teachers_cost_what_the_table_says(size, batch, epochs, noise, prv, renyi):
    plan = make_plan(size=size, batch_size=batch, epochs=epochs, noise_multiplier=noise)
    assert prv - PRV_ALLOWANCE < plan.epsilon(1e-5) < prv + 0.005
    assert rdp(plan.rate, noise, plan.steps) == pytest.approx(renyi, rel=0.01)


# specs/synthesis.md B7: a teacher and one full-data Gaussian release, composed.
@few(
    ("batch", "epochs", "noise", "alone", "with_5", "with_10", "with_20"),
    [
        (128, 4, 0.8, 0.855, 1.100, 0.915, 0.869),
        (50, 30, 1.0, 0.770, 1.091, 0.859, 0.793),
        (128, 14, 0.5, 7.97, 8.03, 7.99, 7.98),
        (128, 20, 0.5, 9.13, 9.18, 9.14, 9.13),
    ],
)
def test_a_teacher_and_its_statistics_compose(
    batch, epochs, noise, alone, with_5, with_10, with_20
):
    plan = make_plan(size=60_000, batch_size=batch, epochs=epochs, noise_multiplier=noise)
    training = Counter({plan.release("teacher", 0).mechanism: plan.steps})
    for release, expected in ((None, alone), (5, with_5), (10, with_10), (20, with_20)):
        statistics = Counter({Mechanism(1.0, release): 1} if release else {})
        assert price(training + statistics, 1e-5) == pytest.approx(expected, rel=0.004)


def test_one_gaussian_release_costs_what_the_table_says():
    for noise, expected in ((5, 0.73), (10, 0.34), (20, 0.16)):
        assert pld(1.0, noise, 1) == pytest.approx(expected, abs=0.006)


def test_a_second_stage_gets_what_the_first_left_of_the_budget():
    spent = [Release(stage="moments", noise_multiplier=10)]
    budget = Budget(epsilon=1, delta=1e-5)
    mnist = make_plan(budget, size=60_000, batch_size=128, epochs=4, spent=spent)
    fashion = make_plan(budget, size=60_000, batch_size=50, epochs=30, spent=spent)
    assert mnist.noise_multiplier == pytest.approx(0.779, rel=0.004)
    # The spec asks for 0.94 here, which costs 0.945: dp-accounting itself agrees with less.
    assert fashion.noise_multiplier == pytest.approx(0.909, rel=0.004)
    direct = PLDAccountant()
    direct.compose(
        SelfComposedDpEvent(
            PoissonSampledDpEvent(fashion.rate, GaussianDpEvent(fashion.noise_multiplier)),
            fashion.steps,
        )
    )
    direct.compose(GaussianDpEvent(10))
    assert direct.get_epsilon(1e-5) == pytest.approx(1, rel=0.001)


# specs/reconstruction_and_audit.md 1.4: rate 1/2, delta = size^-1.1.
HEADS = {
    (10, 64): {1.82: 5, 1.23: 10, 0.85: 20, 0.60: 40, 0.435: 80},
    (40, 100): {5.21: 2, 2.75: 5, 1.75: 10, 1.15: 20, 0.79: 40},
    (10, 96): {1.48: 10, 1.02: 20, 0.714: 40, 0.514: 80, 0.374: 160},
    (40, 156): {2.15: 10, 1.41: 20, 0.953: 40, 0.666: 80, 0.477: 160},
}


@few(
    ("size", "steps", "noise", "expected"),
    [(*key, noise, value) for key, row in HEADS.items() for noise, value in row.items()],
)
def test_the_twenty_epsilons_of_the_private_heads_hold(size, steps, noise, expected):
    assert pld(0.5, noise, steps, size**-1.1) == pytest.approx(expected, rel=0.011)


def test_replacing_an_example_costs_more_than_adding_one():
    assert pld(0.5, 1.82, 64, 10**-1.1, "replace") == pytest.approx(14.1, rel=0.005)
    assert pld(1.0, 2.0, 1, 1e-5, "replace") == pytest.approx(pld(1.0, 1.0, 1), rel=1e-3)


def test_a_gaussian_release_costs_what_its_closed_form_says():
    # Balle and Wang 2018, theorem 8, inverted by bisection with nothing of ours in it.
    def delta_of(eps: float, noise: float) -> float:
        def cdf(x):
            return 0.5 * math.erfc(-x / math.sqrt(2))

        return cdf(0.5 / noise - eps * noise) - math.exp(eps) * cdf(-0.5 / noise - eps * noise)

    for noise in (0.7, 2.0, 9.0):
        low, high = 0.0, 50.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if delta_of(middle, noise) > 1e-5 else (low, middle)
        assert high <= pld(1.0, noise, 1) <= high + 2e-3


def test_the_order_and_grouping_of_events_does_not_matter():
    small = [Release(stage="a", step=i, rate=0.01, noise_multiplier=0.8) for i in range(40)]
    large = [Release(stage="b", step=i, noise_multiplier=12.0) for i in range(3)]
    mixed = [*small[:7], *large, *small[7:]]
    assert epsilon(small + large, 1e-5) == epsilon(mixed, 1e-5) == epsilon(mixed[::-1], 1e-5)


def test_the_rdp_bound_is_above_the_pld_bound():
    for rate, noise, steps in ((0.01, 0.9, 300), (0.1, 2.0, 100), (1.0, 8.0, 5)):
        assert pld(rate, noise, steps) < rdp(rate, noise, steps)


def test_no_events_cost_nothing_and_an_exact_one_costs_everything():
    exact = Release(stage="statistics", noise_multiplier=0.0)
    noisy = Release(stage="training", noise_multiplier=3.0)
    assert epsilon([], 1e-5) == 0
    assert epsilon([noisy, exact], 1e-5) == math.inf
    assert epsilon([noisy, exact], 1e-5, accountant="rdp") == math.inf


def test_a_truncated_batch_costs_more_and_a_loose_limit_almost_nothing():
    def cost(max_batch):
        release = Release(stage="a", rate=0.1, noise_multiplier=1.5, max_batch=max_batch, size=1000)
        return price(Counter({release.mechanism: 20}), 1e-5)

    free = pld(0.1, 1.5, 20)
    assert free * 0.999 < cost(200) < free * 1.02
    assert cost(110) > free


@pytest.mark.parametrize(
    ("target", "relation", "plan"),
    [
        (1, "add-or-remove", {"size": 4_000, "batch_size": 400, "epochs": 10}),
        (8, "add-or-remove", {"size": 50_000, "batch_size": 4096, "epochs": 100}),
        (2, "replace", {"size": 4_000, "batch_size": 400, "epochs": 10}),
    ],
)
def test_calibration_uses_the_budget_and_not_more(target, relation, plan):
    found = make_plan(Budget(epsilon=target, delta=1e-5), relation=relation, **plan)
    cost = pld(found.rate, found.noise_multiplier, found.steps, relation=relation)
    assert 0.998 * target < cost <= target


@pytest.mark.parametrize("relation", ["add-or-remove", "replace"])
def test_the_steps_that_a_budget_allows_fit_and_one_more_does_not(relation):
    budget = Budget(epsilon=2, delta=1e-5)
    kind = Plan(noise_multiplier=1.0, rate=0.02, expected_batch=1000, relation=relation)
    steps = steps_within(budget, kind)
    fits, more = (pld(0.02, 1.0, n, relation=relation) for n in (steps, steps + 1))
    assert fits <= 2 < more


def test_a_spent_budget_is_refused_and_not_searched_for_ever():
    spent = [Release(stage="before", noise_multiplier=1.0)]
    with pytest.raises(ConfigError, match="already spent"):
        make_plan(Budget(epsilon=2, delta=1e-5), size=1000, spent=spent)


def test_what_cannot_be_priced_is_refused_quickly():
    for rate, noise, steps in ((0.02, 0.001, 10), (0.02, 1.0, 10**9)):
        with pytest.raises(ConfigError, match="cannot be priced"):
            pld(rate, noise, steps)


def test_little_noise_is_priced_with_wider_cells():
    assert 300 < pld(0.02, 0.05, 150) < 40_000
    assert make_plan(Budget(epsilon=1e6, delta=1e-5), size=50_000, batch_size=1000, epochs=3)


def test_many_steps_on_all_of_the_data_cost_what_one_with_less_noise_does_and_no_more_memory():
    assert pld(1.0, 100.0, 10_000) == pytest.approx(pld(1.0, 1.0, 1), abs=1e-3)
    # For a loss of variance v, epsilon is v/2 + 4.26 sqrt(v) where the other term vanishes.
    for noise, steps in ((0.4, 1000), (1.0, 50_000)):
        variance = steps / noise**2
        least = variance / 2 + 4.26 * variance**0.5
        assert least < pld(1.0, noise, steps) < 1.001 * least


@pytest.mark.parametrize("delta", [1e-12, 0.0, 1.0, -1e-5, float("nan")])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_delta_that_rounding_would_drown_is_refused(delta, accountant):
    with pytest.raises(ConfigError, match="must lie between 1e-10 and 1"):
        price(Counter({Mechanism(0.01, 1.0): 10}), delta, accountant=accountant)


@pytest.mark.parametrize("steps", [1, 1000, 30_000])
def test_the_least_delta_is_still_priced_from_above(steps):
    # So many Gaussian releases of all of the data are one with noise 1.
    found = price(Counter({Mechanism(1.0, math.sqrt(steps)): steps}), LEAST_DELTA)
    left = norm.cdf(0.5 - found) - math.exp(found + norm.logcdf(-0.5 - found))
    assert left <= LEAST_DELTA
    assert found == pytest.approx(6.547924, abs=1e-5)


def test_a_cross_check_that_fails_leaves_logging_as_it_was(monkeypatch):
    from absl import logging
    from dp_accounting.rdp import RdpAccountant

    def fail(*_):
        raise ArithmeticError

    before = logging.get_verbosity()
    monkeypatch.setattr(RdpAccountant, "get_epsilon", fail)
    with pytest.raises(ArithmeticError):
        rdp(0.1, 1.0, 10)
    assert logging.get_verbosity() == before
