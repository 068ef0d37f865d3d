"""Measures of quality against slow and obvious ones, closed forms, and the laws they guarantee."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from sfumato.errors import ConfigError, DataError
from sfumato.metrics.quality import (
    BLOCK,
    Quality,
    compare,
    density_coverage,
    frechet_distance,
    kernel_distance,
    nearest_distances,
    precision_recall,
)


def gaussian(rows, width, seed, shift=0.0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return shift + scale * torch.randn(rows, width, dtype=torch.float64, generator=generator)


def standardised(rows, width, seed):
    """Rows whose mean is 0 and whose covariance is the identity, not only on average."""
    x = gaussian(rows, width, seed)
    x = x - x.mean(dim=0)
    return torch.linalg.qr(x).Q * math.sqrt(rows - 1)


def grid(rows, seed):
    """Points of a small grid: doubles and equal distances everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (rows, 2), generator=generator).float()


@pytest.mark.parametrize(("rows", "width"), [(40, 1), (40, 6), (5, 9), (2, 3)])
def test_the_frechet_distance_is_that_of_matrix_square_roots(rows, width):
    a, b = gaussian(rows, width, 0), gaussian(rows + 3, width, 1, shift=0.4, scale=1.7)
    b[:, 0] += b[:, -1]
    first, second = (np.atleast_2d(np.cov(x.T.numpy())) for x in (a, b))
    # Schur's method fails on singular matrices, so they are lifted by next to nothing.
    root = sqrtm(first @ second + 1e-14 * np.eye(width)).real
    gap = (a.mean(0) - b.mean(0)).square().sum()
    wanted = float(gap) + np.trace(first + second - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(wanted, rel=1e-5)


def test_gaussians_of_known_mean_and_scale_have_the_distance_of_the_formula():
    a, b = standardised(50, 7, 0), standardised(90, 7, 1)
    mean = torch.linspace(-1, 2, 7, dtype=torch.float64)
    wanted = float(mean.square().sum()) + 7 * (1 - 2.5) ** 2
    assert frechet_distance(a, mean + 2.5 * b) == pytest.approx(wanted, rel=1e-12)
    assert frechet_distance(a.float(), (mean + 2.5 * b).float()) == pytest.approx(wanted, rel=1e-6)


def test_tables_that_span_different_directions_share_no_spread():
    a, b = torch.zeros(9, 4), torch.zeros(9, 4)
    a[:, :2], b[:, 2:] = gaussian(9, 2, 0).float(), gaussian(9, 2, 1).float()
    a, b = a - a.mean(0), b - b.mean(0)
    assert frechet_distance(a, b) == pytest.approx(float(a.var(0).sum() + b.var(0).sum()), rel=1e-6)


def test_the_frechet_distance_is_symmetric_and_nought_for_a_table_and_itself():
    for rows in (4, 60):  # fewer rows than features, and more
        a, b = gaussian(rows, 12, 0), gaussian(rows, 12, 1, shift=1)
        assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-6)
        assert 0 <= frechet_distance(a, a.flip(0)) < 1e-6


def slow_discrepancy(x, y):
    def kernel(u, v):
        return (sum(p * q for p, q in zip(u, v, strict=True)) / len(u) + 1) ** 3

    x, y, n = x.tolist(), y.tolist(), len(x)
    pairs = [(i, j) for i in range(n) for j in range(n)]
    total = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in pairs if i != j) / (n * (n - 1))
    return total - 2 * sum(kernel(x[i], y[j]) for i, j in pairs) / n**2


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_distance_and_its_error_come_from_two_subsets_by_a_double_loop(seed):
    a, b = gaussian(6, 3, 10), gaussian(7, 3, 11, shift=0.5)
    mean, error = kernel_distance(a, b, subsets=2, seed=seed)
    values = [  # of all subsets there are, with half as many rows as the smaller table
        slow_discrepancy(a[list(rows)], b[list(others)])
        for rows in itertools.combinations(range(6), 3)
        for others in itertools.combinations(range(7), 3)
    ]
    two = np.array(list(itertools.combinations(values, 2)))
    # Half the difference squared, times two, is their variance; 1 / 2 + 3 / (6 - 3) its factor.
    errors = np.sqrt((two[:, 0] - two[:, 1]) ** 2 / 2 * 1.5)
    assert (np.isclose(two.mean(1), mean, rtol=1e-9) & np.isclose(errors, error, rtol=1e-9)).any()


def test_the_kernel_distance_of_many_subsets_is_that_of_all_rows():
    a, b = gaussian(24, 3, 0), gaussian(24, 3, 1, shift=0.6)
    mean, _ = kernel_distance(a, b, subset=8, subsets=6000)
    assert mean == pytest.approx(slow_discrepancy(a, b), rel=0.04)


def test_two_halves_of_one_gaussian_are_nought_apart_within_the_error():
    for seed in range(5):
        both = gaussian(600, 10, seed)
        mean, error = kernel_distance(both[:300], both[300:], subset=100)
        assert abs(mean) < 3 * error
        far, far_error = kernel_distance(both[:300], both[300:] + 0.5, subset=100)
        assert far > 5 * far_error


def test_the_error_is_what_the_distance_varies_by_and_not_the_spread_of_subsets_alone():
    # Fresh tables each time. Subsets of 60 out of 120 overlap by half: their spread over the root
    # of their number would be a fifth of the truth.
    found = np.array(
        [
            kernel_distance(gaussian(120, 6, 2 * i), gaussian(120, 6, 2 * i + 1, shift=0.8), seed=i)
            for i in range(150)
        ]
    )
    said, true = np.sqrt((found[:, 1] ** 2).mean()), found[:, 0].std()
    assert 0.8 < said / true < 1.25


def test_the_same_seed_draws_the_same_subsets():
    a, b = gaussian(50, 4, 0), gaussian(50, 4, 1)
    assert kernel_distance(a, b, seed=3) == kernel_distance(a, b, seed=3)
    assert kernel_distance(a, b, seed=3) != kernel_distance(a, b, seed=4)


def slow_balls(points, centres, k):
    """Which point lies in which ball, by sorted distances; equal means equal to a millionth."""
    inside = torch.zeros(len(points), len(centres), dtype=torch.bool)
    for j, centre in enumerate(centres):
        others = [math.dist(centre, other) for i, other in enumerate(centres) if i != j]
        radius = sorted(others)[k - 1]
        for i, point in enumerate(points):
            inside[i, j] = math.dist(point, centre) <= radius + 1e-6
    return inside


TABLES = {
    "apart": (gaussian(40, 3, 0), gaussian(31, 3, 1, shift=0.8)),
    "grid with doubles and ties": (grid(40, 0), grid(25, 1)),
    "far from the origin": (1e7 + grid(30, 2), 1e7 + grid(30, 3)),
    "one point many times": (torch.ones(9, 2), torch.ones(8, 2)),
}


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("name", TABLES)
def test_shares_of_balls_are_those_of_a_double_loop(name, k):
    real, made = TABLES[name]
    around_real = slow_balls(made.tolist(), real.tolist(), k)
    around_made = slow_balls(real.tolist(), made.tolist(), k)
    shares = [float(inside.any(dim=1).double().mean()) for inside in (around_real, around_made)]
    assert precision_recall(real, made, k) == pytest.approx(shares)
    density = float(around_real.sum()) / (k * len(made))
    coverage = float(around_real.any(dim=0).double().mean())
    assert density_coverage(real, made, k) == pytest.approx((density, coverage))


@settings(max_examples=40, deadline=None)
@given(st.integers(6, 30), st.integers(0, 10**6), st.booleans())
def test_a_table_against_itself_has_all_shares_at_one(rows, seed, doubles):
    table = grid(rows, seed) if doubles else gaussian(rows, 5, seed)
    again = table[torch.randperm(rows, generator=torch.Generator().manual_seed(seed))]
    assert precision_recall(table, again) == (1, 1)
    density, coverage = density_coverage(table, again)
    assert coverage == 1
    assert density >= 1.2 if doubles else density == pytest.approx(1.2)


def test_tables_of_one_source_have_a_density_of_about_one():
    density, coverage = density_coverage(gaussian(1500, 4, 0), gaussian(1500, 4, 1))
    assert density == pytest.approx(1, abs=0.05)
    # Naeem et al. 2020, with as many rows in both: a ball is missed by all with chance 2^-k.
    assert coverage == pytest.approx(1 - 2**-5, abs=0.02)


def test_copies_of_one_real_image_are_precise_but_cover_little():
    real = gaussian(200, 4, 0)
    middle = int((real - real.mean(0)).norm(dim=1).argmin())
    made = real[middle].repeat(50, 1)
    assert precision_recall(real, made) == (1, 1 / 200)
    density, coverage = density_coverage(real, made)
    balls = int(slow_balls(made[:1].tolist(), real.tolist(), 5).sum())
    assert balls > 5  # the middle of a heap has many neighbours
    assert (density, coverage) == (balls / 5, balls / 200)


def test_precision_and_recall_swap_with_the_tables_and_tables_apart_have_none():
    real, made = gaussian(60, 3, 0), gaussian(40, 3, 1, shift=0.7)
    assert precision_recall(real, made) == precision_recall(made, real)[::-1]
    assert precision_recall(real, made + 100) == (0, 0)
    assert density_coverage(real, made + 100) == (0, 0)


def test_blocks_change_nothing():
    real, made = gaussian(BLOCK + 40, 2, 0), gaussian(2 * BLOCK + 1, 2, 1, shift=0.3)
    radii = torch.cdist(real, real).fill_diagonal_(math.inf).sort(dim=1).values[:, 4]
    inside = torch.cdist(made, real) <= radii
    wanted = float(inside.sum()) / (5 * len(made)), float(inside.any(dim=0).double().mean())
    assert density_coverage(real, made) == pytest.approx(wanted)


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_nearest_distances_are_those_of_all_pairs(block):
    of, among = gaussian(23, 5, 0), gaussian(31, 5, 1)
    gaps = (of[:, None] - among).square().mean(dim=2).sqrt()
    torch.testing.assert_close(nearest_distances(of, among, block=block), gaps.amin(dim=1))
    own = (of[:, None] - of).square().mean(dim=2).sqrt().fill_diagonal_(math.inf).amin(dim=1)
    torch.testing.assert_close(nearest_distances(of, of, itself=True, block=block), own)


def test_a_copy_is_at_exactly_nought_and_a_double_counts_as_another_row():
    table = 255 * torch.rand(30, 64, generator=torch.Generator().manual_seed(0))
    assert nearest_distances(table[:7], table).tolist() == [0] * 7
    assert bool((nearest_distances(table, table, itself=True) > 0).all())
    twice = torch.cat([table, table[:1]])
    nearest = nearest_distances(twice, twice, itself=True)
    assert (nearest == 0).nonzero().flatten().tolist() == [0, 30]


def test_one_level_of_every_pixel_is_a_distance_of_one_far_from_the_origin_too():
    table = 1e6 + 50 * torch.arange(20.0)[:, None].expand(20, 9)
    assert nearest_distances(table + 1, table).tolist() == pytest.approx([1] * 20)


def test_compare_puts_each_number_under_its_name():
    real, made = gaussian(60, 4, 0).float(), gaussian(50, 4, 1, shift=0.9).float()
    kernel, error = kernel_distance(real, made)
    precision, recall = precision_recall(real, made)
    density, coverage = density_coverage(real, made)
    assert len({precision, recall, density, coverage}) == 4
    assert compare(real, made) == Quality(
        real_count=60,
        made_count=50,
        frechet=frechet_distance(real, made),
        kernel=kernel,
        kernel_error=error,
        precision=precision,
        recall=recall,
        density=density,
        coverage=coverage,
        nearest=float(nearest_distances(made, real).median()),
        nearest_usual=float(nearest_distances(real, real, itself=True).median()),
    )


@pytest.mark.parametrize(
    "measure",
    [frechet_distance, kernel_distance, precision_recall, density_coverage, nearest_distances],
)
def test_unequal_widths_empty_tables_and_broken_features_are_refused(measure):
    a = gaussian(20, 3, 0)
    with pytest.raises(ConfigError, match=r"20 x 3, \w+ is 20 x 4: give features of the same"):
        measure(a, gaussian(20, 4, 0))
    with pytest.raises(ConfigError, match=r"is 0 x 3.*Give more images"):
        measure(a, a[:0])
    with pytest.raises(DataError, match="not finite: leave out those rows"):
        measure(a, a.where(a < a.max(), torch.nan))


@pytest.mark.parametrize(
    ("attempt", "match"),
    [
        (lambda a: frechet_distance(a, a[:1]), "covariance needs 2 rows or more. Give more"),
        (lambda a: kernel_distance(a[:3], a), "subsets needs 4 rows or more. Give more"),
        (lambda a: kernel_distance(a, a, subset=1), "subset=1 .* must both be 2 or more"),
        (lambda a: kernel_distance(a, a, subsets=1), "subsets=1 must both be 2 or more"),
        (lambda a: precision_recall(a, a[:3], k=3), "between 1 and 2: .*more images or another k"),
        (lambda a: density_coverage(a, a, k=8), "k=8 must lie between 1 and 7"),
        (lambda a: density_coverage(a, a, k=0), "k=0 must lie between 1 and 7"),
        (lambda a: nearest_distances(a[:1], a[:1], itself=True), "needs 2 rows or more"),
        (lambda a: nearest_distances(a, a[1:], itself=True), "give one table twice, or leave"),
    ],
)
def test_too_few_rows_say_what_to_do(attempt, match):
    with pytest.raises(ConfigError, match=match):
        attempt(gaussian(8, 3, 0))


def test_fewest_rows_that_are_allowed_work():
    a = gaussian(4, 3, 0)
    assert frechet_distance(a[:2], a[2:]) > 0
    assert math.isfinite(kernel_distance(a, a + 1)[1])
    assert precision_recall(a, a, k=3) == (1, 1)
    assert density_coverage(a, a[:1], k=3)[1] > 0
    assert len(nearest_distances(a, a[:1])) == 4
