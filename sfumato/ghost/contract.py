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

from sfumato.ghost import on_gpu
from sfumato.ghost.geometry import Geometry

A = Float[Tensor, "n g d t"]
B = Float[Tensor, "n g p t"]

CHUNK = 1 << 24
"""Numbers of per-example gradients that may exist at once when only their norm is wanted."""

BLOCK = 1024
"""Numbers whose squares are added one after the other."""

COLUMNS = 1 << 17
"""Numbers in one example's columns beyond which a CPU's cache does not hold them."""


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The layer's output."""
    if geometry.is_linear:
        return F.linear(x, weight, bias)
    return torch.ops.aten.convolution(x, weight, bias, *geometry)


def packed(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The input in this type and, on a GPU whose weights are so, with channels last."""
    last = torch.channels_last
    strict = weight.is_contiguous(memory_format=last) and not weight.is_contiguous()
    order = last if x.is_cuda and x.ndim == 4 and strict else torch.preserve_format
    return x.to(dtype, memory_format=order)


def output_shape(x: Tensor, weight: Tensor, geometry: Geometry) -> tuple[int, ...]:
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


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the input, as the ordinary backward pass computes it."""
    if geometry.is_linear:
        return g @ weight
    mask = [True, False, False]
    return torch.ops.aten.convolution_backward(g, x, weight, None, *geometry, mask)[0]


def weighted_gradient(
    x: Tensor, g: Tensor, factors: Float[Tensor, " n"], weight: Tensor, geometry: Geometry
) -> Tensor:
    """The sum over examples of factor times gradient of the weight: one ordinary product."""
    if on_gpu.takes(x, geometry):
        return on_gpu.weighted_gradient(x, g, factors, weight, geometry)
    x, g = _float32(x), _float32(g)
    # The factors go to the smaller of the two, which is the cheaper copy.
    if x.numel() < g.numel():
        x = x * _by_row(factors, x)
    else:
        g = g * _by_row(factors, g)
    if geometry.is_linear:
        return g.flatten(0, -2).mT @ x.flatten(0, -2)
    mask = [False, True, False]
    return torch.ops.aten.convolution_backward(g, x, _float32(weight), None, *geometry, mask)[1]


def columns(x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry, examples: int) -> tuple[A, B]:
    """The pair (a, b) whose product b a' is the per-example gradient, laid out like the weight.

    Rows that belong to one example (windows, views) stand next to each other and become positions
    of that example.
    """
    if geometry.is_linear:
        a = x.reshape(examples, 1, -1, x.shape[-1]).mT
        return _float32(a), _float32(g.reshape(examples, 1, -1, g.shape[-1]).mT)
    if geometry.transposed:
        # The adjoint of a convolution: input and output gradient change places.
        x, g = g, x
    a = _unfold(_float32(x), weight.shape[2:], geometry, g.shape[2:])
    b = _float32(g).flatten(2).unflatten(1, (geometry.groups, -1))
    return _fold(a, examples), _fold(b, examples)


def gradients(
    x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry, examples: int
) -> Float[Tensor, "n ..."]:
    """The per-example gradients themselves, in the shape of the weight."""
    if on_gpu.takes(x, geometry):
        return on_gpu.gradients(x, g, weight, geometry, examples)
    if _as_groups(x, g, weight, geometry, examples):
        # One example with the channels of all, in as many groups: no columns are laid out.
        wide = (1, -1)
        kernels = weight.expand(examples, *weight.shape).flatten(0, 1)
        settings = geometry._replace(groups=examples)
        pair = (_float32(t).reshape(*wide, *t.shape[2:]) for t in (g, x))
        mask = [False, True, False]
        found = torch.ops.aten.convolution_backward(*pair, kernels, None, *settings, mask)[1]
    else:
        found = per_example_gradient(*columns(x, g, weight, geometry, examples))
    return found.reshape(examples, *weight.shape)


def per_example_gradient(a: A, b: B) -> Float[Tensor, "n g p d"]:
    """The gradients as products of columns."""
    return b @ a.mT


def instantiated_norm(
    x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry, examples: int
) -> Float[Tensor, " n"]:
    """Squared norms from gradients that are formed a few examples at a time and dropped."""
    size = max(1, CHUNK // max(1, weight.numel()))
    norms = []
    for first in range(0, examples, size):
        count = min(size, examples - first)
        some_x, some_g = (t.unflatten(0, (examples, -1))[first : first + count] for t in (x, g))
        some_x, some_g = some_x.flatten(0, 1), some_g.flatten(0, 1)
        norms.append(square_norm(gradients(some_x, some_g, weight, geometry, count)))
    return torch.cat(norms) if norms else g.new_zeros(0, dtype=sum_type(g))


def square_norm(gradient: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Squared norms of per-example gradients that are there, without another copy of them."""
    return sum_of_squares(_float32(gradient).permute(memory_order(gradient)).flatten(1))


def weighted_sum(gradient: Float[Tensor, "n ..."], factors: Float[Tensor, " n"]) -> Tensor:
    """The sum over examples of factor times gradient."""
    order = memory_order(gradient)
    rows = gradient.permute(order)
    total = (factors @ rows.reshape(len(factors), -1)).reshape(rows.shape[1:])
    return total.permute([order.index(axis) - 1 for axis in range(1, gradient.ndim)])


def memory_order(gradient: Float[Tensor, "n ..."]) -> list[int]:
    """The axes in the order they lie in memory, examples first: flattened so, nothing is copied."""
    steps = gradient.stride()
    return [0, *sorted(range(1, gradient.ndim), key=lambda axis: -steps[axis])]


def standardised_norm(
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
    along_h = torch.einsum("npd,pd->np", v, h) / v.shape[2]
    whole = torch.linalg.vector_norm(v, dim=2).square()
    squares = whole - v.shape[2] * (along_1.square() + 2 * along_h.square())
    squares = squares + along_h.square() * h.square().sum(dim=1)
    # The difference of large numbers: never below what rounding could hide.
    floor = 8 * torch.finfo(v.dtype).eps * whole
    return ((squares.clamp(min=0) + floor) / ((variance[:, 0] + eps) * v.shape[2])).sum(dim=1)


def standardised_scale(weight: Tensor, eps: float) -> Float[Tensor, " p"]:
    """What standardising multiplies each row of a weight by."""
    rows = weight.flatten(1).double()
    scale = torch.rsqrt((rows.var(dim=1, correction=0) + eps) * rows.shape[1])
    return scale.to(weight.dtype)


def lookup_norm(ids: Tensor, g: Tensor, examples: int) -> Float[Tensor, " n"]:
    """Squared norms for rows of a table: positions with the same row add up; -1 is no row."""
    ids = ids.reshape(examples, -1)
    g = _float32(g).reshape(examples, ids.shape[1], -1)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    return sum_from_above((g @ g.mT) * same)


def lookup_gradient(ids: Tensor, g: Tensor, shape: tuple[int, ...], examples: int) -> Tensor:
    """The per-example gradients of a table, in full."""
    ids = ids.reshape(examples, -1)
    g = torch.where((ids >= 0)[..., None], _float32(g).reshape(*ids.shape, -1), 0.0)
    table = g.new_zeros(examples, *shape)
    places = ids.clamp(min=0)[..., None].expand_as(g)
    return table.scatter_add(1, places, g)


def weighted_lookup(ids: Tensor, g: Tensor, factors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The sum of factor times gradient of a table."""
    flat_ids = ids.flatten()
    scaled = (_float32(g) * _by_row(factors, g)).reshape(len(flat_ids), -1)
    scaled = torch.where((flat_ids >= 0)[:, None], scaled, 0.0)
    return scaled.new_zeros(shape).index_add(0, flat_ids.clamp(min=0), scaled)


def without(tensor: Tensor, broken: Tensor | None) -> Tensor:
    """The tensor with the rows of broken examples set to zero."""
    if broken is None:
        return tensor
    rows = broken.repeat_interleave(tensor.shape[0] // len(broken), dim=0)
    return tensor.masked_fill(rows.reshape(-1, *[1] * (tensor.ndim - 1)), 0.0)


def _unfold(
    x: Tensor, kernel: tuple[int, ...], geometry: Geometry, sizes: tuple[int, ...]
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
    x = x.contiguous()
    steps = x.stride()[2:]
    windows = x.as_strided(
        (rows, channels, *kernel, *sizes),
        (
            *x.stride()[:2],
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            *(step * s for step, s in zip(steps, stride, strict=True)),
        ),
    )
    inputs = channels // geometry.groups * prod(kernel)
    return windows.reshape(rows, geometry.groups, inputs, prod(sizes))


def sum_of_squares(rows: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
    """Along the last axis, in blocks: on a CPU one long float32 sum of 10^7 numbers loses 1e-3."""
    size = rows.shape[-1]
    if size <= BLOCK:
        return torch.linalg.vector_norm(rows, dim=-1).square()
    count = size // BLOCK
    blocks = rows[..., : count * BLOCK].unflatten(-1, (count, BLOCK))
    total = torch.linalg.vector_norm(blocks, dim=-1).square().sum(dim=-1)
    return total + torch.linalg.vector_norm(rows[..., count * BLOCK :], dim=-1).square()


def _as_groups(x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry, examples: int) -> bool:
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


def sum_from_above(products: Tensor) -> Float[Tensor, " n"]:
    """The sum for each example, never below the truth by rounding.

    Gram products can cancel almost entirely. Their rounding error is a small part of their absolute
    sum, so that much is added: an example may be clipped a little more, never less.
    """
    flat = products.flatten(1)
    rounding = 8 * torch.finfo(products.dtype).eps
    absolute = torch.linalg.vector_norm(flat, ord=1, dim=1)
    return flat.sum(dim=1).clamp(min=0) + rounding * absolute


def _fold(rows: Tensor, examples: int) -> Tensor:
    """Rows of one example side by side along the positions."""
    if len(rows) == examples:
        return rows
    return rows.unflatten(0, (examples, -1)).movedim(1, -2).flatten(-2)


def _by_row(factors: Tensor, g: Tensor) -> Tensor:
    """One factor an example, shaped to multiply the rows of `g`."""
    per_row = factors.repeat_interleave(g.shape[0] // max(1, len(factors)), dim=0)
    return per_row.reshape(-1, *[1] * (g.ndim - 1))


def sum_type(tensor: Tensor) -> torch.dtype:
    """The type sums and norms are taken in: float32, or float64 for those who compute in it."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _float32(tensor: Tensor) -> Tensor:
    return tensor.to(sum_type(tensor))
