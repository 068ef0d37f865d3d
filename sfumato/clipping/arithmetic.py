"""Sums over examples, in float32 at least.

`sum_from_above` rounds up, and `rounding_of_sums` bounds the rounding error of the others.

Norms and clipped sums, whatever layer they come from, end in these few functions: squares along an
example's gradient, and sums over examples of factor times gradient.
"""

from math import isqrt

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 1024
"""Numbers whose squares are added one after the other."""
PIECE = 256
"""Products that are added one after the other, at least: fewer take more time."""


def sum_type(tensor: Tensor) -> torch.dtype:
    """The type sums and norms are taken in: float32, or float64 for those who compute in it."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def to_sum_type(tensor: Tensor) -> Tensor:
    """The tensor in that type."""
    return tensor.to(sum_type(tensor))


def square_norm(gradient: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Squared norms of per-example gradients that are there, without another copy of them."""
    if gradient.ndim == 1:  # of a parameter that is a single number
        return to_sum_type(gradient).square()
    return sum_of_squares(to_sum_type(gradient).permute(memory_order(gradient)).flatten(1))


def sum_of_squares(rows: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
    """Along the last axis, in blocks: on a CPU one long float32 sum of 10^7 numbers loses 1e-3."""
    size = rows.shape[-1]
    if size <= BLOCK:
        return torch.linalg.vector_norm(rows, dim=-1).square()
    count = size // BLOCK
    blocks = rows[..., : count * BLOCK].unflatten(-1, (count, BLOCK))
    total = torch.linalg.vector_norm(blocks, dim=-1).square().sum(dim=-1)
    return total + torch.linalg.vector_norm(rows[..., count * BLOCK :], dim=-1).square()


def rounding_of_sums(depth: int, tensor: Tensor) -> float:
    """How far a sum of `column_products` may be from the truth, as a part of the two lengths.

    A sum of k numbers, in whatever order, is wrong by at most k times the unit roundoff of the sum
    of their sizes (Higham 2002, section 3.1). Tensor cores cut off where others round: twice that.
    """
    unit = torch.finfo(sum_type(tensor)).eps / (1 if tensor.is_cuda else 2)
    piece = _piece(depth)
    return unit * (min(piece, depth) + -(-depth // piece) + 2)


def column_products(columns: Float[Tensor, "*n d t"]) -> Float[Tensor, "*n t t"]:
    """Products of all pairs of columns, added up in pieces along the depth.

    In one go the sum of 10^5 products loses more than what is left where gradients cancel.
    """
    pieces = columns.split(_piece(columns.shape[-2]), dim=-2)
    total = pieces[0].mT @ pieces[0]
    for piece in pieces[1:]:
        total += piece.mT @ piece
    return total


def _piece(depth: int) -> int:
    return max(PIECE, isqrt(depth))


def dot(rows: Float[Tensor, "n p d"], vectors: Float[Tensor, "p d"]) -> Float[Tensor, "n p"]:
    """The products of rows with one vector each, added up in pieces too."""
    piece = _piece(rows.shape[-1])
    pairs = zip(rows.split(piece, dim=-1), vectors.split(piece, dim=-1), strict=True)
    parts = [torch.einsum("npd,pd->np", row, vector) for row, vector in pairs]
    return torch.stack(parts).sum(dim=0)


def sum_from_above(products: Tensor) -> Float[Tensor, " n"]:
    """The sum for each example, never below that of these very products by rounding.

    They can cancel almost entirely. The rounding error of a sum is a small part of the absolute
    sum, so that much is added: an example may be clipped a little more, never less.
    """
    flat = products.flatten(1)
    rounding = 8 * torch.finfo(products.dtype).eps
    absolute = torch.linalg.vector_norm(flat, ord=1, dim=1)
    return flat.sum(dim=1).clamp(min=0) + rounding * absolute


def weighted_sum(gradient: Float[Tensor, "n ..."], factors: Float[Tensor, " n"]) -> Tensor:
    """The sum over examples of factor times gradient."""
    order = memory_order(gradient)
    rows = gradient.permute(order)
    total = (factors @ rows.reshape(len(factors), -1)).reshape(rows.shape[1:])
    return total.permute([order.index(axis) - 1 for axis in range(1, gradient.ndim)])


def zero_broken_rows(tensor: Tensor, broken: Tensor | None) -> Tensor:
    """The tensor with the rows of broken examples set to zero."""
    if broken is None:
        return tensor
    return tensor.masked_fill(by_row(broken, tensor), 0.0)


def by_row(each: Tensor, rows: Tensor) -> Tensor:
    """One number an example, shaped to meet the rows: an example may have several."""
    per_row = each.repeat_interleave(len(rows) // max(1, len(each)), dim=0)
    return per_row.reshape(-1, *[1] * (rows.ndim - 1))


def memory_order(gradient: Float[Tensor, "n ..."]) -> list[int]:
    """The axes in the order they lie in memory, examples first: flattened so, nothing is copied."""
    steps = gradient.stride()
    return [0, *sorted(range(1, gradient.ndim), key=lambda axis: -steps[axis])]
