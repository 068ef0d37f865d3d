"""Sums of clipped vectors: the simplest thing that `privatize` can release.

A mean image, a histogram, the feature statistics of a network: each is a sum over examples of
vectors whose norm has a bound, and the bound is all that the noise needs to know.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def clip_rows(vectors: Float[Tensor, "n d"], max_norm: float) -> Float[Tensor, "n d"]:
    """Shrink every row whose norm is above `max_norm` to that norm, in float64.

    Guarantee: no row of the result has a norm above `max_norm`. A row of zeros stays; a row with
    NaN or infinity in it becomes zeros, so that one broken example cannot spoil the sum.
    """
    rows = vectors.double()
    norms = rows.norm(dim=1, keepdim=True)
    # 1e-12 outweighs the rounding of the norm itself.
    factors = (max_norm * (1 - 1e-12) / norms).clamp(max=1.0)
    return torch.where(norms.isfinite(), rows * factors.nan_to_num(0.0), 0.0)


def sum_by_group(
    vectors: Float[Tensor, "n d"],
    groups: Int[Tensor, " n"],
    num_groups: int,
    max_norm: float,
) -> Float[Tensor, "groups d"]:
    """The sum of the clipped vectors of each group, in float64.

    Guarantee: adding or removing one example changes the whole table by at most `max_norm`, since
    it stands in one group only. So one release of the table costs what one sum would.
    """
    table = torch.zeros(num_groups, vectors.shape[1], dtype=torch.float64, device=vectors.device)
    return table.index_add(0, groups, clip_rows(vectors, max_norm))


def with_counter(vectors: Float[Tensor, "n d"], weight: float) -> Float[Tensor, "n d+1"]:
    """The vectors with one more coordinate, `weight`, in each: it counts them.

    It is clipped with the rest, so a row that is shrunk to a third counts as a third.
    """
    return torch.cat([vectors, vectors.new_full((len(vectors), 1), weight)], dim=1)


def weighted_means(
    sums: Float[Tensor, "groups d"], weight: float, least: float
) -> Float[Tensor, "groups d-1"]:
    """The mean vector of each group, from sums of vectors that have their counter.

    Each row weighs what clipping left of it, so long rows are outvoted and not cut short. A group
    with hardly anybody in it counts as `least` (in the unit of `sums`): noise on a count may bring
    it below zero.
    """
    return sums[:, :-1] * (weight / sums[:, -1:].clamp(min=weight * least))
