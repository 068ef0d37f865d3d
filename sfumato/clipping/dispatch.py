"""What an operation with a parameter among its arguments is: the choice of a rule.

`Tape.meet` says where the examples are. Then, in this order: an operation that meets no example
makes a new `LeafTensor`; one with a rule (`rules`) follows it; one that broadcasts gives the
parameter a row for each example (`rules/elementwise`); anything else runs one example at a time
(`fallback`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sfumato.clipping.batch_axis import flat_tensors
from sfumato.clipping.fallback import by_vmap
from sfumato.clipping.leaf import LeafTensor
from sfumato.clipping.rules import RULES
from sfumato.clipping.rules.elementwise import (
    BROADCASTING,
    EXPANDING,
    by_broadcasting,
    by_expanding,
    explain_missing_rule,
)
from sfumato.clipping.rules.embedding import replace_gather
from sfumato.clipping.tape import Tape
from sfumato.errors import UnsupportedLayer


def dispatch(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Do what the operation does, so that per-example gradients can be had."""
    if not torch.is_grad_enabled():
        return func(*args, **kwargs)
    tensors = flat_tensors((args, tuple(kwargs.values())))
    expands = func in EXPANDING and isinstance(args[0], LeafTensor)
    if func in PASSIVE or (not expands and all(isinstance(t, LeafTensor) for t in tensors)):
        return _derive(tape, func, args, kwargs)
    meeting = tape.meet(func.__name__, tensors)
    if meeting is not None and expands:
        return by_expanding(tape, func, args, kwargs)
    if meeting is None or all(axis is None for axis in meeting.axes):
        return _derive(tape, func, args, kwargs)
    if func in RULES:
        return _by_rule(tape, func, args, kwargs)
    if func in BROADCASTING:
        return by_broadcasting(tape, func, args, kwargs)
    return by_vmap(tape, func, args, kwargs)


def _derive(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """An operation without examples, which must not bring them in by its result's size."""
    result = tape.derive(replace_gather(func, args, kwargs), *args, **kwargs)
    leaves = [t for t in flat_tensors((result,)) if isinstance(t, LeafTensor)]
    if leaves and tape.grows(result):
        raise UnsupportedLayer(explain_missing_rule(tape, leaves[0], func))
    return result


def _by_rule(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Follow the rule, with the examples on the first axis of its first argument."""
    rule = RULES[func]
    if rule.any_axis:
        return rule.follow(tape, *args, **kwargs)
    axis, *others = tape.here.axes
    if axis is None or not isinstance(args[0] if args else None, Tensor):
        return by_vmap(tape, func, args, kwargs)
    if any(other is not None for other in others):
        return by_vmap(tape, func, args, kwargs)
    if axis == 0:
        return rule.follow(tape, *args, **kwargs)
    if rule.trailing_axes is None or args[0].ndim - axis <= rule.trailing_axes(*args, **kwargs):
        return by_vmap(tape, func, args, kwargs)
    return rule.follow(tape, args[0].movedim(axis, 0), *args[1:], **kwargs).movedim(0, axis)


PASSIVE = {Tensor.type_as, Tensor.to, Tensor.view_as, Tensor.reshape_as, Tensor.__setitem__}
"""Operations that look at the batch's type or shape only. (What is written into a tensor is found
later, as a gradient that reached a parameter on another way, and refused.)"""
