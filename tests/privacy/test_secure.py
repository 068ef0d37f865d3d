import math

import numpy as np
import pytest
import torch
from scipy import stats

from sfumato.privacy.budget import Plan
from sfumato.privacy.secure import (
    chacha20,
    grid_noise,
    normal_deviates,
    normal_pairs,
    to_secure_mean,
)

PLAN = Plan(noise_multiplier=0.8, max_norm=3.0, expected_batch=1)
GRID, _ = grid_noise(PLAN, 1)


def noisy(total, plan=PLAN):
    found = total.clone()
    to_secure_mean(found, plan, bytes(32), total.numel())
    return found


def test_the_stream_is_chacha20_as_the_standard_prints_it():
    # RFC 8439, 2.3.2: key 00..1f, block counter 1, nonce 000000090000004a00000000.
    nonce = (1).to_bytes(4, "little") + bytes.fromhex("000000090000004a00000000")
    expected = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert bytes(chacha20(bytes(range(32)), 64, nonce)) == expected


def test_deviates_are_normal_far_into_the_tails():
    drawn = normal_deviates(bytes(32), 400_000).numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert stats.kstest(drawn, "norm", (0, 1.01)).pvalue < 1e-3
    for limit in (2, 3, 4):
        expected = 2 * stats.norm.sf(limit)
        assert (
            stats.binomtest(int((np.abs(drawn) > limit).sum()), len(drawn), expected).pvalue > 1e-3
        )
    assert np.abs(drawn).max() < 7


def test_deviates_of_a_block_are_independent_and_so_are_their_squares():
    rows = normal_deviates(bytes(32), 8 * 40_000).view(8, -1).numpy()
    for values in (rows, rows**2, np.abs(rows)):
        assert np.abs(np.corrcoef(values) - np.eye(8)).max() < 5 / 200


def test_no_word_repeats():
    words = np.frombuffer(bytes(chacha20(bytes(32), 8 * 200_000)), dtype="<u8")
    assert len(np.unique(words)) == len(words)


def test_every_output_lies_on_a_grid_that_does_not_depend_on_the_sum():
    total = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for scale in (1e-9, 1.0, 1e3):
        steps = noisy(scale * total) / GRID
        assert torch.equal(steps, steps.round())


@pytest.mark.parametrize("zeros", [30, 50, 60])
def test_far_tails_are_those_of_the_normal_distribution(zeros):
    # Words that begin with that many zeros: half the squared length exceeds log(2) for each by an
    # exponential number, and the angle is uniform.
    drawn = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=(20_000, 2))
    drawn[:, 0] = (drawn[:, 0] & (2**63 - 1)) >> (zeros - 1)
    pairs = normal_pairs(torch.from_numpy(drawn)).numpy()
    beyond = (pairs**2).sum(axis=1) / 2 - zeros * math.log(2)
    assert stats.kstest(beyond, "expon").pvalue > 1e-3
    angle = np.arctan2(pairs[:, 1], pairs[:, 0])
    assert stats.kstest(angle, "uniform", (-math.pi, 2 * math.pi)).pvalue > 1e-3
    assert len(np.unique(pairs)) == pairs.size


def test_small_deviates_keep_their_digits():
    # Near 1 a uniform number has steps of 2^-53, and lengths from it would have gaps of 2^-30 here.
    words = torch.tensor([[-(2**63) + (1 << 10), i << 12] for i in range(100)])
    lengths = normal_pairs(words).norm(dim=1)
    expected = math.sqrt(2 * (2**10 + 0.5 * 2**-12) * 2.0**-64)
    torch.testing.assert_close(lengths, torch.full_like(lengths, expected), rtol=1e-14, atol=0)


def test_a_long_stream_is_the_same_in_pieces(monkeypatch):
    whole = normal_deviates(bytes(32), 1001)
    monkeypatch.setattr("sfumato.privacy.secure.PIECE", 7)
    assert torch.equal(normal_deviates(bytes(32), 1001), whole)


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
