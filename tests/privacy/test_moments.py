import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfumato.privacy.moments import clip_rows, sum_by_group, weighted_means, with_counter


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


def summed(vectors, groups, num_groups, max_norm, weight):
    return sum_by_group(with_counter(vectors, weight), groups, num_groups, max_norm)


def test_rows_that_are_not_clipped_have_their_plain_means():
    vectors, groups = torch.randn(30, 5), torch.arange(30) % 3
    found = weighted_means(summed(vectors, groups, 3, 1e3, 2.0), 2.0, least=1.0)
    for group in range(3):
        torch.testing.assert_close(found[group], vectors[groups == group].double().mean(dim=0))


def test_a_clipped_row_weighs_what_clipping_left_of_it():
    # With its counter the second row has norm 50 and is shrunk to a tenth of itself.
    vectors = torch.tensor([[1.0, 0.0], [0.0, 2499.0**0.5]])
    sums = summed(vectors, torch.zeros(2, dtype=torch.int64), 1, 5.0, 1.0)
    found = weighted_means(sums, 1.0, least=0.1)
    assert float(sums[0, -1]) == pytest.approx(1.1)
    wanted = (vectors[0] + 0.1 * vectors[1]) / 1.1
    torch.testing.assert_close(found[0], wanted.double(), rtol=1e-6, atol=1e-6)


def test_long_rows_are_outvoted_and_not_cut_short():
    # A mean of clipped rows would be pulled to zero; rows that are all alike keep their length.
    vectors = torch.tensor([[30.0, 40.0]]).expand(7, 2)
    sums = summed(vectors, torch.zeros(7, dtype=torch.int64), 1, 1.0, 0.25)
    found = weighted_means(sums, 0.25, least=0.001)
    torch.testing.assert_close(found[0], torch.tensor([30.0, 40.0]).double())


def test_means_do_not_depend_on_what_sums_are_divided_by():
    sums = summed(torch.randn(9, 4), torch.arange(9) % 2, 2, 1.0, 0.25)
    one = weighted_means(sums, 0.25, least=1.0)
    torch.testing.assert_close(one, weighted_means(sums / 9, 0.25, least=1 / 9))


@pytest.mark.parametrize("count", [0.0, -3.0, 1e-9])
def test_a_group_with_nobody_in_it_is_finite_and_counts_as_the_least(count):
    noise = torch.tensor([[0.5, -0.5, count]])
    assert weighted_means(noise, 0.25, least=2.0).tolist() == [[0.25, -0.25]]


def test_an_empty_group_without_noise_has_zeros():
    sums = summed(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64), 2, 1.0, 0.25)
    assert weighted_means(sums, 0.25, least=1.0)[1].tolist() == [0, 0, 0]


def test_a_broken_row_is_not_counted():
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    sums = summed(rows, torch.zeros(3, dtype=torch.int64), 1, 10.0, 1.0)
    torch.testing.assert_close(weighted_means(sums, 1.0, least=0.1)[0], rows[0].double())
