"""What `layer_algebra` and `grams` compute, by kernels: for linear layers and 2-D convolutions.

Inputs and output gradients are read in the type they have, bf16 under autocast: no float32 copies
of activations are made. Norms, per-example gradients and sums over examples are float32.

A layer whose columns are there already is a matrix on them: linear layers, 1 x 1 convolutions and
patches that do not overlap. For those libraries' products are the quickest. Other convolutions have
kernels that read the image where the window lies.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.clipping.geometry import WeightGeometry

Rows = Float[Tensor, "rows t d"]


def has_layer_kernels(x: Tensor) -> bool:
    """Whether kernels take tensors like this one."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16)


def supports(x: Tensor, geometry: WeightGeometry) -> bool:
    """Whether the functions below take such a layer."""
    plane = len(geometry.stride) == 2 and not geometry.transposed
    return has_layer_kernels(x) and (geometry.is_linear or plane)


def rounding(x: Tensor) -> float:
    """The part of itself by which factor times output gradient is rounded before it is summed."""
    if not x.is_cuda or x.dtype == torch.float64:
        return 0.0  # beyond float32, which other margins cover
    if x.dtype == torch.bfloat16:
        return 2.0**-8
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    # Ten bits of both factors: cut off where a norm is taken, cut off or rounded where a sum is.
    return 3 * 2.0**-10 if tf32 else 0.0


def kernel_norms(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> tuple[Tensor, Tensor]:
    """Squared norms of the gradients, and the sums over positions of |a| |b|."""
    if is_matrix(x, weight, geometry):
        from sfumato.clipping.kernels.ghost import ghost_norm_kernel

        pair = (x_rows(x, g, weight, geometry), g_rows(g, geometry))
        squares, lengths = ghost_norm_kernel(*(t.reshape(examples, -1, t.shape[-1]) for t in pair))
    else:
        from sfumato.clipping.kernels.conv_norms import conv_ghost_norm

        squares, lengths = conv_ghost_norm(x, g, *settings(weight, geometry), examples)
    return squares, lengths


def kernel_gradients(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> Float[Tensor, "n ..."]:
    """The per-example gradients, in the shape of the weight."""
    if is_matrix(x, weight, geometry):
        pair = (g_rows(g, geometry), x_rows(x, g, weight, geometry))
        b, a = (t.reshape(examples, -1, t.shape[-1]) for t in pair)
        return _like_weight(_product(torch.bmm, b.mT, a), weight)
    from sfumato.clipping.kernels.convolution import conv_gradients

    return conv_gradients(x, g, *settings(weight, geometry), examples)


def kernel_weighted_gradient(
    x: Tensor, g: Tensor, factors: Float[Tensor, " n"], weight: Tensor, geometry: WeightGeometry
) -> Tensor:
    """The sum over examples of factor times gradient.

    Factor times input or output gradient is taken in the type they have: see `rounding`.
    """
    from sfumato.clipping.kernels.ghost import scaled

    # The factors go to the smaller of the two, which is the cheaper copy.
    if is_matrix(x, weight, geometry):
        a, b = x_rows(x, g, weight, geometry).flatten(0, 1), g_rows(g, geometry).flatten(0, 1)
        a, b = (scaled(a, factors), b) if a.shape[1] < b.shape[1] else (a, scaled(b, factors))
        return _like_weight(_product(torch.mm, b.mT, a)[None], weight)[0]
    from sfumato.clipping.kernels.convolution import conv_total

    a, b = x.movedim(1, -1), g.movedim(1, -1)
    a, b = (scaled(a, factors), b) if a.numel() < b.numel() else (a, scaled(b, factors))
    return conv_total(a.movedim(-1, 1), b.movedim(-1, 1), *settings(weight, geometry))


def is_matrix(x: Tensor, weight: Tensor, geometry: WeightGeometry) -> bool:
    """Whether the layer is a matrix on what is there already, or on a mere rearrangement of it.

    So it is if every pixel is seen once: in patches that do not overlap, or in one that is all.
    """
    if geometry.is_linear:
        return True
    apart = tuple(weight.shape[2:]) in (geometry.stride, tuple(x.shape[2:]))
    near = set(geometry.dilation) == {1} and not any(geometry.padding)
    return apart and near and geometry.groups == 1


def x_rows(x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry) -> Rows:
    """The input of a matrix as rows: for each position the pixels it sees, channels last."""
    if geometry.is_linear:
        return x.reshape(x.shape[0], -1, x.shape[-1])
    kernel, sizes = weight.shape[2:], g.shape[2:]
    x = x.permute(0, 2, 3, 1)
    if prod(kernel) == 1:
        return x.flatten(1, 2)
    (lines, columns), (height, width) = sizes, kernel
    # Not as_strided: inside a compiled graph its strides are not those of the compiler's tensor.
    x = x[:, : lines * height, : columns * width].unflatten(1, (lines, height))
    windows = x.unflatten(3, (columns, width)).transpose(2, 3)
    return windows.reshape(len(x), sizes.numel(), -1)


def g_rows(g: Tensor, geometry: WeightGeometry) -> Rows:
    """The output gradients of each position."""
    if geometry.is_linear:
        return g.reshape(g.shape[0], -1, g.shape[-1])
    return g.permute(0, 2, 3, 1).flatten(1, 2)


def settings(weight: Tensor, geometry: WeightGeometry) -> tuple[Any, ...]:
    """Kernel size, stride, padding, dilation and groups, as kernels take them."""
    return (list(weight.shape[2:]), *(list(sizes) for sizes in geometry[:3]), geometry.groups)


def _like_weight(found: Float[Tensor, "n p d"], weight: Tensor) -> Float[Tensor, "n ..."]:
    """Matrices whose columns are taps and channels, in the order of axes that the weight has."""
    if weight.ndim == 2:
        return found
    return found.reshape(*found.shape[:2], *weight.shape[2:], weight.shape[1]).movedim(-1, 2)


def _product(multiply: Callable[..., Tensor], b: Tensor, a: Tensor) -> Tensor:
    """The product in float32, of numbers in the type they have."""
    if a.dtype == torch.float32:
        return multiply(b, a)
    return multiply(b, a, out_dtype=torch.float32)
