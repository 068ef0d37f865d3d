"""Layers that normalise, then scale and shift: LayerNorm, GroupNorm and their kin.

LayerNorm, GroupNorm and frozen BatchNorm run torch's own kernels and cost about what they cost in
ordinary training. For the others the scale and the shift are given a row for each example, whose
gradient is the per-example one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import UnsupportedLayer
from sfumato.ghost.contract import sum_type
from sfumato.ghost.generic import per_row
from sfumato.ghost.leaf import Leaf
from sfumato.ghost.registry import norm_rule
from sfumato.ghost.tape import Tape


class LayerNormed(torch.autograd.Function):
    """LayerNorm by torch's own kernels; the dummies take the per-example gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, kept_w: Any, kept_b: Any, shape: Any, eps: float,
        examples: int,
    ) -> Tensor:  # fmt: skip
        """The ordinary forward pass."""
        out, mean, scale = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        ctx.settings = (shape, examples)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and sums over the positions of each example."""
        (g,) = gradients
        x, mean, scale, weight, bias = ctx.saved_tensors
        shape, examples = ctx.settings
        grad_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            only_x = [True, False, False]
            grad_x = torch.ops.aten.native_layer_norm_backward(
                g, x, shape, mean, scale, weight, bias, only_x
            )[0]
        if ctx.needs_input_grad[3]:
            # In place: on a CPU another copy costs more than the arithmetic.
            moved = (x - mean).mul_(scale).mul_(g)
            by_weight = moved.reshape(examples, -1, *shape).sum(dim=1)
        if ctx.needs_input_grad[4]:
            by_bias = g.reshape(examples, -1, *shape).sum(dim=1)
        return grad_x, None, None, by_weight, by_bias, None, None, None


class GroupNormed(torch.autograd.Function):
    """GroupNorm in the same way."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, kept_w: Any, kept_b: Any, groups: int, eps: float,
        examples: int,
    ) -> Tensor:  # fmt: skip
        """The ordinary forward pass."""
        x = x.contiguous() if x.is_cuda else x  # there the kernel knows no other layout
        rows, channels = x.shape[:2]
        sizes = (rows, channels, x[0, 0].numel(), groups)
        out, mean, scale = torch.native_group_norm(x, weight, bias, *sizes, eps)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.settings = (*sizes, examples)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and sums over the positions of each example."""
        (g,) = gradients
        x, mean, scale, weight = ctx.saved_tensors
        *sizes, examples = ctx.settings
        channels = sizes[1]
        needs = ctx.needs_input_grad
        find = _on_gpu if x.is_cuda else _side_by_side
        wanted = (needs[0], needs[3], needs[4])
        grad_x, by_weight, by_bias = find(g, x, mean, scale, weight, sizes, wanted)
        by_weight, by_bias = (
            found.reshape(examples, -1, channels).sum(dim=1) if wanted else None
            for found, wanted in ((by_weight, needs[3]), (by_bias, needs[4]))
        )
        return grad_x if needs[0] else None, None, None, by_weight, by_bias, None, None, None


def _side_by_side(
    g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Any, sizes: list[int],
    wanted: tuple[bool, bool, bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """All at the cost of the ordinary backward pass, on a CPU.

    To the kernel the batch is shown as one example with the channels of all, side by side: so it
    does not add up the gradients of scale and shift over the rows.
    """
    rows, channels, places, groups = sizes
    wide = (1, rows * channels, places)
    grad_x, by_weight, by_bias = torch.ops.aten.native_group_norm_backward(
        g.reshape(wide), x.reshape(wide), mean.reshape(1, -1), scale.reshape(1, -1),
        None if weight is None else weight.repeat(rows), *wide, rows * groups, list(wanted),
    )  # fmt: skip
    return grad_x.reshape(x.shape) if wanted[0] else None, by_weight, by_bias


def _on_gpu(
    g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Any, sizes: list[int],
    wanted: tuple[bool, bool, bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The same in two reductions more: there a kernel takes few groups and many rows."""
    rows, channels, places, groups = sizes
    g, grad_x = g.contiguous(), None
    if wanted[0]:
        grad_x = torch.ops.aten.native_group_norm_backward(
            g, x, mean, scale, weight, rows, channels, places, groups, [True, False, False]
        )[0]
    by_bias = g.reshape(rows, groups, -1, places).sum(dim=3)
    with_x = (g * x).reshape(rows, groups, -1, places).sum(dim=3)
    by_weight = (with_x - by_bias * mean[..., None]) * scale[..., None]
    return grad_x, by_weight.flatten(), by_bias.flatten()


class FrozenBatchNormed(torch.autograd.Function):
    """BatchNorm with fixed statistics: a scale and a shift of each channel, in one pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, kept_w: Any, kept_b: Any, mean: Any,
        variance: Any, eps: float, examples: int,
    ) -> Tensor:  # fmt: skip
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
        inverse = (variance + eps).rsqrt().reshape(shape)
        grad_x = by_weight = by_bias = None
        if needs[0]:
            grad_x = g * (inverse if weight is None else inverse * weight.reshape(shape)).to(
                g.dtype
            )
        if needs[3]:
            # Centred first: x may lie far from zero, where little of a rounded product is left.
            by_weight = _by_channel((x - mean.reshape(shape)) * g, examples) * inverse.flatten()
        if needs[4]:
            by_bias = _by_channel(g, examples)
        return grad_x, None, None, by_weight, by_bias, None, None, None, None


def _by_channel(values: Tensor, examples: int) -> Tensor:
    """Sums over all positions of each example: n, C."""
    rows = values.flatten(2) if values.ndim > 2 else values[..., None]
    rows = rows.sum(dim=2, dtype=sum_type(values))
    return rows.reshape(examples, -1, values.shape[1]).sum(dim=1)


@norm_rule(F.layer_norm)
def layer_norm(
    tape: Tape, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise the last axes, then scale and shift them."""
    shape = tuple(normalized_shape)
    x = _widened(input)
    if _stands_apart(tape, x, weight, bias) or x.ndim == len(shape):
        return _scale_and_shift(tape, F.layer_norm(input, shape, eps=eps), weight, bias)
    (weight, kept_w), (bias, kept_b) = _given(tape, weight), _given(tape, bias)
    return LayerNormed.apply(x, weight, bias, kept_w, kept_b, shape, eps, tape.examples)  # pyright: ignore


@norm_rule(F.rms_norm)
def rms_norm(
    tape: Tape, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor:
    """The same without mean and shift."""
    return _scale_and_shift(tape, F.rms_norm(input, normalized_shape, eps=eps), weight, None)


@norm_rule(F.group_norm, torch.group_norm)
def group_norm(
    tape: Tape, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any,
) -> Tensor:  # fmt: skip
    """Normalise groups of channels, then scale and shift channels."""
    x = _widened(input)
    if _stands_apart(tape, x, weight, bias):
        normal = F.group_norm(input, num_groups, eps=eps)
        return _scale_and_shift(tape, normal, weight, bias, channels=True)
    (weight, kept_w), (bias, kept_b) = _given(tape, weight), _given(tape, bias)
    return GroupNormed.apply(x, weight, bias, kept_w, kept_b, num_groups, eps, tape.examples)  # pyright: ignore


@norm_rule(torch.instance_norm)
def instance_norm(
    tape: Tape, input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """Normalise each channel of each example, then scale and shift it."""
    if use_input_stats and running_mean is not None:
        raise UnsupportedLayer(_mixes(weight, tape, "InstanceNorm that tracks running statistics"))
    normal = torch.instance_norm(
        input, None, None, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
    )
    return _scale_and_shift(tape, normal, weight, bias, channels=True)


@norm_rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    tape: Tape, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Tensor:  # fmt: skip
    """With frozen statistics: scale and shift channels. In training mode: refused."""
    if training:
        raise UnsupportedLayer(_mixes(weight, tape, "BatchNorm in training mode"))
    foreign = any(
        p is not None and p.requires_grad and not isinstance(p, Leaf) for p in (weight, bias)
    )
    if foreign or input.numel() == 0 or input.shape[0] % tape.examples != 0:
        normal = F.batch_norm(input, running_mean, running_var, eps=eps)
        return _scale_and_shift(tape, normal, weight, bias, channels=True)
    (weight, kept_w), (bias, kept_b) = _given(tape, weight), _given(tape, bias)
    return FrozenBatchNormed.apply(  # pyright: ignore
        input, weight, bias, kept_w, kept_b, running_mean, running_var, eps, tape.examples
    )


def _given(tape: Tape, parameter: Any) -> tuple[Tensor | None, Tensor | None]:
    """A parameter's value, and the dummy for its per-example gradients if it is trained."""
    if not isinstance(parameter, Leaf):
        return parameter, None
    tape.open(parameter, "gradient", "scale_and_shift")
    value = parameter.detach()
    return value, tape.keep((tape.examples, *value.shape), value.dtype)


def _widened(x: Tensor) -> Tensor:
    """Autocast normalises in float32."""
    return x.to(sum_type(x)) if torch.is_autocast_enabled(x.device.type) else x


def _stands_apart(tape: Tape, x: Tensor, *parameters: Any) -> bool:
    """Whether something is odd here: then normalising, scaling and shifting go one by one."""
    given = [p for p in parameters if p is not None]
    odd = any(p.dtype != x.dtype or (p.requires_grad and not isinstance(p, Leaf)) for p in given)
    return odd or x.numel() == 0 or x.shape[0] % tape.examples != 0


def _scale_and_shift(
    tape: Tape, normal: Tensor, weight: Any, bias: Any, channels: bool = False
) -> Tensor:
    def shaped(parameter: Tensor) -> Tensor:
        if isinstance(parameter, Leaf):
            ndim = normal.ndim - (normal.ndim - 2 if channels else 0)
            row = per_row(tape, parameter, ndim, normal.shape[0], "scale_and_shift")
        else:
            row = parameter
        return row.reshape(*row.shape, *[1] * (normal.ndim - 2)) if channels else row

    if weight is not None:
        normal = normal * shaped(weight)
    return normal if bias is None else normal + shaped(bias)


def _mixes(weight: Any, tape: Tape, what: str) -> str:
    name = tape.name_of(weight).rpartition(".")[0] or "a layer"
    return (
        f'"{name}" is a {what}: it mixes the examples of a batch, so no per-example gradient '
        "exists. Use --norm group, or freeze it with --norm frozen (model.eval() for that layer)."
    )
