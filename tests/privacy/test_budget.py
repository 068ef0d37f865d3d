import math

import pytest

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.budget import Budget, Plan, check_delta, count_steps, default_delta, make_plan


@pytest.mark.parametrize("epsilon", [0, -1, math.nan])
def test_a_budget_needs_a_positive_epsilon(epsilon):
    with pytest.raises(ConfigError, match="epsilon="):
        Budget(epsilon=epsilon, delta=1e-5)


@pytest.mark.parametrize("delta", [0, 1, -0.1, math.nan])
def test_delta_is_a_probability(delta):
    with pytest.raises(ConfigError, match="delta="):
        Budget(epsilon=1, delta=delta)


def test_a_delta_that_allows_publishing_somebody_is_refused():
    with pytest.raises(ConfigError, match=r"not below 1/50000.*at random"):
        make_plan(Budget(epsilon=1, delta=0.01), size=50_000, batch_size=100, epochs=1)


@pytest.mark.parametrize("size", [2, 10, 1000, 50_000, 10**7])
def test_the_default_delta_always_passes_the_check(size):
    check_delta(default_delta(size), size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "at least one example"),
        ({"size": 100, "batch_size": 101}, "at most 100"),
        ({"size": 100, "batch_size": 0}, "batch_size=0"),
        ({"size": 100, "epochs": 0}, "epochs=0"),
        ({"size": 100, "epochs": 1, "steps": 3}, "give one"),
        ({"size": 100, "steps": 0}, "steps=0"),
        ({"size": 100, "max_norm": 0}, "max_norm=0"),
        ({"size": 100, "max_norm": math.inf}, "max_norm=inf"),
        ({"size": 100, "max_batch": 200}, "max_batch=200"),
    ],
)
def test_impossible_plans_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(noise_multiplier=1.0, **settings)


def test_a_plan_takes_a_budget_or_a_noise_multiplier():
    with pytest.raises(ConfigError, match="either"):
        make_plan(size=10)
    with pytest.raises(ConfigError, match="either"):
        make_plan(Budget(epsilon=1, delta=1e-5), size=10, noise_multiplier=1.0)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_noise_is_finite_and_not_negative(noise):
    with pytest.raises(ConfigError, match="noise_multiplier="):
        make_plan(size=10, noise_multiplier=noise)


def test_an_infinite_budget_plans_no_noise():
    plan = make_plan(Budget(epsilon=math.inf, delta=1e-5), size=10)
    assert plan.noise_multiplier == 0
    assert plan.epsilon(1e-5) == math.inf


def test_epochs_become_steps_without_rounding_errors():
    assert count_steps(60_000, 128, epochs=4) == 1875
    assert count_steps(50_000, 1000, epochs=3) == 150
    assert count_steps(10, 3, epochs=1) == 4
    assert count_steps(10, 3) == 1


def test_a_step_beyond_the_plan_is_refused():
    plan = Plan(noise_multiplier=1, expected_batch=1, steps=3)
    assert plan.release("train", 2).step == 2
    for step in (3, -1):
        with pytest.raises(PrivacyError, match="budget is spent"):
            plan.release("train", step)
