"""Convolutions and transposed convolutions, in one, two and three dimensions."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping.fallback import by_vmap
from sfumato.clipping.geometry import WeightGeometry
from sfumato.clipping.linear_like import depends_on_batch, linear_like
from sfumato.clipping.rules.registry import layer_rule
from sfumato.clipping.tape import Tape


def _convolution(operation: Callable[..., Any], dims: int) -> None:
    @layer_rule(operation)
    def rule(
        tape: Tape,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        """A convolution with any stride, dilation, groups and padding."""
        if depends_on_batch(weight) or depends_on_batch(bias) or input.ndim != dims + 2:
            args = (input, weight, bias, stride, padding, dilation, groups)
            return by_vmap(tape, operation, args, {})
        stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
        if isinstance(padding, str):
            input, padding = _pad_same(input, weight.shape[2:], dilation, padding), 0
        geometry = WeightGeometry(
            stride, _tuple(padding, dims), dilation, False, (0,) * dims, groups
        )
        return linear_like(tape, input, weight, bias, geometry, f"conv{dims}d")


def _transposed_convolution(operation: Callable[..., Any], dims: int) -> None:
    @layer_rule(operation)
    def rule(
        tape: Tape,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        """The adjoint of a convolution."""
        if depends_on_batch(weight) or depends_on_batch(bias) or input.ndim != dims + 2:
            args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
            return by_vmap(tape, operation, args, {})
        geometry = WeightGeometry(
            stride=_tuple(stride, dims),
            padding=_tuple(padding, dims),
            dilation=_tuple(dilation, dims),
            transposed=True,
            output_padding=_tuple(output_padding, dims),
            groups=groups,
        )
        return linear_like(tape, input, weight, bias, geometry, f"conv_transpose{dims}d")


for _dims, _forward, _adjoint in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    _convolution(_forward, _dims)
    _transposed_convolution(_adjoint, _dims)


def _tuple(setting: Any, dims: int) -> tuple[int, ...]:
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dims if len(values) == 1 else values


def _pad_same(x: Tensor, kernel: Any, dilation: tuple[int, ...], padding: str) -> Tensor:
    if padding == "valid":
        return x
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return F.pad(x, sides)
