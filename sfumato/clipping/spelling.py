"""The same layers in other words: `x @ w`, `w @ x.T`, `table[labels]`.

Each is turned into the operation that has a rule, so that it costs no more than that.
"""

from typing import Any

import torch
from torch import Tensor

from sfumato.clipping.generic import by_vmap
from sfumato.clipping.leaf import Leaf
from sfumato.clipping.products import linear
from sfumato.clipping.registry import norm_rule
from sfumato.clipping.tables import embedding
from sfumato.clipping.tape import Tape


@norm_rule(torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, finds_examples=True)
def matmul(tape: Tape, input: Tensor, other: Tensor) -> Tensor:
    """A weight from the left or from the right, the examples on any axis that is not summed."""
    product = _as_linear(tape, input, other, *tape.here.axes)
    return by_vmap(tape, torch.matmul, (input, other), {}) if product is None else product


@norm_rule(Tensor.__rmatmul__, finds_examples=True)
def matmul_from_the_right(tape: Tape, input: Tensor, other: Tensor) -> Tensor:
    """What Python calls for `other @ input` where the left one does not know how."""
    right, left = tape.here.axes
    product = _as_linear(tape, other, input, left, right)
    return by_vmap(tape, Tensor.__rmatmul__, (input, other), {}) if product is None else product


def _as_linear(
    tape: Tape, left: Tensor, right: Tensor, of_left: int | None, of_right: int | None
) -> Tensor | None:
    """The product as a linear layer, if it is one; `of_left` and `of_right` hold the examples."""
    if isinstance(right, Leaf) and right.ndim == 2 and of_left not in (None, left.ndim - 1):
        weight = tape.derive(Tensor.t, right)
        return linear(tape, left.movedim(of_left, 0), weight).movedim(0, of_left)
    if isinstance(left, Leaf) and left.ndim == 2 and of_right not in (None, right.ndim - 2):
        # The weight from the left acts on columns: turn them into rows and back.
        axis = min(of_right, right.ndim - 2)
        return linear(tape, right.mT.movedim(axis, 0), left).movedim(0, axis).mT
    return None


@norm_rule(Tensor.__getitem__, finds_examples=True)
def take_rows(tape: Tape, input: Tensor, index: Any) -> Tensor:
    """Rows of a parameter by labels; with other indices, one example at a time."""
    ids: Any = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    is_table = isinstance(input, Leaf) and isinstance(ids, Tensor)
    if not is_table or ids.dtype in (torch.bool, torch.uint8):
        return by_vmap(tape, Tensor.__getitem__, (input, index), {})
    rows = tape.derive(Tensor.flatten if input.ndim > 1 else Tensor.unsqueeze, input, 1)
    axis = next(axis for axis in tape.here.axes if axis is not None)
    ids = torch.where(ids < 0, ids + len(input), ids).movedim(axis, 0)
    found = embedding(tape, ids, rows).movedim(0, axis)
    return found.reshape(*found.shape[:-1], *input.shape[1:])


@norm_rule(torch.index_select, Tensor.index_select, finds_examples=True)
def index_select(tape: Tape, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """The same, as a function."""
    if dim == 0 and isinstance(input, Leaf):
        return take_rows(tape, input, index)
    return by_vmap(tape, torch.index_select, (input, dim, index), {})
