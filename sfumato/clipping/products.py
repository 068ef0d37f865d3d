"""Layers that multiply by a weight: linear layers and convolutions of every kind."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping import contract, grams, standardised
from sfumato.clipping.arithmetic import sum_type
from sfumato.clipping.generic import by_vmap
from sfumato.clipping.geometry import LINEAR, Geometry
from sfumato.clipping.leaf import Leaf, plain
from sfumato.clipping.parts import ParamUse
from sfumato.clipping.registry import norm_rule
from sfumato.clipping.tape import Tape


class BackwardPlan(NamedTuple):
    """What a layer that multiplies by a weight does on the way back."""

    geometry: Geometry
    method: str
    examples: int
    reads_input: bool
    keeps_bias: bool


class Contraction(torch.autograd.Function):
    """A layer that multiplies by a weight, and measures its per-example gradients on the way back.

    `norm` and the dummies get, as their gradients: the squared norms; then, where the plan says so,
    the per-example gradients of the weight, or else the input and the output gradient; last the
    per-example gradients of the bias. With a `scale` the weight is a parameter with standardised
    rows, and the norms are those of that parameter.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, scale: Any, norm: Any, plan: BackwardPlan,
        *dummies: Any,
    ) -> Tensor:  # fmt: skip
        """The ordinary forward pass."""
        y = contract.apply(x, weight, bias, plan.geometry)
        ctx.save_for_backward(x, weight, *(() if scale is None else (scale, y, bias)))
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and what the dummies keep."""
        (g,) = gradients
        # Checkpointing runs the forward pass again for these, and must find it as it was.
        x, weight, *of_standardised = ctx.saved_tensors
        with plain():
            plan, geometry, examples = ctx.plan, ctx.plan.geometry, ctx.plan.examples
            g = contract.packed(g, x, g.dtype)
            grad_x = None
            if not plan.reads_input:
                grad_x = contract.input_gradient(g, x, weight, geometry)
            squares, keeps = None, []
            if plan.method == "store":
                keeps.append(contract.gradients(x, g, weight, geometry, examples))
            elif of_standardised:
                scale, y, bias = of_standardised
                settings = (weight, bias, geometry, examples)
                squares = standardised.ghost_norm(x, g, y, scale, *settings)
            elif plan.method == "ghost":
                squares = grams.ghost_norm(x, g, weight, geometry, examples)
            if squares is not None:
                keeps += [x.detach(), g]
            if plan.keeps_bias:
                keeps.append(_bias_gradient(g, geometry, examples))
            return (grad_x, None, None, None, squares, None, *keeps)


def contraction(
    tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, operation: str
) -> Tensor:
    """Run a linear layer or convolution whose weight or bias is a Leaf."""
    by_weight = tape.open(weight, "product", operation) if isinstance(weight, Leaf) else None
    by_bias = tape.open(bias, "gradient", operation) if isinstance(bias, Leaf) else None
    method, norm, scale, dummies = "", None, None, []
    out = contract.output_shape(x, weight, geometry)
    dtype = _product_type(x)
    if by_weight is not None:
        if tape.survey:
            _measure(by_weight, x, weight, geometry, out, tape)
        method = by_weight.method
        if method == "store":
            dummies.append(tape.keep((tape.examples, *weight.shape), sum_type(x)))
        else:
            norm = tape.norms[tape.group_of.get(by_weight.path, 0)]
            dummies += [tape.keep(tuple(x.shape), dtype), tape.keep(out, dtype)]
            if by_weight.standardised is not None:
                raw = tape.parameters[by_weight.path].detach()
                scale = standardised.scale_of_rows(raw, by_weight.standardised)
    if by_bias is not None:
        width = out[-1 if geometry.is_linear else 1]
        dummies.append(tape.keep((tape.examples, width), sum_type(x)))
    first = by_weight.reads_input if by_weight is not None else False
    plan = BackwardPlan(geometry, method, tape.examples, first, by_bias is not None)
    x, weight = contract.packed(x, weight, dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    y = Contraction.apply(x, weight, bias, scale, norm, plan, *dummies)  # pyright: ignore
    if tape.survey and by_weight is not None and by_weight.standardised is not None:
        by_weight.output_lost = standardised.is_rounded(y)
        tape.outputs.append((by_weight, y))
    return y


@norm_rule(F.linear, last_axes=lambda x, weight, bias=None: 1 if weight.ndim == 2 else x.ndim)
def linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A matrix on the last axis of an input of any number of dimensions."""
    if weight.ndim != 2 or x.ndim < 2 or _depends_on_batch(weight) or _depends_on_batch(bias):
        return by_vmap(tape, F.linear, (x, weight, bias), {})
    if x.ndim < 4:
        return contraction(tape, x, weight, bias, LINEAR, "linear")
    # Four axes are maps to a compiler, which keeps them for the way back with the second one last.
    y = contraction(tape, x.flatten(1, -2), weight, bias, LINEAR, "linear")
    return y.unflatten(1, x.shape[1:-1])


def _convolution(operation: Callable[..., Any], dims: int) -> None:
    @norm_rule(operation)
    def rule(
        tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        """A convolution with any stride, dilation, groups and padding."""
        if _depends_on_batch(weight) or _depends_on_batch(bias) or input.ndim != dims + 2:
            args = (input, weight, bias, stride, padding, dilation, groups)
            return by_vmap(tape, operation, args, {})
        stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
        if isinstance(padding, str):
            input, padding = _pad_same(input, weight.shape[2:], dilation, padding), 0
        geometry = Geometry(stride, _tuple(padding, dims), dilation, False, (0,) * dims, groups)
        return contraction(tape, input, weight, bias, geometry, f"conv{dims}d")


def _transposed_convolution(operation: Callable[..., Any], dims: int) -> None:
    @norm_rule(operation)
    def rule(
        tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Any:  # fmt: skip
        """The adjoint of a convolution."""
        if _depends_on_batch(weight) or _depends_on_batch(bias) or input.ndim != dims + 2:
            args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
            return by_vmap(tape, operation, args, {})
        geometry = Geometry(
            stride=_tuple(stride, dims),
            padding=_tuple(padding, dims),
            dilation=_tuple(dilation, dims),
            transposed=True,
            output_padding=_tuple(output_padding, dims),
            groups=groups,
        )
        return contraction(tape, input, weight, bias, geometry, f"conv_transpose{dims}d")


for _dims, _forward, _adjoint in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    _convolution(_forward, _dims)
    _transposed_convolution(_adjoint, _dims)


def _measure(
    part: ParamUse, x: Tensor, weight: Tensor, geometry: Geometry, out: tuple[int, ...], tape: Tape
) -> None:
    """Note what the choice of method depends on."""
    part.geometry, part.groups, part.on_gpu = geometry, geometry.groups, x.is_cuda
    part.reads_input = id(x) in tape.inputs or not x.requires_grad
    if geometry.is_linear:
        part.positions, part.inputs, part.outputs = x.numel() // x.shape[-1], x.shape[-1], out[-1]
        part.gram_depth = part.inputs
    else:
        spatial = x.shape[2:] if geometry.transposed else out[2:]
        part.positions = x.shape[0] * torch.Size(spatial).numel()
        part.outputs = weight.shape[0] // geometry.groups
        part.inputs = part.gram_depth = weight[0].numel()
        if not geometry.transposed and x.shape[0] == tape.examples and not part.on_gpu:
            sizes = torch.Size(x.shape[2:]).numel(), torch.Size(out[2:]).numel()
            part.gram_depth = grams.gram_depth(*sizes, weight)
    part.positions //= max(1, tape.examples)


def _bias_gradient(g: Tensor, geometry: Geometry, examples: int) -> Tensor:
    """The sums over positions, added up in float32 without a copy in it."""
    dtype = sum_type(g)
    if geometry.is_linear:
        return g.reshape(examples, -1, g.shape[-1]).sum(dim=1, dtype=dtype)
    rows = g.flatten(2).sum(dim=2, dtype=dtype)
    return rows.unflatten(0, (examples, -1)).sum(dim=1)


def _product_type(x: Tensor) -> torch.dtype:
    """The type autocast computes products in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _depends_on_batch(tensor: Tensor | None) -> bool:
    return tensor is not None and not isinstance(tensor, Leaf) and tensor.requires_grad


def _tuple(setting: Any, dims: int) -> tuple[int, ...]:
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dims if len(values) == 1 else values


def _pad_same(x: Tensor, kernel: Any, dilation: tuple[int, ...], padding: str) -> Tensor:
    if padding == "valid":
        return x
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return F.pad(x, sides)
