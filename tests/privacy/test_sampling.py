import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import flip_coins, poisson_batches, poisson_sample
from sfumato.privacy.session_key import SessionKey

BOOK = Ledger(LedgerHeader(data="faces", delta=1e-5))


def plan(rate=0.3, steps=5, **changes):
    return Plan(noise_multiplier=1, expected_batch=10, rate=rate, steps=steps, **changes)


@settings(deadline=None)
@given(
    size=st.integers(0, 60),
    rate=st.floats(0.01, 1.0),
    chunk_size=st.integers(1, 40),
    round_to=st.integers(1, 40) | st.none(),
    seed=st.integers(0, 10),
)
def test_the_same_examples_come_whatever_the_chunk_size(size, rate, chunk_size, round_to, seed):
    secret = SessionKey.from_seed(seed)
    whole = list(poisson_batches(plan(rate), size, BOOK, secret, stage="a"))
    settings = {"stage": "a", "chunk_size": chunk_size, "round_to": round_to}
    parts = list(poisson_batches(plan(rate), size, BOOK, secret, **settings))
    assert [batch.step for batch in parts] == [0, 1, 2, 3, 4]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.indices, other.indices)
        for chunk in other.chunks:
            assert chunk.mask.any()
            assert len(chunk.indices) == len(chunk.mask) <= chunk_size
            length = len(chunk.indices)
            assert length == chunk_size or length % (round_to or chunk_size) == 0
            assert round_to is None or length - int(chunk.mask.sum()) < round_to


def test_starting_late_gives_the_later_batches():
    secret = SessionKey.draw()
    batches = list(poisson_batches(plan(steps=6), 50, BOOK, secret, stage="a"))
    late = list(poisson_batches(plan(steps=6), 50, BOOK, secret, stage="a", start=4))
    assert [batch.step for batch in late] == [4, 5]
    assert all(torch.equal(a.indices, b.indices) for a, b in zip(batches[4:], late, strict=True))


def test_an_empty_batch_is_kept():
    batches = list(
        poisson_batches(
            plan(rate=1e-9, steps=3), 10, BOOK, SessionKey.draw(), stage="a", chunk_size=4
        )
    )
    assert [batch.chunks for batch in batches] == [(), (), ()]
    assert all(len(batch.indices) == 0 for batch in batches)


def test_rate_one_takes_everybody():
    (batch,) = poisson_batches(
        plan(rate=1.0, steps=1), 7, BOOK, SessionKey.draw(), stage="a", chunk_size=3
    )
    assert batch.indices.tolist() == list(range(7))
    assert [chunk.mask.tolist() for chunk in batch.chunks][-1] == [True, False, False]


def test_every_example_joins_with_the_stated_chance():
    # Fails by chance once in 10^4 seeds; the seed is fixed. A rate off by 5 % must be noticed.
    size, rate, steps = 200, 0.07, 2000
    secret = SessionKey.from_seed(1)
    drawn = np.concatenate(
        [poisson_sample(plan(rate), size, secret, ("a", step)) for step in range(steps)]
    )
    assert binomtest(len(drawn), size * steps, rate).pvalue > 1e-4
    assert binomtest(len(drawn), size * steps, rate * 1.05).pvalue < 1e-4
    assert chisquare(np.bincount(drawn, minlength=size)).pvalue > 1e-4


@pytest.mark.parametrize("rate", [0.0011, 1 / 256, 0.0052, 0.997])
def test_coins_that_tie_in_their_first_byte_are_tossed_to_the_end(rate):
    # By chance it fails once in 10^4 seeds. Ties that all fell on one side would shift the rate to
    # a whole number of 256ths; those around it must be noticed, and so must a tenth of a 256th.
    heads = sum(
        len(flip_coins(rate, 10**6, SessionKey.from_seed(seed), ("a",))) for seed in range(2)
    )
    assert binomtest(heads, 2 * 10**6, rate).pvalue > 1e-4
    for wrong in (math.floor(rate * 256) / 256, math.ceil(rate * 256) / 256, rate + 0.1 / 256):
        if wrong != rate:
            assert binomtest(heads, 2 * 10**6, min(wrong, 1)).pvalue < 1e-4


def test_batch_sizes_vary_as_a_binomial_does():
    sizes = [
        len(poisson_sample(plan(0.2), 500, SessionKey.from_seed(2), ("a", step)))
        for step in range(3000)
    ]
    assert np.mean(sizes) == pytest.approx(100, rel=0.01)
    assert np.var(sizes) == pytest.approx(80, rel=0.1)


def test_a_truncated_batch_is_a_uniform_subset():
    limited = plan(0.5, steps=1, max_batch=8, size=40)
    counts = np.zeros(40)
    for step in range(4000):
        chosen = poisson_sample(limited, 40, SessionKey.from_seed(3), ("a", step))
        assert len(chosen) <= 8
        assert set(chosen) <= set(
            poisson_sample(plan(0.5), 40, SessionKey.from_seed(3), ("a", step))
        )
        counts[chosen] += 1
    assert chisquare(counts).pvalue > 1e-4


def test_two_stages_draw_independently():
    secret = SessionKey.from_seed(4)
    both = [
        set(poisson_sample(plan(0.1), 1000, secret, ("a", step)))
        & set(poisson_sample(plan(0.1), 1000, secret, ("b", step)))
        for step in range(200)
    ]
    assert sum(map(len, both)) / 200 == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("apart", ["ledgers", "stages"])
def test_ledgers_and_stages_of_one_secret_draw_independently(apart):
    secret = SessionKey.draw()
    books = [BOOK, Ledger(LedgerHeader(data="faces", delta=1e-5)) if apart == "ledgers" else BOOK]
    one, other = (
        list(poisson_batches(plan(0.5), 500, book, secret, stage=stage))
        for book, stage in zip(books, "aa" if apart == "ledgers" else "ab", strict=True)
    )
    # Half of the examples, and half of those: 125 of 500, give or take ten.
    for a, b in zip(one, other, strict=True):
        assert len(set(a.indices.tolist()) & set(b.indices.tolist())) < 200


def test_a_plan_is_not_used_for_another_data_set():
    with pytest.raises(PrivacyError, match="made for 40"):
        next(poisson_batches(plan(size=40), 4000, BOOK, SessionKey.draw(), stage="a"))


def test_a_chunk_needs_room_for_an_example():
    with pytest.raises(ConfigError, match="at least 1"):
        next(poisson_batches(plan(), 10, BOOK, SessionKey.draw(), stage="a", chunk_size=0))
