"""Searches by price: what is found fits, and was priced itself."""

import math

import pytest

from sfumato.errors import ConfigError
from sfumato.privacy.search import least_noise, most_steps


def test_the_noise_that_is_found_was_priced_itself():
    for target in (0.31, 1.0, 2.7, 8.9):
        noise = least_noise(lambda n: 3.7 / n**1.3, target)
        assert 0.999 * target < 3.7 / noise**1.3 <= target


@pytest.mark.parametrize("target", [0.9, 1e4, 1e20])
def test_noise_that_has_no_price_is_never_found(target):
    noise = least_noise(lambda n: math.inf if n < 3 else 5 / n, target)
    assert noise == pytest.approx(max(3, 5 / target), rel=3e-4)
    assert noise >= 3


@pytest.mark.parametrize("target", [0.9, 1.0, 4.7, 100.0])
def test_the_steps_that_are_found_fit_and_one_more_does_not(target):
    steps = most_steps(math.sqrt, target, 10**6)
    assert math.sqrt(steps) <= target < math.sqrt(steps + 1)


def test_more_steps_than_can_be_priced_are_refused():
    with pytest.raises(ConfigError, match="more than 1000 steps"):
        most_steps(lambda steps: steps / 10**6, 1.0, 1000)
