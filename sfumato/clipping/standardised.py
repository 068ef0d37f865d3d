"""Norms for a parameter whose rows are standardised before they are used (Qiao et al. 2019).

The layer multiplies by rows with mean 0 and a fixed length. In each of them the parameter's
gradient is that of the standardised row, scaled, without its parts along 1 and along the row
itself. So its norm follows from a few sums, whichever of the two ways that of the row is had.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.clipping import gpu_kernels, grams, layer_algebra
from sfumato.clipping.arithmetic import dot, memory_order, rounding_of_sums, sum_type, to_sum_type
from sfumato.clipping.geometry import WeightGeometry


def standardised_square_norm(
    gradient: Float[Tensor, "n ..."], weight: Tensor, eps: float
) -> Float[Tensor, " n"]:
    """Squared norms for a weight w from gradients v of its standardised rows.

    A row is h = (w - mean) / s, over sqrt(D), with s the deviation. What reaches w is v without its
    parts along 1 and along h (which are orthogonal), over s sqrt(D): three sums say how long it is.
    """
    order = memory_order(gradient)
    v = gradient.permute(order).flatten(2)
    rows = weight.detach().permute([axis - 1 for axis in order[1:]]).flatten(1).double()
    variance, mean = torch.var_mean(rows, dim=1, keepdim=True, correction=0)
    h = ((rows - mean) * torch.rsqrt(variance + eps)).to(v.dtype)
    variance = variance.to(v.dtype)
    along_1 = v.mean(dim=2)
    along_h = dot(v, h) / v.shape[2]
    whole = torch.linalg.vector_norm(v, dim=2).square()
    squares = whole - v.shape[2] * (along_1.square() + 2 * along_h.square())
    squares = squares + along_h.square() * h.square().sum(dim=1)
    # The difference of large numbers: never below what rounding could hide.
    floor = (8 * torch.finfo(v.dtype).eps + 2 * rounding_of_sums(v.shape[2], v)) * whole
    return ((squares.clamp(min=0) + floor) / ((variance[:, 0] + eps) * v.shape[2])).sum(dim=1)


def standardised_ghost_norm(
    x: Tensor,
    g: Tensor,
    y: Tensor,
    scale: Float[Tensor, " p"],
    weight: Tensor,
    bias: Tensor | None,
    geometry: WeightGeometry,
    examples: int,
) -> Float[Tensor, "2 n"]:
    """Squared norms, as of `grams.ghost_norm`, where the weight is the parameter standardised.

    Row r of the parameter's gradient is that of the weight, times `scale`, without its parts along
    1 and along the weight w_r. The products with them are sums over positions: of b_r with the sum
    of the columns, and of b_r with the layer's own output y, from which the bias is taken.
    """
    rounding, rounded = gpu_kernels.rounding(x), is_rounded(y)
    x, g, y, weight = (to_sum_type(t) for t in (x, g, y, weight))
    size = weight[0].numel()
    g = g * scale.reshape(-1, *[1] * (g.ndim - 2))
    found = grams.gram_norms(x, g, weight, geometry, examples)
    if rounded:
        # What a rounded output says of the part to be removed may be too much: remove nothing.
        return grams.with_room(found, rounding)
    ones = torch.ones_like(weight[:1, :1], dtype=torch.float64)
    sums = layer_algebra.apply(
        x.sum(dim=1, keepdim=True, dtype=torch.float64), ones, None, geometry
    ).to(g.dtype)
    along_1 = _per_example((g * sums).flatten(2).sum(dim=2), examples)
    along_w = (g * y).flatten(2).sum(dim=2)
    unsure = torch.zeros_like(along_w)
    if bias is not None:
        along_w = along_w - bias * g.flatten(2).sum(dim=2)
        # An output is rounded by a part of its bias too, which may be larger than all the rest.
        unsure = torch.finfo(g.dtype).eps * bias.abs() * g.abs().flatten(2).sum(dim=2)
    along_w, unsure = _per_example(along_w, examples), _per_example(unsure, examples)
    length = weight.flatten(1).square().sum(dim=1)
    lost = along_1.square() / size + along_w.square() * (2 - length)
    # The difference of large numbers: never below what rounding could hide. The output is a long
    # sum itself, in any order, and squares are wrong by twice as much.
    eps = torch.finfo(g.dtype).eps
    unsure = (2 * along_w.abs() * unsure + unsure.square()).sum(dim=1)
    left = (found.squares - lost.sum(dim=1)).clamp(min=0) + 8 * eps * found.squares + unsure
    doubt = found.doubt + eps * size
    return grams.with_room(grams.GramNorms(left, found.lengths, doubt), rounding)


def scale_of_rows(weight: Tensor, eps: float) -> Float[Tensor, " p"]:
    """What standardising multiplies each row of a weight by."""
    rows = weight.flatten(1).double()
    scale = torch.rsqrt((rows.var(dim=1, correction=0) + eps) * rows.shape[1])
    return scale.to(weight.dtype)


def is_rounded(y: Tensor) -> bool:
    """Whether a product kept fewer bits than the sums that are taken of it."""
    return gpu_kernels.rounding(y) > 0 or y.dtype != sum_type(y)


def _per_example(rows: Tensor, examples: int) -> Tensor:
    return rows.reshape(examples, -1, rows.shape[1]).sum(dim=1)
