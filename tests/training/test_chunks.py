"""How batches are cut: what is filled up is what was reckoned, and little."""

from collections import Counter

import pytest
import torch

from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import poisson_batches
from sfumato.privacy.session_key import SessionKey
from sfumato.training.chunks import DEAR, ChunkSizes
from sfumato.training.process_group import ProcessGroup

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def planned(expected, size=2000, steps=300):
    return Plan(noise_multiplier=1.0, expected_batch=expected, rate=expected / size, steps=steps)


def cut(plan, length, round_to):
    """The lengths of the chunks of every step, as they are really drawn."""
    secret = SessionKey.from_seed(1)
    header = LedgerHeader(data="noise", delta=1e-5, fixed_seed=True, secret=secret.commitment)
    size = round(plan.expected_batch / plan.rate)
    batches = poisson_batches(
        plan, size, Ledger(header), secret, stage="train", chunk_size=length, round_to=round_to
    )
    return [[len(chunk.mask) for chunk in batch.chunks] for batch in batches]


@pytest.mark.parametrize(("expected", "length"), [(200, 200), (200, 115), (200, 64), (20, 256)])
@pytest.mark.parametrize(("device", "compiled"), [(CPU, False), (GPU, False), (CPU, True)])
def test_rows_are_what_is_really_taken(expected, length, device, compiled):
    plan = planned(expected)
    chunk_sizes = ChunkSizes.of(plan, processes=1, device=device, compiled=compiled)
    lengths = cut(plan, length, chunk_sizes.round_to(length))
    assert chunk_sizes.rows(length) == pytest.approx(
        sum(map(sum, lengths)) / len(lengths), rel=0.03
    )
    kinds = {one for chunks in lengths for one in chunks}
    if compiled:
        assert kinds == {length}
    elif device == GPU:
        assert len(kinds) <= 4


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_those_of_the_busiest_process(processes, compiled):
    plan = planned(300)
    chunk_sizes = ChunkSizes.of(plan, processes=processes, device=CPU, compiled=compiled)
    length = chunk_sizes.length(256)
    shares = [
        max(
            sum(n for _, n in ProcessGroup(rank, processes).share(chunks))
            for rank in range(processes)
        )
        for chunks in cut(plan, length, chunk_sizes.round_to(length))
    ]
    assert sum(shares) / len(shares) == pytest.approx(chunk_sizes.rows(length), rel=0.03)
    assert chunk_sizes.rows(length) < 1.2 * 300 / processes


@pytest.mark.parametrize(("most", "before"), [(256, 1.48), (512, 2.0), (10**6, 2.0)])
def test_little_is_filled_up_where_a_batch_is_about_as_long_as_a_chunk(most, before):
    chunk_sizes = ChunkSizes(256.0, 16.0, shapes=1)
    assert chunk_sizes.rows(min(most, 512)) > before * 256 - 1
    assert chunk_sizes.rows(chunk_sizes.length(most)) < 1.16 * 256


@pytest.mark.parametrize("shapes", [1, 4])
@pytest.mark.parametrize("processes", [1, 2])
def test_no_other_length_takes_less_time(shapes, processes):
    chunk_sizes = ChunkSizes(600.0, 24.0, processes, shapes)
    for most in (1, 7, 100, 512, 5000):
        limit = min(most, chunk_sizes.longest)

        def cost(length, limit=limit):
            chunks = ChunkSizes(600.0, 24.0, 1, 1).rows(length * processes) / (length * processes)
            return chunk_sizes.rows(length) + DEAR * limit * chunks

        found = chunk_sizes.length(most)
        assert limit / 2 <= found <= limit
        assert all(cost(found) <= cost(n) + 1e-9 for n in range((limit + 1) // 2, limit + 1))


def test_where_nothing_is_filled_up_as_many_are_taken_as_fit():
    assert ChunkSizes(600.0, 24.0).length(256) == 256
    assert ChunkSizes(600.0, 24.0).length(10_000) == 10_000


def test_batches_of_known_size_are_cut_evenly():
    plan = Plan(noise_multiplier=1.0, expected_batch=1000, rate=1.0, steps=2)
    chunk_sizes = ChunkSizes.of(plan, processes=1, device=CPU, compiled=True)
    length = chunk_sizes.length(256)
    assert length == 250
    assert Counter(map(tuple, cut(plan, length, chunk_sizes.round_to(length)))) == {(250,) * 4: 2}
    assert chunk_sizes.rows(length) == 1000
