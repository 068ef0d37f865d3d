"""Squared norms from Gram matrices, without the gradients being formed.

With a (T x D) the columns of one example's input and b (T x P) its output gradients, the squared
norm of b'a is the sum of (a a') * (b b'), entry by entry. For a convolution an entry of a a' is a
sum over the kernel of products of *pixels*, so the Gram matrix of the raw image, slid along its
diagonals, gives it without columns being laid out (a k x k kernel copies the image k k times).

These few functions are what a kernel may replace.
"""

from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.clipping import gpu_kernels, layer_algebra
from sfumato.clipping.arithmetic import (
    column_products,
    rounding_of_sums,
    sum_from_above,
    sum_of_squares,
    sum_type,
    to_sum_type,
)
from sfumato.clipping.geometry import WeightGeometry

SMALL = 64
"""Positions up to which a product of thin matrices is worth a copy (measured with MKL)."""


def ghost_norm(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> Float[Tensor, "2 n"]:
    """Squared norms of the gradients of a weight, and of all that may be summed in their place.

    Guarantee: the second is never below the truth by rounding. Entries of Gram matrices are rounded
    sums, and where the gradients of positions cancel little else may be left of the first: see
    `Measured.doubt`. Into the sum goes factor times output gradient, which is rounded once more,
    each number by a part u of itself. That moves the gradient by at most u times the sum over
    positions of |a| |b|, so much longer is the second.
    """
    return with_room(gram_norms(x, g, weight, geometry, examples), gpu_kernels.rounding(x))


class GramNorms(NamedTuple):
    """What Gram matrices say of the gradients of each example."""

    squares: Float[Tensor, " n"]
    """The squared norms, as found."""
    lengths: Float[Tensor, " n"]
    """The sums over positions of |a| |b|."""
    doubt: float
    """By this part of the squared lengths a squared norm may be wrong.

    If entries of a a' and b b' are wrong by parts e and f of |a||a| and |b||b|, the sum of their
    products is wrong by at most e + f of the sum of |a||a||b||b|, the squared lengths.
    """


def with_room(found: GramNorms, rounding: float) -> Float[Tensor, "2 n"]:
    """Squared norms, and those of the longest gradient that rounding may have made of them."""
    above = found.squares + found.doubt * found.lengths.square()
    if rounding:
        above = (above.sqrt() + rounding * found.lengths).square()
    return torch.stack([found.squares, above])


def gram_norms(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> GramNorms:
    """Squared norms by kernels where there are some, else from whole Gram matrices."""
    positions = g.numel() // max(1, examples * (g.shape[-1 if geometry.is_linear else 1]))
    # Otherwise the norm is the product of two lengths, and nothing cancels.
    summed = positions > 1 or not gpu_kernels.is_matrix(x, weight, geometry)
    depths = (weight[0].numel(), weight.shape[0])
    if gpu_kernels.supports(x, geometry) and summed:
        squares, lengths = gpu_kernels.kernel_norms(x, g, weight, geometry, examples)
        return GramNorms(squares, lengths, torch.finfo(torch.float32).eps * sum(depths))
    slid = gram_of_rows_is_cheaper(x, g, weight, geometry, examples)
    if geometry.is_linear:
        grams = [_gram_of_rows(t.reshape(examples, -1, t.shape[-1])) for t in (x, g)]
    elif slid:
        grams = [_slid_gram(x, g, weight, geometry), _gram(_by_group(g, geometry))]
    else:
        grams = [_gram(t) for t in layer_algebra.columns(x, g, weight, geometry, examples)]
    products = grams[0].mul_(grams[1])
    lengths = products.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt().flatten(1).sum(dim=1)
    doubt = sum(rounding_of_sums(depth, x) for depth in depths) if summed else 0.0
    if summed and slid:  # shifts along each axis are added one after the other
        doubt += torch.finfo(sum_type(x)).eps * sum(weight.shape[2:])
    return GramNorms(sum_from_above(products), lengths, doubt)


def gram_of_rows_is_cheaper(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> bool:
    """Whether the raw Gram matrix is the cheaper way to that of the columns."""
    if geometry.is_linear or geometry.transposed or x.shape[0] != examples:
        return False
    return gram_depth(x.shape[2:].numel(), g.shape[2:].numel(), weight) < weight[0].numel()


def gram_depth(pixels: int, positions: int, weight: Tensor) -> int:
    """Products for one entry of the Gram matrix of a convolution's columns, the cheaper way."""
    channels, kernel = weight.shape[1], prod(weight.shape[2:])
    if pixels > 2 * positions:
        # A stride: the matrix of all pixels would be far larger than the one it is for.
        return channels * kernel
    return min(channels * pixels**2 // max(1, positions**2), channels * kernel)


def _slid_gram(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry
) -> Float[Tensor, "n g t t"]:
    sides, sizes = x.shape[2:], g.shape[2:]
    gram = _gram(_by_group(x, geometry))
    gram = gram.reshape(*gram.shape[:2], *sides, *sides)
    steps = zip(weight.shape[2:], geometry.stride, geometry.padding, geometry.dilation, strict=True)
    for axis, (kernel, stride, padding, dilation) in enumerate(steps):
        if (kernel, stride, padding) == (1, 1, 0):
            continue
        axes = (2 + axis, 2 + axis + len(sides))
        shifts = [j * dilation - padding for j in range(kernel)]
        gram = _slide(gram, axes, sizes[axis], stride, shifts)
    return gram.reshape(*gram.shape[:2], sizes.numel(), sizes.numel())


def _slide(
    gram: Tensor, axes: tuple[int, int], size: int, stride: int, shifts: list[int]
) -> Tensor:
    """The sum of gram[..., s t + j, ..., s u + j, ...] over shifts j, for t and u up to size."""
    one, other = axes
    side, shape = gram.shape[one], list(gram.shape)
    shape[one] = shape[other] = size
    total = gram.new_zeros(shape)
    for shift in shifts:
        first = max(0, -(shift // stride))
        last = min(size, (side - 1 - shift) // stride + 1)
        if last <= first:
            continue
        start, stop = first * stride + shift, (last - 1) * stride + shift + 1
        part = _cut(_cut(gram, one, start, stop, stride), other, start, stop, stride)
        _cut(_cut(total, one, first, last), other, first, last).add_(part)
    return total


def _cut(tensor: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    return tensor[(slice(None),) * axis + (slice(start, stop, step),)]


def _gram_of_rows(rows: Float[Tensor, "n t d"]) -> Float[Tensor, "n 1 t t"]:
    columns = to_sum_type(rows).mT
    if rows.device.type == "cpu" and rows.shape[1] <= SMALL:
        # Thin products run twice as fast when positions, not inputs, lie side by side.
        columns = columns.contiguous()
    return _gram(columns[:, None])


def _gram(columns: Float[Tensor, "n g d t"]) -> Float[Tensor, "n g t t"]:
    if columns.shape[-1] == 1:
        # Goodfellow 2015. Also because a product of one long row is summed up carelessly on a CPU.
        return sum_of_squares(columns[..., 0])[..., None, None]
    return column_products(columns)


def _by_group(rows: Tensor, geometry: WeightGeometry) -> Tensor:
    return to_sum_type(rows).flatten(2).unflatten(1, (geometry.groups, -1))
