"""The algebra of a linear layer or convolution, example by example.

Legend: n examples, G groups, D inputs of a group (channels times kernel), P outputs of a group,
T positions. Every such layer is, per group, outputs = weight (P x D) times columns (D x T). With
a (n G D T) the columns of the input and b (n G P T) the gradient of the output:

    per-example gradient   b a'                           2 T D P operations, n G P D numbers
    its squared norm       sum of (a'a) * (b'b)           2 T T (D + P) operations, n G T T numbers

These few functions, and the Gram norms in `grams`, are what a kernel may replace; everything else
in this room calls them.
"""

from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sfumato.clipping import gpu_kernels
from sfumato.clipping.arithmetic import by_row, to_sum_type
from sfumato.clipping.geometry import WeightGeometry

A = Float[Tensor, "n g d t"]
B = Float[Tensor, "n g p t"]

COLUMNS = 1 << 17
"""Numbers in one example's columns beyond which a CPU's cache does not hold them."""


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: WeightGeometry) -> Tensor:
    """The layer's output."""
    if geometry.is_linear:
        return F.linear(x, weight, bias)
    return torch.ops.aten.convolution(x, weight, bias, *geometry)


def prepare_input(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The input in this type and, on a GPU whose weights are so, with channels last."""
    last = torch.channels_last
    strict = weight.is_contiguous(memory_format=last) and not weight.is_contiguous()
    order = last if x.is_cuda and x.ndim == 4 and strict else torch.preserve_format
    return x.to(dtype, memory_format=order)


def output_shape(x: Tensor, weight: Tensor, geometry: WeightGeometry) -> tuple[int, ...]:
    """Its shape, without computing it."""
    if geometry.is_linear:
        return (*x.shape[:-1], weight.shape[0])
    kernel = weight.shape[2:]
    stride, padding, dilation, transposed, extra, groups = geometry
    if transposed:
        sizes = [
            (size - 1) * s - 2 * p + d * (k - 1) + e + 1
            for size, k, s, p, d, e in zip(
                x.shape[2:], kernel, stride, padding, dilation, extra, strict=True
            )
        ]
        return (x.shape[0], weight.shape[1] * groups, *sizes)
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    return (x.shape[0], weight.shape[0], *sizes)


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: WeightGeometry) -> Tensor:
    """The gradient of the input, as the ordinary backward pass computes it."""
    if geometry.is_linear:
        return g @ weight
    mask = [True, False, False]
    return torch.ops.aten.convolution_backward(g, x, weight, None, *geometry, mask)[0]


def weighted_gradient(
    x: Tensor, g: Tensor, factors: Float[Tensor, " n"], weight: Tensor, geometry: WeightGeometry
) -> Tensor:
    """The sum over examples of factor times gradient of the weight: one ordinary product."""
    if gpu_kernels.supports(x, geometry):
        return gpu_kernels.kernel_weighted_gradient(x, g, factors, weight, geometry)
    x, g = to_sum_type(x), to_sum_type(g)
    # The factors go to the smaller of the two, which is the cheaper copy.
    if x.numel() < g.numel():
        x = x * by_row(factors, x)
    else:
        g = g * by_row(factors, g)
    if geometry.is_linear:
        return g.flatten(0, -2).mT @ x.flatten(0, -2)
    mask = [False, True, False]
    return torch.ops.aten.convolution_backward(g, x, to_sum_type(weight), None, *geometry, mask)[1]


def columns(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> tuple[A, B]:
    """The pair (a, b) whose product b a' is the per-example gradient, laid out like the weight.

    Rows that belong to one example (windows, views) stand next to each other and become positions
    of that example.
    """
    if geometry.is_linear:
        a = x.reshape(examples, 1, -1, x.shape[-1]).mT
        return to_sum_type(a), to_sum_type(g.reshape(examples, 1, -1, g.shape[-1]).mT)
    if geometry.transposed:
        # The adjoint of a convolution: input and output gradient change places.
        x, g = g, x
    a = _unfold(to_sum_type(x), weight.shape[2:], geometry, g.shape[2:])
    b = to_sum_type(g).flatten(2).unflatten(1, (geometry.groups, -1))
    return _fold(a, examples), _fold(b, examples)


def per_example_gradients(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> Float[Tensor, "n ..."]:
    """The per-example gradients themselves, in the shape of the weight."""
    if gpu_kernels.supports(x, geometry):
        return gpu_kernels.kernel_gradients(x, g, weight, geometry, examples)
    if _as_groups(x, g, weight, geometry, examples):
        # One example with the channels of all, in as many groups: no columns are laid out.
        wide = (1, -1)
        kernels = weight.expand(examples, *weight.shape).flatten(0, 1)
        settings = geometry._replace(groups=examples)
        pair = (to_sum_type(t).reshape(*wide, *t.shape[2:]) for t in (g, x))
        mask = [False, True, False]
        found = torch.ops.aten.convolution_backward(*pair, kernels, None, *settings, mask)[1]
    else:
        found = per_example_gradient(*columns(x, g, weight, geometry, examples))
    return found.reshape(examples, *weight.shape)


def per_example_gradient(a: A, b: B) -> Float[Tensor, "n g p d"]:
    """The gradients as products of columns."""
    return b @ a.mT


def _unfold(
    x: Tensor, kernel: tuple[int, ...], geometry: WeightGeometry, sizes: tuple[int, ...]
) -> Tensor:
    """The columns of a convolution in any number of dimensions: rows, G, D, T.

    `sizes` are the positions there are. Padding that a transposed convolution adds to its output
    may leave room for more.
    """
    stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
    if prod(kernel) == prod(stride) == 1 and not any(padding) and x.shape[2:] == sizes:
        return x.flatten(2).unflatten(1, (geometry.groups, -1))
    if any(padding):
        x = F.pad(x, [side for p in reversed(padding) for side in (p, p)])
    rows, channels = x.shape[:2]
    # Not as_strided: inside a compiled graph its strides are not those of the compiler's tensor.
    for axis, size in enumerate(kernel, start=2):
        span, step = dilation[axis - 2] * (size - 1) + 1, stride[axis - 2]
        x = x.unfold(axis, span, step).narrow(axis, 0, sizes[axis - 2])[..., :: dilation[axis - 2]]
    windows = x.permute(0, 1, *range(2 + len(kernel), x.ndim), *range(2, 2 + len(kernel)))
    inputs = channels // geometry.groups * prod(kernel)
    return windows.reshape(rows, geometry.groups, inputs, prod(sizes))


def _as_groups(
    x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry, examples: int
) -> bool:
    """Whether a grouped convolution forms gradients faster: on a CPU, once columns outgrow it."""
    plain = geometry.groups == 1 and not geometry.transposed and x.shape[0] == examples
    size = weight[0].numel() * g.shape[2:].numel()
    return (
        plain
        and not geometry.is_linear
        and x.ndim == 4
        and x.device.type == "cpu"
        and size > COLUMNS
    )


def _fold(rows: Tensor, examples: int) -> Tensor:
    """Rows of one example side by side along the positions."""
    if len(rows) == examples:
        return rows
    return rows.unflatten(0, (examples, -1)).movedim(1, -2).flatten(-2)
