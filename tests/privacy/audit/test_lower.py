"""Lower bounds on epsilon: the published values, and coverage by simulation."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from sfumato.errors import ConfigError, DataError
from sfumato.privacy.audit.lower import (
    binomial_interval,
    guess_sizes,
    guesses_bound,
    many_run_bound,
    one_run_bound,
)


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.1, 0.5, 0.97, 1.0])
def test_the_binomial_interval_covers(rate):
    hits = np.random.default_rng(0).binomial(60, rate, size=20_000)
    low, high = binomial_interval(hits, 60, 0.9)
    # One in 20 may miss on each side; 0.005 is three deviations of 20,000 simulations.
    assert np.mean(low > rate) <= 0.055
    assert np.mean(high < rate) <= 0.055
    assert (low <= hits / 60).all()
    assert (high >= hits / 60).all()


def test_the_binomial_interval_is_the_published_one():
    assert np.allclose(binomial_interval(0, 1_000_000, 0.9)[1], 3.0e-6, rtol=0.01)
    assert np.allclose(binomial_interval(8, 10, 0.95), (0.4439, 0.9748), atol=1e-4)


def randomised_response(epsilon, trials, seed):
    """Scores 0 or 1 whose likelihood ratio is e^epsilon: the mechanism that reaches its epsilon."""
    generator = np.random.default_rng(seed)
    honest = math.exp(epsilon) / (1 + math.exp(epsilon))
    inside = (generator.random(trials) < honest).astype(float)
    outside = (generator.random(trials) > honest).astype(float)
    return inside, outside


def proved(inside, outside, **options):
    return many_run_bound(inside, outside, **{"delta": 0.0, **options}).epsilon


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_what_many_runs_prove_is_rarely_above_the_truth(epsilon):
    found = [
        proved(*randomised_response(epsilon, 400, seed), confidence=0.8) for seed in range(150)
    ]
    # One in 5 may be too large; 0.1 is three deviations of 150 simulations.
    assert np.mean(np.array(found) > epsilon) <= 0.2 + 0.1
    assert min(found) >= 0


def test_choosing_among_many_thresholds_proves_nothing_where_nothing_leaks():
    generator = np.random.default_rng(0)
    found = [proved(*generator.normal(size=(2, 200)), confidence=0.8) for _ in range(150)]
    assert np.mean(np.array(found) > 0) <= 0.2 + 0.1


def test_enough_trials_prove_nearly_all_of_epsilon():
    found = proved(*randomised_response(2.0, 200_000, 0))
    assert 1.9 < found <= 2.0
    # What delta may explain is not held against the mechanism.
    assert proved(*randomised_response(2.0, 200_000, 0), delta=0.3) < found - 0.3


def test_misses_prove_as_much_as_hits():
    # One trial without in ten has a low score, and none with: only misses tell the two apart.
    generator = np.random.default_rng(0)
    inside, outside = np.zeros(4000), -(generator.random(4000) < 0.1).astype(float)
    assert 3 < proved(inside, outside) < math.log(0.1 * 2000 / 3)


def rare_hits(seed):
    """One trial with in 500 is a perfect guess; all others look alike."""
    generator = np.random.default_rng(seed)
    inside, outside = -generator.random((2, 200_000))
    inside[generator.random(len(inside)) < 0.002] = 1
    return inside, outside


def test_a_rare_hit_that_never_happens_by_chance_is_found():
    # 200 of 100,000 hits in the second half against none: 2.5 % limits .00173 and .000037. Where a
    # threshold that was best on the first half is not on the second, less is proved.
    found = [proved(*rare_hits(seed)) for seed in range(9)]
    assert np.median(found) > 3.6
    assert max(found) < math.log(0.002 / 0.000037)


def test_few_trials_that_are_plain_to_tell_apart_prove_all_that_so_few_can():
    # 15 hits of 15 and none of 15 in the second half; limits of 2.5 % on each side.
    most = math.log(0.025 ** (1 / 15) / (1 - 0.025 ** (1 / 15)))
    for seed in range(20):
        inside, outside = np.random.default_rng(seed).normal(size=(2, 30))
        assert proved(inside + 10, outside) == pytest.approx(most)


@pytest.mark.parametrize("scores", [[math.inf, -math.inf], [1.0, -math.inf], [1e308, -1e308]])
def test_infinite_and_huge_scores_have_thresholds_between_them(scores):
    inside, outside = (np.full(30, score) for score in scores)
    assert proved(inside, outside) > 1.2


def test_the_two_lists_may_differ_in_length():
    inside, outside = randomised_response(2.0, 4000, 0)
    assert 1 < proved(inside, outside[:1500]) < 2


def test_what_proves_nothing_gives_zero():
    assert proved(np.ones(1), np.zeros(1)) == 0
    assert proved([], []) == 0
    assert proved(np.zeros(500), np.zeros(500)) == 0
    assert proved(np.zeros(500), np.ones(500)) == 0


def test_guesses_that_are_all_right_prove_the_published_epsilon():
    for guesses, epsilon in {10: 1.05, 40: 2.55, 100: 3.49, 1000: 5.81, 10_000: 8.11}.items():
        found = guesses_bound(guesses, guesses, guesses, 0.0, 0.95)
        assert found == pytest.approx(epsilon, abs=0.006)
        # A delta far below one in the canaries takes next to nothing away, and only away.
        assert found - 0.05 < guesses_bound(guesses, guesses, guesses, 1e-9, 0.95) <= found


def direct_chance(right, guesses, canaries, delta, epsilon):
    """The theorem's probability, term by term."""
    rate = 1 / (1 + math.exp(-epsilon))
    weights = [
        math.comb(guesses, v) * rate**v * (1 - rate) ** (guesses - v) for v in range(guesses + 1)
    ]

    def reach(v):
        return sum(weights[max(v, 0) :])

    gaps = [(reach(right - i) - reach(right)) / i for i in range(1, canaries + 1)]
    return reach(right) + 2 * canaries * delta * max(gaps)


@pytest.mark.parametrize(("right", "guesses", "delta"), [(38, 40, 1e-3), (30, 40, 1e-4), (9, 9, 0)])
def test_the_bound_is_where_the_theorem_reaches_the_level(right, guesses, delta):
    found = guesses_bound(right, guesses, 60, delta, 0.95)
    assert direct_chance(right, guesses, 60, delta, found - 1e-6) < 0.05
    assert direct_chance(right, guesses, 60, delta, found + 2e-4) >= 0.05
    # And below it everything is rejected too: there is one crossing.
    grid = [direct_chance(right, guesses, 60, delta, e) for e in np.linspace(0, found, 50)]
    assert (np.diff(grid) >= 0).all()


def coins_and_responses(epsilon, canaries, seed):
    """One run of randomised response on all canaries, which the theorem is tight for."""
    generator = np.random.default_rng(seed)
    included = generator.random(canaries) < 0.5
    honest = generator.random(canaries) < 1 / (1 + math.exp(-epsilon))
    return (included == honest).astype(float), included


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_what_one_run_proves_is_rarely_above_the_truth(epsilon, delta):
    found = [
        one_run_bound(*coins_and_responses(epsilon, 300, seed), delta=delta).epsilon
        for seed in range(200)
    ]
    # One in 20 may be too large; 0.046 is three deviations of 200 simulations.
    assert np.mean(np.array(found) > epsilon) <= 0.05 + 0.046
    assert min(found) >= 0


@pytest.mark.parametrize("mu", [0.5, 1.5])
def test_one_run_of_the_gaussian_mechanism_never_proves_more_than_it_costs(mu):
    # A mechanism of this mu is (5 mu, delta)-private for the delta of its trade-off curve.
    epsilon = 5 * mu
    delta = float(norm.cdf(-5 + mu / 2) - math.exp(epsilon) * norm.cdf(-5 - mu / 2))
    found = []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        included = generator.random(500) < 0.5
        scores = mu * included + generator.normal(size=500)
        found.append(one_run_bound(scores, included, delta=delta).epsilon)
    assert np.mean(np.array(found) > epsilon) <= 0.05
    assert max(found) > 0


def test_trying_many_numbers_of_guesses_costs_little_and_pays():
    # One canary in eight is plain to see, of the others nothing: few guesses prove the most.
    generator = np.random.default_rng(0)
    included = generator.random(4000) < 0.5
    scores = generator.normal(size=4000)
    scores[:500] = np.where(included[:500], 10.0, -10.0)
    found = one_run_bound(scores, included, delta=0.0)
    assert 3.8 < found.epsilon < guesses_bound(500, 500, 4000, 0.0, 0.95)
    assert f"{len(guess_sizes(4000))} numbers of guesses" in found.thresholds
    everybody = int((included == (scores > np.median(scores))).sum())
    assert guesses_bound(everybody, 4000, 4000, 0.0, 0.95) < 0.5


def test_enough_canaries_prove_most_of_epsilon_in_one_run():
    assert 1.8 < one_run_bound(*coins_and_responses(2.0, 20_000, 0), delta=0.0).epsilon <= 2.0
    assert one_run_bound(*coins_and_responses(2.0, 20_000, 0), delta=1e-2).epsilon < 1.5


def test_equal_scores_prove_nothing_however_the_canaries_are_listed():
    included = np.arange(1000) < 500
    for coins in (included, ~included):
        assert one_run_bound(np.zeros(1000), coins, delta=0.0).epsilon < 0.2


def test_no_canaries_and_few_prove_nothing():
    none = np.zeros(0, dtype=bool)
    assert one_run_bound([], none, delta=0.0).epsilon == 0
    assert one_run_bound([1.0], np.array([True]), delta=0.0).epsilon == 0
    assert one_run_bound([1.0, 0.0], np.array([True, False]), delta=0.0).epsilon == 0
    wrong = np.arange(100) < 50
    assert one_run_bound(np.arange(100.0), wrong, delta=0.0).epsilon == 0


def test_bad_scores_coins_and_levels_are_refused():
    good = np.zeros(4)
    with pytest.raises(ConfigError, match="level=95"):
        binomial_interval(1, 3, 95)
    with pytest.raises(ConfigError, match="between 0 and trials=3"):
        binomial_interval(4, 3)
    with pytest.raises(ConfigError, match="delta=1"):
        many_run_bound(good, good, delta=1.0)
    with pytest.raises(ConfigError, match="confidence=95"):
        many_run_bound(good, good, delta=0.0, confidence=95)
    with pytest.raises(DataError, match="none may be NaN"):
        many_run_bound(good, [math.nan, 1.0], delta=0.0)
    with pytest.raises(DataError, match="one coin that is true or false"):
        one_run_bound(good, np.array([True]), delta=0.0)
    with pytest.raises(ConfigError, match="5 right of 4 guesses"):
        guesses_bound(5, 4, 10, 0.0, 0.95)
