"""Checks of a mechanism, and bounds that believe in its noise, on simulated runs."""

from dataclasses import replace
from itertools import combinations_with_replacement, permutations

import numpy as np
import pytest
from scipy.stats import binom

from sfumato.errors import ConfigError
from sfumato.privacy.audit.checks import (
    QUESTIONS,
    CanaryObservations,
    check_buffers,
    check_mechanism,
)
from sfumato.privacy.audit.lower_noise import curve_bound, likelihood_scores, noise_bound
from sfumato.privacy.budget import make_plan


def sound(seed, steps=40, canaries=300, others=600, rate=0.1, noise=1.0):
    """What canaries see of a mechanism that does what it should."""
    generator = np.random.default_rng(seed)
    included = generator.random(canaries) < 0.5
    present = (generator.random((steps, canaries)) < rate) & included
    return CanaryObservations(
        seen=present + noise * generator.normal(size=(steps, canaries)),
        present=present,
        sizes=present.sum(axis=1) + generator.binomial(others, rate, steps),
        included=included,
        noise=np.full(steps, noise),
        rate=rate,
        others=others,
    )


def failed(seen, **options):
    return {check.name for check in check_mechanism(seen, **options) if check.passed is False}


@pytest.mark.parametrize("sizes", [{}, {"steps": 8, "canaries": 60, "rate": 0.3, "noise": 0.5}])
def test_false_alarms_are_as_rare_as_stated(sizes):
    alarms = alarms_at(200, **sizes)
    # 0.05 are allowed; 0.046 is three deviations of 200 simulations.
    assert alarms(0.95) <= 0.05 + 0.046
    # The error is shared, and not wasted: three p-values are upper bounds, the others exact.
    assert 0.2 < alarms(0.5) <= 0.5 + 0.11


def alarms_at(runs, **sizes):
    """How often one check or more of a sound run fails, at each level of confidence."""
    checks = [check_mechanism(sound(seed, **sizes)) for seed in range(runs)]
    least = np.array([min(check.p_value or 0.0 for check in found) for found in checks])
    return lambda confidence: np.mean(least < (1 - confidence) / len(QUESTIONS))


@pytest.mark.parametrize(
    ("canaries", "steps", "rate"),
    [(2, 5, 0.2), (5, 5, 0.2), (10, 10, 0.1), (8, 12, 0.17), (9, 1, 0.3)],
)
def test_false_alarms_are_rare_where_canaries_and_steps_are_few(canaries, steps, rate):
    alarms = alarms_at(150, steps=steps, canaries=canaries, rate=rate, others=20)
    # 0.053 is three deviations of 150 simulations; at 99.9 % 0.15 of them may fail.
    assert alarms(0.95) <= 0.05 + 0.053
    assert alarms(0.999) <= 1 / 150


@pytest.mark.parametrize("trials", [1, 5, 20])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("name", ["visits", "batch sizes"])
def test_how_often_counts_vary_too_much_or_too_little_is_never_underestimated(name, trials, rate):
    # Every outcome that three counts can have, with its chance: no simulation.
    _, check = QUESTIONS[name]
    chances, p_values = [], []
    for counts in combinations_with_replacement(range(trials + 1), 1 if trials == 20 else 3):
        orders = len(set(permutations(counts)))
        chances.append(orders * binom.pmf(counts, trials, rate).prod())
        p_values.append(check(counted(name, counts, trials, rate))[0])
    assert np.sum(chances) == pytest.approx(1)
    for level in (0.5, 0.05, 0.05 / 8, 0.001 / 8, 0.0001 / 8):
        assert np.sum(np.array(chances)[np.array(p_values) < level]) <= level


def counted(name, counts, trials, rate):
    """A run of which only visits of canaries or sizes of batches are known."""
    present = np.arange(trials)[:, None] < np.array(counts)
    nobody = np.zeros((len(counts), 0), dtype=bool)
    seen = present if name == "visits" else nobody
    return CanaryObservations(
        seen=seen.astype(float), present=seen, sizes=np.array(counts) if seen is nobody else
        np.zeros(trials, dtype=int), included=np.ones(seen.shape[1], dtype=bool),
        noise=np.ones(len(seen)), rate=rate, others=trials,
    )  # fmt: skip


@pytest.mark.parametrize(("steps", "canaries"), [(3, 2), (10, 5), (100, 1)])
def test_noise_is_rarely_called_unsteady_however_few_there_are(steps, canaries):
    _, check = QUESTIONS["steady noise"]
    few = {"steps": steps, "canaries": canaries, "rate": 0.1}
    p_values = np.array([check(sound(seed, **few))[0] for seed in range(600)])
    for level in (0.2, 0.05, 0.05 / 8, 0.001 / 8):
        assert np.sum(p_values < level) <= 600 * level + 3 * (600 * level) ** 0.5


def test_noise_of_nine_tenths_is_too_little_and_of_eleven_tenths_too_much():
    seen = sound(0)
    for factor in (0.9, 1.1):
        values = seen.present + factor * (seen.seen - seen.present)
        assert failed(replace(seen, seen=values)) == {"noise size"}


def test_noise_that_comes_again_is_found_even_in_two_steps_of_forty():
    seen = sound(0)
    values = seen.seen.copy()
    values[33] = seen.present[33] + (values - seen.present)[4]
    assert failed(replace(seen, seen=values)) == {"fresh noise"}


def test_one_noise_for_all_coordinates_is_found():
    seen = sound(0)
    shared = np.random.default_rng(1).normal(size=(40, 1))
    found = failed(replace(seen, seen=seen.present + np.broadcast_to(shared, seen.seen.shape)))
    assert "separate noise" in found


def test_a_divisor_that_follows_the_batch_is_found():
    seen = sound(0, canaries=1000)
    expected = seen.rate * (seen.others + seen.included.sum())
    found = failed(replace(seen, seen=seen.seen * (expected / seen.sizes)[:, None]))
    assert "steady noise" in found


def test_examples_that_add_a_tenth_more_than_the_bound_are_found():
    seen = sound(0, canaries=1000)
    assert failed(replace(seen, seen=seen.seen + 0.1 * seen.present)) == {"contributions"}
    # To add less is allowed.
    assert failed(replace(seen, seen=seen.seen - 0.1 * seen.present)) == set()


def test_a_shuffle_is_told_from_coins():
    seen = sound(0)
    generator = np.random.default_rng(0)
    present = np.zeros((4, 10, 300), dtype=bool)
    for epoch in present:
        epoch[generator.integers(0, 10, 300), np.arange(300)] = True
    present = present.reshape(40, 300) & seen.included
    noise = seen.seen - seen.present
    assert "visits" in failed(replace(seen, present=present, seen=present + noise))
    assert "batch sizes" in failed(replace(seen, sizes=np.full(40, 75)))


def test_canaries_in_more_batches_than_planned_or_in_spite_of_their_coin_are_found():
    seen = sound(0, canaries=1000)
    assert "sampling rate" in failed(replace(seen, rate=0.09))
    visited = seen.present.copy()
    visited[3, np.flatnonzero(~seen.included)[0]] = True
    assert "sampling rate" in failed(replace(seen, present=visited))


def test_full_batches_and_lost_steps_can_be_checked():
    seen = sound(0, rate=1.0)
    assert failed(seen) == set()
    few = seen.present.copy()
    few[0, np.flatnonzero(seen.included)[0]] = False
    assert "visits" in failed(replace(seen, present=few))
    lonely = sound(0, steps=1, canaries=2)
    assert failed(lonely) == set()


def test_batches_of_one_size_and_steps_without_absent_canaries_say_nothing_of_steadiness():
    seen = sound(0)
    _, check = QUESTIONS["steady noise"]
    assert check(replace(seen, sizes=np.full(40, 75)))[0] == 1
    everywhere = np.ones_like(seen.present)
    everywhere[0, 0] = False
    assert check(replace(seen, present=everywhere))[0] == 1


def test_buffers_that_moved_are_named():
    assert check_buffers({"a": "1"}, {"a": "1"}).passed
    moved = check_buffers({"a": "1", "bn.mean": "2"}, {"a": "1", "bn.mean": "3"})
    assert moved.passed is False
    assert "bn.mean" in moved.says
    assert check_buffers({"a": "1"}, {}).passed is False


PLAN = make_plan(noise_multiplier=1.3, size=4000, batch_size=600, steps=20)


WHOLE = make_plan(noise_multiplier=2.9, size=4000, steps=4)
"""Full batches, whose curve is known exactly and at once."""


def observed(seed, factor=1.0, plan=PLAN):
    """A thousand canaries of the plan, with its noise times a factor."""
    seen = sound(seed, plan.steps, 1000, 3000, plan.rate, plan.noise_multiplier * factor)
    return replace(seen, noise=np.full(plan.steps, plan.noise_multiplier))


def both(seen, confidence, plan=PLAN):
    scores = likelihood_scores(seen)
    pair = scores[seen.included], scores[~seen.included]
    curve = curve_bound(*pair, plan, delta=1e-5, confidence=confidence).epsilon
    return curve, noise_bound(seen, plan, delta=1e-5, confidence=confidence).epsilon


def test_bounds_that_believe_in_the_noise_are_rarely_above_the_truth():
    truth = WHOLE.epsilon(1e-5)
    found = np.array([both(observed(seed, plan=WHOLE), 0.8, WHOLE) for seed in range(20)])
    # One in 5 may be too large; 0.27 is three deviations of 20 simulations.
    assert ((found > truth).mean(axis=0) <= 0.2 + 0.27).all()
    assert np.median(found[:, 0]) > 0.7 * truth
    assert np.median(found[:, 1]) > 0.97 * truth


def test_half_of_the_noise_is_proved_to_break_the_guarantee():
    curve, noise = both(observed(0, 0.5), 0.95)
    truth = replace(PLAN, noise_multiplier=PLAN.noise_multiplier / 2).epsilon(1e-5)
    assert PLAN.epsilon(1e-5) < curve < truth
    assert 0.95 * truth < noise < truth


def test_there_is_no_curve_for_noise_that_changes():
    with pytest.raises(ConfigError, match="changes from step to step"):
        curve_bound([1.0], [0.0], replace(PLAN, noise_decay=0.5), delta=1e-5)
    decaying = replace(PLAN, noise_decay=0.5)
    multipliers = np.array([decaying.at(step).noise_multiplier for step in range(20)])
    seen = observed(0)
    values = (
        seen.present + (seen.seen - seen.present) * (multipliers / PLAN.noise_multiplier)[:, None]
    )
    proved = noise_bound(replace(seen, seen=values, noise=multipliers), decaying, delta=1e-5)
    assert 0.95 * decaying.epsilon(1e-5) < proved.epsilon < 1.02 * decaying.epsilon(1e-5)


def test_no_canaries_on_one_side_prove_nothing():
    assert curve_bound([], [1.0], PLAN, delta=1e-5).epsilon == 0
    assert curve_bound([-1.0, -2.0], [1.0, 2.0], PLAN, delta=1e-5).epsilon == 0
