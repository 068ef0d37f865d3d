"""Layers that are linear in a weight: the ordinary output, and per-example norms on the way back.

`linear_like` is what the rules of linear layers and convolutions of every kind are made of.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfumato.clipping import grams, layer_algebra, standardised
from sfumato.clipping.arithmetic import sum_type
from sfumato.clipping.geometry import WeightGeometry
from sfumato.clipping.leaf import LeafTensor, plain
from sfumato.clipping.param_use import ParamUse
from sfumato.clipping.tape import Tape


class BackwardSpec(NamedTuple):
    """What a layer that multiplies by a weight does on the way back."""

    geometry: WeightGeometry
    method: str
    examples: int
    reads_input: bool
    """The input is an input of the model: no gradient of it is asked for."""
    keeps_bias: bool


class LinearWithNorms(torch.autograd.Function):
    """A layer that multiplies by a weight, and measures its per-example gradients on the way back.

    `norm` and the dummies get, as their gradients: the squared norms; then, where the spec says so,
    the per-example gradients of the weight, or else the input and the output gradient; last the
    per-example gradients of the bias. With a `scale` the weight is a parameter with standardised
    rows, and the norms are those of that parameter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        scale: Any,
        norm: Any,
        spec: BackwardSpec,
        *dummies: Any,
    ) -> Tensor:
        """The ordinary forward pass."""
        y = layer_algebra.apply(x, weight, bias, spec.geometry)
        ctx.save_for_backward(x, weight, *(() if scale is None else (scale, y, bias)))
        ctx.spec = spec
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and what the dummies keep."""
        (g,) = gradients
        # Checkpointing runs the forward pass again for these, and must find it as it was.
        x, weight, *of_standardised = ctx.saved_tensors
        with plain():
            spec, geometry, examples = ctx.spec, ctx.spec.geometry, ctx.spec.examples
            g = layer_algebra.prepare_input(g, x, g.dtype)
            grad_x = None
            if not spec.reads_input:
                grad_x = layer_algebra.input_gradient(g, x, weight, geometry)
            squares, keeps = None, []
            if spec.method == "store":
                keeps.append(layer_algebra.per_example_gradients(x, g, weight, geometry, examples))
            elif of_standardised:
                scale, y, bias = of_standardised
                settings = (weight, bias, geometry, examples)
                squares = standardised.standardised_ghost_norm(x, g, y, scale, *settings)
            elif spec.method == "ghost":
                squares = grams.ghost_norm(x, g, weight, geometry, examples)
            if squares is not None:
                keeps += [x.detach(), g]
            if spec.keeps_bias:
                keeps.append(_bias_gradient(g, geometry, examples))
            return (grad_x, None, None, None, squares, None, *keeps)


def linear_like(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: WeightGeometry,
    operation: str,
) -> Tensor:
    """Run a linear layer or convolution whose weight or bias is a LeafTensor."""
    by_weight = tape.open(weight, "product", operation) if isinstance(weight, LeafTensor) else None
    by_bias = tape.open(bias, "gradient", operation) if isinstance(bias, LeafTensor) else None
    method, norm, scale, dummies = "", None, None, []
    out = layer_algebra.output_shape(x, weight, geometry)
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
    reads_input = by_weight.reads_input if by_weight is not None else False
    spec = BackwardSpec(geometry, method, tape.examples, reads_input, by_bias is not None)
    x, weight = layer_algebra.prepare_input(x, weight, dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    y = LinearWithNorms.apply(x, weight, bias, scale, norm, spec, *dummies)  # pyright: ignore
    if tape.survey and by_weight is not None and by_weight.standardised is not None:
        by_weight.output_lost = standardised.is_rounded(y)
        tape.outputs.append((by_weight, y))
    return y


def depends_on_batch(tensor: Tensor | None) -> bool:
    """Whether it is no parameter, but computed from the batch."""
    return tensor is not None and not isinstance(tensor, LeafTensor) and tensor.requires_grad


def _measure(
    part: ParamUse,
    x: Tensor,
    weight: Tensor,
    geometry: WeightGeometry,
    out: tuple[int, ...],
    tape: Tape,
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


def _bias_gradient(g: Tensor, geometry: WeightGeometry, examples: int) -> Tensor:
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
