"""Linear layers, in all their spellings: `F.linear(x, w)`, `x @ w`, `w @ x.T`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping.fallback import by_vmap
from sfumato.clipping.geometry import LINEAR
from sfumato.clipping.leaf import LeafTensor
from sfumato.clipping.linear_like import depends_on_batch, linear_like
from sfumato.clipping.rules.registry import layer_rule
from sfumato.clipping.tape import Tape


@layer_rule(F.linear, trailing_axes=lambda x, weight, bias=None: 1 if weight.ndim == 2 else x.ndim)
def linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A matrix on the last axis of an input of any number of dimensions."""
    if weight.ndim != 2 or x.ndim < 2 or depends_on_batch(weight) or depends_on_batch(bias):
        return by_vmap(tape, F.linear, (x, weight, bias), {})
    if x.ndim < 4:
        return linear_like(tape, x, weight, bias, LINEAR, "linear")
    # Four axes are maps to a compiler, which keeps them for the way back with the second one last.
    y = linear_like(tape, x.flatten(1, -2), weight, bias, LINEAR, "linear")
    return y.unflatten(1, x.shape[1:-1])


@layer_rule(torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, any_axis=True)
def matmul(tape: Tape, input: Tensor, other: Tensor) -> Tensor:
    """A weight from the left or from the right, the examples on any axis that is not summed."""
    product = _as_linear(tape, input, other, *tape.here.axes)
    return by_vmap(tape, torch.matmul, (input, other), {}) if product is None else product


@layer_rule(Tensor.__rmatmul__, any_axis=True)
def matmul_from_the_right(tape: Tape, input: Tensor, other: Tensor) -> Tensor:
    """What Python calls for `other @ input` where the left one does not know how."""
    right, left = tape.here.axes
    product = _as_linear(tape, other, input, left, right)
    return by_vmap(tape, Tensor.__rmatmul__, (input, other), {}) if product is None else product


def _as_linear(
    tape: Tape, left: Tensor, right: Tensor, of_left: int | None, of_right: int | None
) -> Tensor | None:
    """The product as a linear layer, if it is one; `of_left` and `of_right` hold the examples."""
    if isinstance(right, LeafTensor) and right.ndim == 2 and of_left not in (None, left.ndim - 1):
        weight = tape.derive(Tensor.t, right)
        return linear(tape, left.movedim(of_left, 0), weight).movedim(0, of_left)
    if isinstance(left, LeafTensor) and left.ndim == 2 and of_right not in (None, right.ndim - 2):
        # The weight from the left acts on columns: turn them into rows and back.
        axis = min(of_right, right.ndim - 2)
        return linear(tape, right.mT.movedim(axis, 0), left).movedim(0, axis).mT
    return None
