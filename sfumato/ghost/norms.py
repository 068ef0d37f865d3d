"""Layers that normalise, then scale and shift: LayerNorm, GroupNorm and their kin.

The scale and the shift are given a row for each example, whose gradient is the per-example one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import UnsupportedLayer
from sfumato.ghost.generic import per_row
from sfumato.ghost.registry import norm_rule
from sfumato.ghost.tape import Leaf, Tape


@norm_rule(F.layer_norm)
def layer_norm(
    tape: Tape, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise the last axes, then scale and shift them."""
    return _scale_and_shift(tape, F.layer_norm(input, normalized_shape, eps=eps), weight, bias)


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
    normal = F.group_norm(input, num_groups, eps=eps)
    return _scale_and_shift(tape, normal, weight, bias, channels=True)


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
    normal = F.batch_norm(input, running_mean, running_var, eps=eps)
    return _scale_and_shift(tape, normal, weight, bias, channels=True)


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
