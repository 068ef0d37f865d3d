"""Layers that normalise, then scale and shift: LayerNorm, GroupNorm and their kin.

LayerNorm, GroupNorm and frozen BatchNorm go to `normalisation_functions`, and cost about what they
cost in ordinary training. For the others, and where something is odd, the scale and the shift are
given a row for each example, whose gradient is the per-example one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping.fallback import per_row
from sfumato.clipping.leaf import LeafTensor
from sfumato.clipping.normalisation_functions import (
    FrozenBatchNormed,
    GroupNormed,
    LayerNormed,
    output_type,
)
from sfumato.clipping.rules.registry import layer_rule
from sfumato.clipping.tape import Tape
from sfumato.errors import UnsupportedLayer


def _normalised_axes(input: Tensor, normalized_shape: Any, *_: Any, **__: Any) -> int:
    return len(normalized_shape)


@layer_rule(F.layer_norm, trailing_axes=_normalised_axes)
def layer_norm(
    tape: Tape,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the last axes, then scale and shift them."""
    shape = tuple(normalized_shape)
    if _stands_apart(tape, input, weight, bias) or input.ndim == len(shape):
        return _scale_and_shift(tape, F.layer_norm(input, shape, eps=eps), weight, bias)
    (weight, kept_w), (bias, kept_b) = _given(tape, weight), _given(tape, bias)
    return LayerNormed.apply(input, weight, bias, kept_w, kept_b, shape, eps, tape.examples)  # pyright: ignore


@layer_rule(F.rms_norm, trailing_axes=_normalised_axes)
def rms_norm(
    tape: Tape, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor:
    """The same without mean and shift."""
    return _scale_and_shift(tape, F.rms_norm(input, normalized_shape, eps=eps), weight, None)


@layer_rule(F.group_norm, torch.group_norm)
def group_norm(
    tape: Tape,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Normalise groups of channels, then scale and shift channels."""
    if _stands_apart(tape, input, weight, bias):
        normal = F.group_norm(input, num_groups, eps=eps)
        return _scale_and_shift(tape, normal, weight, bias, channels=True)
    (weight, kept_w), (bias, kept_b) = _given(tape, weight), _given(tape, bias)
    return GroupNormed.apply(input, weight, bias, kept_w, kept_b, num_groups, eps, tape.examples)  # pyright: ignore


@layer_rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    tape: Tape,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """With frozen statistics: scale and shift channels. In training mode: refused."""
    if training:
        raise UnsupportedLayer(_mixes(weight, tape, "BatchNorm in training mode"))
    foreign = any(
        p is not None and p.requires_grad and not isinstance(p, LeafTensor) for p in (weight, bias)
    )
    if foreign or input.numel() == 0 or input.shape[0] % tape.examples != 0:
        normal = F.batch_norm(input, running_mean, running_var, eps=eps)
        return _scale_and_shift(tape, normal, weight, bias, channels=True)
    (weight, kept_w), (bias, kept_b) = _given(tape, weight), _given(tape, bias)
    return FrozenBatchNormed.apply(  # pyright: ignore
        input, weight, bias, kept_w, kept_b, running_mean, running_var, eps, tape.examples
    )


@layer_rule(F.instance_norm)
def instance_norm(
    tape: Tape,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Groups of one channel; with fixed statistics, a frozen BatchNorm."""
    if not use_input_stats:
        return batch_norm(tape, input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None:
        raise UnsupportedLayer(_mixes(weight, tape, "InstanceNorm that tracks running statistics"))
    return group_norm(tape, input, input.shape[1], weight, bias, eps).to(input.dtype)


def _given(tape: Tape, parameter: Any) -> tuple[Tensor | None, Tensor | None]:
    """A parameter's value, and the dummy for its per-example gradients if it is trained."""
    if not isinstance(parameter, LeafTensor):
        return parameter, None
    tape.open(parameter, "gradient", "scale_and_shift")
    value = parameter.detach()
    return value, tape.keep((tape.examples, *value.shape), value.dtype)


def _stands_apart(tape: Tape, x: Tensor, *parameters: Any) -> bool:
    """Whether something is odd here: then normalising, scaling and shifting go one by one."""
    given, dtype = [p for p in parameters if p is not None], output_type(x)
    odd = any(
        p.dtype != dtype or (p.requires_grad and not isinstance(p, LeafTensor)) for p in given
    )
    return odd or x.numel() == 0 or x.shape[0] % tape.examples != 0


def _scale_and_shift(
    tape: Tape, normal: Tensor, weight: Any, bias: Any, channels: bool = False
) -> Tensor:
    def shaped(parameter: Tensor) -> Tensor:
        if isinstance(parameter, LeafTensor):
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
        "exists. Replace it by a GroupNorm, or freeze it: norm=group or frozen (model.eval() for "
        "that layer)."
    )
