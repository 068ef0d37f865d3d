"""The algebra of a table whose rows are looked up by the batch.

The gradient of example i is zero but for the rows that its ids name: row r gets the output
gradients of all positions that read it. So the output gradient, and the ids, are all there is to
keep. An id of -1 is no row.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.clipping.arithmetic import (
    by_row,
    column_products,
    rounding_of_sums,
    sum_from_above,
    to_sum_type,
)


def table_square_norm(ids: Tensor, g: Tensor, examples: int) -> Float[Tensor, " n"]:
    """Squared norms for rows of a table: positions with the same row add up.

    As in `grams.ghost_norm`, what rounding may hide where they cancel is added.
    """
    ids = ids.reshape(examples, -1)
    g = to_sum_type(g).reshape(examples, ids.shape[1], -1)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    lengths = torch.linalg.vector_norm(g, dim=2)
    doubt = rounding_of_sums(g.shape[2], g) * lengths[:, :, None] * lengths[:, None, :]
    return sum_from_above((column_products(g.mT) + doubt) * same)


def table_gradients(ids: Tensor, g: Tensor, shape: tuple[int, ...], examples: int) -> Tensor:
    """The per-example gradients of a table, in full."""
    ids = ids.reshape(examples, -1)
    g = torch.where((ids >= 0)[..., None], to_sum_type(g).reshape(*ids.shape, -1), 0.0)
    table = g.new_zeros(examples, *shape)
    places = ids.clamp(min=0)[..., None].expand_as(g)
    return table.scatter_add(1, places, g)


def table_weighted_gradient(
    ids: Tensor, g: Tensor, factors: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """The sum of factor times gradient of a table."""
    flat_ids = ids.flatten()
    scaled = (to_sum_type(g) * by_row(factors, g)).reshape(len(flat_ids), -1)
    scaled = torch.where((flat_ids >= 0)[:, None], scaled, 0.0)
    return scaled.new_zeros(shape).index_add(0, flat_ids.clamp(min=0), scaled)
