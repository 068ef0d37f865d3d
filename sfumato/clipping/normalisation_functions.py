"""LayerNorm, GroupNorm and frozen BatchNorm with per-example gradients on the way back.

Each has the ordinary output; the dummies `kept_w` and `kept_b` get what scale and shift receive
from each example. On a GPU kernels of our own do it, for GroupNorm where channels come last in
memory; a compiler is shown expressions, which it fuses with their neighbours; all else is torch's
kernels. What is kept for the way back is the input as it came: rounded, if a layer before rounded
it, and widened where it is read.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sfumato.clipping.arithmetic import sum_type

Gradients = tuple[Any, Any, Any]
"""Gradient of the input, and gradients of scale and shift from each row (rows, C)."""

NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""Types of inputs that our kernels know."""

WIDEST = 8192
"""Numbers that LayerNorm normalises together beyond which torch's own kernel does it."""


def output_type(x: Tensor) -> torch.dtype:
    """The type of what comes out: autocast normalises in float32."""
    return sum_type(x) if torch.is_autocast_enabled(x.device.type) else x.dtype


class LayerNormed(torch.autograd.Function):
    """LayerNorm over the last axes, whose shape is `shape`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        kept_w: Any,
        kept_b: Any,
        shape: Any,
        eps: float,
        examples: int,
    ) -> Tensor:
        """The ordinary forward pass."""
        fused = has_kernel(x) and gives_float32(x) and prod(shape) <= WIDEST
        if fused:
            from sfumato.clipping.kernels.layer_norm import layer_norm_forward

            out, mean, rstd = layer_norm_forward(x, weight, bias, prod(shape), eps)
        else:
            wide = x.to(output_type(x))
            out, mean, rstd = torch.native_layer_norm(wide, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.settings = (shape, examples, fused)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and sums over the positions of each example."""
        (g,) = gradients
        x, mean, rstd, weight, bias = ctx.saved_tensors
        shape, examples, fused = ctx.settings
        needs = ctx.needs_input_grad
        grad_x = by_weight = by_bias = None
        if fused:
            from sfumato.clipping.kernels.layer_norm import layer_norm_backward

            grad_x, sums = layer_norm_backward(g, x, mean, rstd, weight, prod(shape), examples)
            by_weight, by_bias = sums.reshape(2, examples, *shape)
            return _answer(needs, grad_x, by_weight, by_bias, 3)
        x, dtype = x.to(g.dtype), x.dtype
        if needs[0]:
            only_x = [True, False, False]
            grad_x = torch.ops.aten.native_layer_norm_backward(
                g, x, shape, mean, rstd, weight, bias, only_x
            )[0].to(dtype)
        if needs[3]:
            # In place: on a CPU another copy costs more than the arithmetic.
            moved = (x - mean).mul_(rstd).mul_(g)
            by_weight = moved.reshape(examples, -1, *shape).sum(dim=1)
        if needs[4]:
            by_bias = g.reshape(examples, -1, *shape).sum(dim=1)
        return _answer(needs, grad_x, by_weight, by_bias, 3)


class GroupNormed(torch.autograd.Function):
    """GroupNorm of maps with any number of axes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        kept_w: Any,
        kept_b: Any,
        groups: int,
        eps: float,
        examples: int,
    ) -> Tensor:
        """The ordinary forward pass."""
        rows, channels = x.shape[:2]
        sizes = (rows, channels, x.shape[2:].numel(), groups)
        if takes_groups(x):
            from sfumato.clipping.kernels.group_norm_forward import group_norm_forward

            backward = _group_backward_by_kernel
            out, mean, rstd = group_norm_forward(x, weight, bias, groups, eps)
        elif torch.compiler.is_compiling():
            backward = _group_backward_compiled
            out, mean, rstd = _normalised_groups(x, weight, bias, groups, eps)
        else:
            backward = _group_backward_on_gpu if x.is_cuda else _group_backward_on_cpu
            wide = x.to(output_type(x))
            wide = wide.contiguous() if x.is_cuda else wide  # the CUDA kernel knows no other layout
            out, mean, rstd = torch.native_group_norm(wide, weight, bias, *sizes, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.settings = (sizes, examples, backward)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and sums over the positions of each example."""
        (g,) = gradients
        x, mean, rstd, weight = ctx.saved_tensors
        sizes, examples, backward = ctx.settings
        needs = ctx.needs_input_grad
        wanted = (needs[0], needs[3], needs[4])
        grad_x, by_weight, by_bias = backward(g, x, mean, rstd, weight, sizes, wanted)
        by_weight, by_bias = (
            _of_examples(found.reshape(sizes[:2]), examples) if asked else None
            for found, asked in ((by_weight, needs[3]), (by_bias, needs[4]))
        )
        return _answer(needs, grad_x, by_weight, by_bias, 3)


class FrozenBatchNormed(torch.autograd.Function):
    """BatchNorm with fixed statistics: a scale and a shift of each channel, in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        kept_w: Any,
        kept_b: Any,
        mean: Any,
        variance: Any,
        eps: float,
        examples: int,
    ) -> Tensor:
        """The ordinary forward pass."""
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.settings = (eps, examples)
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and sums over the positions of each example."""
        (g,) = gradients
        x, weight, mean, variance = ctx.saved_tensors
        eps, examples = ctx.settings
        needs = ctx.needs_input_grad
        shape = (-1, *[1] * (x.ndim - 2))
        inverse = (variance + eps).rsqrt()
        grad_x = by_weight = by_bias = None
        if needs[0]:
            factor = inverse if weight is None else inverse * weight
            grad_x = g * factor.reshape(shape).to(g.dtype)
        if has_kernel(x) and is_channels_last(x) and mean.dtype == torch.float32:
            from sfumato.clipping.kernels.group_norm_backward import channel_sums

            sums = channel_sums(g, x, mean, inverse)
            by_weight, by_bias = (_of_examples(one, examples) for one in sums)
            return _answer(needs, grad_x, by_weight, by_bias, 4)
        if needs[3]:
            # Centred first: x may lie far from zero, where little of a rounded product is left.
            by_weight = _by_channel((x - mean.reshape(shape)) * g, examples) * inverse
        if needs[4]:
            by_bias = _by_channel(g, examples)
        return _answer(needs, grad_x, by_weight, by_bias, 4)


def _group_backward_by_kernel(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    sizes: tuple[int, ...],
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """GroupNorm's backward pass in two readings of g and x, where channels come last."""
    from sfumato.clipping.kernels.group_norm_backward import group_norm_backward

    grad_x, sums = group_norm_backward(g, x, mean, rstd, weight)
    return grad_x, *sums


def _group_backward_on_cpu(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    sizes: tuple[int, ...],
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """GroupNorm's backward pass on a CPU, at the cost of the ordinary one.

    To torch's kernel the batch is shown as one example with the channels of all, side by side: so
    it does not add up the gradients of scale and shift over the rows.
    """
    rows, channels, places, groups = sizes
    wide = (1, rows * channels, places)
    grad_x, by_weight, by_bias = torch.ops.aten.native_group_norm_backward(
        g.reshape(wide),
        x.to(g.dtype).reshape(wide),
        mean.reshape(1, -1),
        rstd.reshape(1, -1),
        None if weight is None else weight.repeat(rows),
        *wide,
        rows * groups,
        list(wanted),
    )
    return grad_x.reshape(x.shape).to(x.dtype) if wanted[0] else None, by_weight, by_bias


def _group_backward_on_gpu(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    sizes: tuple[int, ...],
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """GroupNorm's backward pass by torch's CUDA kernel, and two reductions for scale and shift."""
    rows, channels, places, groups = sizes
    g, wide, grad_x = g.contiguous(), x.to(g.dtype).contiguous(), None
    if wanted[0]:
        grad_x = torch.ops.aten.native_group_norm_backward(
            g, wide, mean, rstd, weight, rows, channels, places, groups, [True, False, False]
        )[0].to(x.dtype)
    by_bias = g.reshape(rows, groups, -1, places).sum(dim=3)
    with_x = (g * wide).reshape(rows, groups, -1, places).sum(dim=3)
    by_weight = (with_x - by_bias * mean[..., None]) * rstd[..., None]
    return grad_x, by_weight, by_bias


def _normalised_groups(
    x: Tensor, weight: Any, bias: Any, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and `rstd`, in expressions that keep the order of axes in memory."""
    parts = x.to(output_type(x)).reshape(x.shape[0], groups, x.shape[1] // groups, -1)
    variance, mean = torch.var_mean(parts, dim=(2, 3), correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    out = ((parts - mean) * rstd).reshape(x.shape)
    shape = (-1, *[1] * (x.ndim - 2))
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    return out, mean[..., 0, 0], rstd[..., 0, 0]


def _group_backward_compiled(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    sizes: tuple[int, ...],
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """GroupNorm's backward pass in expressions that a compiler fuses.

    To shift or stretch a whole group changes no output, so those parts of g are taken out.
    """
    rows, channels, places, groups = sizes
    size = channels // groups
    parts, above = (t.reshape(rows, groups, size, places) for t in (x.to(g.dtype), g))
    normal = (parts - mean[..., None, None]) * rstd[..., None, None]
    by_weight, by_bias = (above * normal).sum(dim=3), above.sum(dim=3)
    factor = above.new_ones(1) if weight is None else weight.reshape(groups, size)
    along_x, along_1 = (
        (one * factor).sum(dim=2)[..., None, None] / (size * places) for one in (by_weight, by_bias)
    )
    grad_x = (above * factor[..., None] - along_1 - normal * along_x) * rstd[..., None, None]
    return grad_x.reshape(x.shape).to(x.dtype), by_weight, by_bias


def has_kernel(x: Tensor) -> bool:
    """Whether our kernels read it: on a GPU, and no compiler is looking."""
    return x.is_cuda and x.dtype in NARROW and not torch.compiler.is_compiling()


def takes_groups(x: Tensor) -> bool:
    """Whether our kernels normalise groups of its channels."""
    return has_kernel(x) and gives_float32(x) and is_channels_last(x)


def gives_float32(x: Tensor) -> bool:
    """Whether the output is float32, the one type our kernels write."""
    return output_type(x) == torch.float32


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a position stand side by side in memory."""
    return x.movedim(1, -1).is_contiguous()


def _answer(needs: Any, grad_x: Any, by_weight: Any, by_bias: Any, settings: int) -> Any:
    """The gradients that are asked for, in the order of the arguments."""
    kept = (by_weight if needs[3] else None, by_bias if needs[4] else None)
    return (grad_x if needs[0] else None, None, None, *kept, *[None] * settings)


def _of_examples(sums: Float[Tensor, "rows c"], examples: int) -> Float[Tensor, "n c"]:
    """The rows of an example added up."""
    return sums if len(sums) == examples else sums.unflatten(0, (examples, -1)).sum(dim=1)


def _by_channel(values: Tensor, examples: int) -> Float[Tensor, "n c"]:
    """Sums over all positions of each example."""
    rows = values.flatten(2) if values.ndim > 2 else values[..., None]
    return _of_examples(rows.sum(dim=2, dtype=sum_type(values)), examples)
