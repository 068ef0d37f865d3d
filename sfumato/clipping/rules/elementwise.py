"""Arithmetic, in which a parameter broadcasts against the batch, and copies for the batch.

The parameter is given a row for each example, and autograd returns the per-example gradient by
itself.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping.batch_axis import flat_tensors
from sfumato.clipping.fallback import by_vmap, own_copies, per_row
from sfumato.clipping.leaf import LeafTensor, change_leaves
from sfumato.clipping.tape import Tape
from sfumato.errors import UnsupportedLayer

EXPANDING = {
    Tensor.expand,
    Tensor.expand_as,
    Tensor.repeat,
    torch.broadcast_to,
    Tensor.broadcast_to,
    torch.tile,
    Tensor.tile,
}
"""Operations that may copy a parameter for the examples."""

_NAMES = """
add sub mul div true_divide rsub maximum minimum where lerp addcmul pow
add_ sub_ mul_ div_ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__
__imul__ __truediv__ __rtruediv__ __itruediv__ __pow__
"""

BROADCASTING = {
    getattr(home, name)
    for home in (torch, Tensor)
    for name in _NAMES.split()
    if hasattr(home, name)
} | {F.scaled_dot_product_attention}
"""Operations that broadcast their arguments against each other, row by row."""


def by_broadcasting(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Give the parameter a row for each example; broadcasting and autograd do the rest."""
    tensors = flat_tensors((args, tuple(kwargs.values())))
    batch = [(t, a) for t, a in zip(tensors, tape.here.axes, strict=True) if a is not None]
    ndim = max(t.ndim for t in tensors)
    # Broadcasting counts axes from the last.
    places = {axis - t.ndim for t, axis in batch}
    rows = {t.shape[axis] for t, axis in batch}
    place = places.pop()
    leaves = [t for t in tensors if isinstance(t, LeafTensor)]
    fits = all(t.ndim < -place or t.shape[place] == 1 for t in leaves)
    if places or len(rows) > 1 or not fits:
        return by_vmap(tape, func, args, kwargs)

    def widen(leaf: LeafTensor) -> Tensor:
        return per_row(tape, leaf, ndim, max(rows), func.__name__, ndim + place)

    named = {key: change_leaves(value, widen) for key, value in kwargs.items()}
    return func(*change_leaves(args, widen), **named)


def by_expanding(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A token expanded to the batch: from here on every row belongs to its example."""
    leaf, result = args[0], func(*args, **kwargs)
    axis = tape.settle(result)
    if axis is None:
        if tape.grows(result):
            raise UnsupportedLayer(explain_missing_rule(tape, leaf, func))
        return tape.derive(func, *args, **kwargs)
    missing, rows = result.ndim - leaf.ndim, result.shape[axis]
    own = 1 if axis < missing else leaf.shape[axis - missing]
    if own == 1:
        wide = per_row(tape, leaf, result.ndim, rows, func.__name__, axis)
    else:
        # All rows of the parameter for each example, side by side.
        copies = own_copies(tape, leaf, func.__name__)
        times = rows // (own * tape.examples)
        copies = copies.repeat_interleave(times, dim=0).movedim(0, axis - missing)
        wide = copies.flatten(axis - missing, axis - missing + 1)
        wide = wide.reshape(*[1] * missing, *wide.shape)
    tiles = [size // have for size, have in zip(result.shape, wide.shape, strict=True)]
    return wide.repeat(tiles)


def explain_missing_rule(tape: Tape, leaf: Tensor, func: Callable[..., Any]) -> str:
    """What to say of a parameter that is copied for the examples in a way that has no rule."""
    return (
        f'"{tape.name_of(leaf)}" is spread over the batch by {func.__name__}, which has no rule. '
        "Use expand or repeat with the examples on one axis, or freeze the parameter."
    )
