"""Noise and norm bounds that change from step to step, and what they cost."""

from collections import Counter

import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.privacy.accounting import price
from sfumato.privacy.budget import Budget, Plan, make_plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.noise import privatize
from sfumato.privacy.releases import Release
from sfumato.privacy.session_key import SessionKey

DECAYING = Plan(
    noise_multiplier=2.0, expected_batch=10.0, rate=0.1, steps=80, max_norm=1.0, noise_decay=0.5,
    clip_decay=0.25,
)  # fmt: skip


def test_a_schedule_goes_from_one_to_its_decay_in_eight_stairs():
    noise = [DECAYING.at(step).noise_multiplier for step in range(80)]
    assert (noise[0], noise[-1]) == (2.0, 1.0)
    assert sorted(noise, reverse=True) == noise
    assert sorted(Counter(noise).values()) == [10] * 8
    assert DECAYING.at(79).max_norm == 0.25


def test_the_ledger_prices_the_noise_of_each_step():
    secret = SessionKey.from_seed(0)
    header = LedgerHeader(data="d", delta=1e-5, fixed_seed=True, secret=secret.commitment)
    ledger = Ledger(header)
    for step in range(80):
        privatize({"w": torch.zeros(3)}, DECAYING, ledger, secret, step=step, stage="train")
    wanted = price(Counter(release.mechanism for release in ledger.releases), 1e-5, "add-or-remove")
    assert ledger.epsilon() == pytest.approx(DECAYING.epsilon(1e-5), rel=1e-3)
    assert ledger.epsilon() == pytest.approx(wanted, rel=1e-3)
    constant = Plan(noise_multiplier=2.0, expected_batch=10.0, rate=0.1, steps=80)
    assert ledger.epsilon() > constant.epsilon(1e-5)


@pytest.mark.parametrize("step", [0, 79])
def test_the_noise_that_is_added_is_that_of_the_step(step):
    secret = SessionKey.from_seed(1)
    header = LedgerHeader(data="d", delta=1e-5, fixed_seed=True, secret=secret.commitment)
    sums = {"w": torch.zeros(200_000)}
    released = privatize(sums, DECAYING, Ledger(header), secret, step=step, stage="train")["w"]
    wanted = {0: 2.0, 79: 0.25}[step] / 10
    assert float(released.std()) == pytest.approx(wanted, rel=0.01)


def test_a_budget_is_kept_by_a_schedule_too():
    budget = Budget(epsilon=2.0, delta=1e-5)
    plan = make_plan(budget, size=1000, batch_size=50, steps=60, noise_decay=0.6)
    assert 1.98 < plan.epsilon(1e-5) <= 2.0
    flat = make_plan(budget, size=1000, batch_size=50, steps=60)
    assert plan.at(59).noise_multiplier < flat.noise_multiplier < plan.noise_multiplier


@pytest.mark.parametrize("decay", [0.03, pytest.param(0.015, marks=pytest.mark.full), 0.002])
def test_a_schedule_that_ends_with_little_of_its_noise_begins_with_much(decay):
    budget = Budget(epsilon=8.0, delta=1e-5)
    plan = make_plan(budget, size=1000, batch_size=50, steps=2, noise_decay=decay)
    assert 7.98 < plan.epsilon(1e-5) <= 8.0
    assert 0.3 < plan.at(1).noise_multiplier < 0.5


def test_little_noise_that_was_spent_is_refused_by_its_name():
    spent = [Release(stage="before", rate=0.1, noise_multiplier=0.015)]
    for decay in (1.0, 0.015):
        with pytest.raises(ConfigError, match=r"noise multiplier 0\.015 cannot be priced"):
            make_plan(Budget(epsilon=8, delta=1e-5), size=10, noise_decay=decay, spent=spent)


@pytest.mark.parametrize(("noise", "decay"), [(0.019, 1.0), (1.0, 0.019), (0.019, 2.0)])
def test_noise_that_nobody_can_price_is_refused_when_the_plan_is_made(noise, decay):
    with pytest.raises(ConfigError, match=r"noise_multiplier=0\.019 is too small to be priced"):
        make_plan(size=10, steps=3, noise_multiplier=noise, noise_decay=decay)


def test_an_impossible_schedule_is_refused():
    with pytest.raises(ConfigError, match="noise_decay=0 must lie in"):
        make_plan(size=10, noise_multiplier=1.0, noise_decay=0.0)
