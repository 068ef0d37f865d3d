import torch
from hypothesis import given
from hypothesis import strategies as st

from sfumato.privacy.moments import clip_rows, sum_by_group


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.integers(0, 9), st.integers(1, 9))
def test_no_clipped_row_is_longer_than_the_bound(seed, max_norm, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(rows, columns, generator=generator) * 10 ** (seed % 7 - 3)
    clipped = clip_rows(vectors, max_norm)
    assert (clipped.norm(dim=1) <= max_norm).all()
    short = vectors.double().norm(dim=1) < 0.999 * max_norm
    assert torch.equal(clipped[short], vectors.double()[short])


def test_broken_and_empty_rows_become_zeros():
    rows = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [3.0, 4.0]])
    assert clip_rows(rows, 1.0).round(decimals=6).tolist() == [[0, 0], [0, 0], [0, 0], [0.6, 0.8]]


def test_one_example_more_moves_the_table_by_at_most_the_bound():
    vectors, groups = torch.randn(30, 5) * 4, torch.arange(30) % 3
    whole = sum_by_group(vectors, groups, 3, 2.0)
    for i in range(30):
        keep = torch.arange(30) != i
        moved = whole - sum_by_group(vectors[keep], groups[keep], 3, 2.0)
        assert moved.norm() <= 2.0 + 1e-9
