import math

import numpy as np
import torch
from scipy import stats

from sfumato.privacy.budget import Plan
from sfumato.privacy.secure import (
    _unit_interval,
    add_secure_noise,
    chacha20,
    gaussian_words,
    grid_noise,
)

PLAN = Plan(noise_multiplier=0.8, max_norm=3.0, expected_batch=1)
GRID, _ = grid_noise(PLAN, 1)


def noisy(total, plan=PLAN):
    return add_secure_noise(total, plan, bytes(32), total.numel())


def test_the_stream_is_chacha20_as_the_standard_prints_it():
    # RFC 8439, 2.3.2: key 00..1f, block counter 1, nonce 000000090000004a00000000.
    nonce = (1).to_bytes(4, "little") + bytes.fromhex("000000090000004a00000000")
    expected = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert bytes(chacha20(bytes(range(32)), 64, nonce)) == expected


def test_the_words_are_normal_far_into_the_tails():
    drawn = gaussian_words(bytes(32), 400_000, 1.0).numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert stats.kstest(drawn, "norm", (0, 1.01)).pvalue < 1e-3
    for limit in (2, 3, 4):
        expected = 2 * stats.norm.sf(limit)
        assert (
            stats.binomtest(int((np.abs(drawn) > limit).sum()), len(drawn), expected).pvalue > 1e-3
        )
    assert np.abs(drawn).max() < 7


def test_no_word_repeats():
    words = np.frombuffer(bytes(chacha20(bytes(32), 8 * 200_000)), dtype="<u8")
    assert len(np.unique(words)) == len(words)


def test_every_output_lies_on_a_grid_that_does_not_depend_on_the_sum():
    total = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for scale in (1e-9, 1.0, 1e3):
        steps = noisy(scale * total) / GRID
        assert torch.equal(steps, steps.round())


def test_the_far_tails_have_no_gaps():
    # Uniform numbers near 0 must keep their digits: at 8 deviations neighbouring values are close.
    for coarse in (1, 5, 1000):
        words = torch.tensor([[coarse, i << 40] for i in range(1000)], dtype=torch.int64)
        uniform = words[:, 0].double() + _unit_interval(words[:, 1])
        values = torch.special.ndtri(uniform * 2.0**-64)
        assert values.max() < -7.9
        assert float(values.diff().abs().max()) < 0.1 * GRID / PLAN.noise_deviation


def test_rounding_to_the_grid_is_paid_for():
    # The worst case by construction: every coordinate of two neighbours rounds apart by a step.
    dimension = 10_000
    plan = Plan(noise_multiplier=40.0, max_norm=3.0, expected_batch=1)
    grid, deviation = grid_noise(plan, dimension)
    one = torch.full((dimension,), 0.5 * grid - 1e-12, dtype=torch.float64)
    other = one + 2e-12 + plan.max_norm / math.sqrt(dimension)
    moved = ((one / grid).round() - (other / grid).round()).norm() * grid
    assert plan.max_norm < float(moved) <= deviation / plan.noise_multiplier


def test_the_noise_on_the_grid_has_the_stated_deviation():
    drawn = noisy(torch.zeros(100_000, dtype=torch.float64)).numpy()
    _, deviation = grid_noise(PLAN, len(drawn))
    assert deviation > PLAN.noise_deviation
    assert stats.kstest(drawn, "norm", (0, deviation)).pvalue > 1e-3


def test_empty_tensors_are_legal():
    assert noisy(torch.zeros(0)).shape == (0,)
