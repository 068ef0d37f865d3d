"""The exact fallback for operations without a rule: once per example, under vmap.

Each example has its own copy of the parameter, whose gradient is the per-example gradient. Rules
that give a parameter a row for each example use `per_row`, and those that are too narrow for a
call hand it to `by_vmap`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.clipping.batch_axis import flat_tensors
from sfumato.clipping.leaf import LeafTensor
from sfumato.clipping.tape import Tape
from sfumato.errors import UnsupportedLayer


def by_vmap(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The exact fallback: the operation once an example, each with its own copy of the leaf."""
    names = list(kwargs)
    everything = [list(args), [kwargs[name] for name in names]]
    leaf = leaf_among(args, kwargs)
    at_once = None
    if tape.survey:
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            raise UnsupportedLayer(no_rule(tape, leaf, func))
        with torch.no_grad():
            at_once = func(*args, **kwargs)
        tape.settle(at_once)
    out = tape.here.out
    if out is None:
        raise UnsupportedLayer(no_rule(tape, leaf, func))
    tensors: list[Tensor] = []
    dims: list[int | None] = []
    recipe = _take(tape, everything, tensors, dims, func, iter(tape.here.axes))

    def one(*values: Tensor) -> Any:
        positional, named = _give(recipe, values)
        return func(*positional, **dict(zip(names, named, strict=True)))

    try:
        result = torch.vmap(one, tuple(dims), out_dims=out, randomness="different")(*tensors)
        result = result.flatten(out, out + 1)
    except (RuntimeError, ValueError, IndexError, AttributeError) as problem:
        raise UnsupportedLayer(no_rule(tape, leaf, func)) from problem
    if at_once is not None and not _same(result, at_once):
        # One example at a time is another operation than all at once: this one looks at several.
        raise UnsupportedLayer(no_rule(tape, leaf, func))
    return result


@dataclass(frozen=True)
class _Place:
    """Where in the list of tensors an argument went."""

    number: int


def _take(
    tape: Tape,
    item: Any,
    tensors: list[Tensor],
    dims: list[int | None],
    func: Callable[..., Any],
    axes: Iterator[int | None],
) -> Any:
    """Move the tensors out of nested arguments, leaving their places."""
    if isinstance(item, list | tuple):
        return type(item)([_take(tape, one, tensors, dims, func, axes) for one in item])
    if not isinstance(item, Tensor):
        return item
    axis = next(axes)
    if isinstance(item, LeafTensor):
        value, axis = own_copies(tape, item, func.__name__), 0
        if tape.survey:
            tape.parts[-1].has_rule = False
    else:
        value = item if axis is None else item.unflatten(axis, (tape.examples, -1))
    tensors.append(value)
    dims.append(axis)
    return _Place(len(tensors) - 1)


def _give(item: Any, values: Sequence[Tensor]) -> Any:
    """Put tensors back where they were."""
    if isinstance(item, _Place):
        return values[item.number]
    return (
        type(item)([_give(one, values) for one in item]) if isinstance(item, list | tuple) else item
    )


def own_copies(tape: Tape, leaf: Tensor, operation: str) -> Tensor:
    """One copy of a parameter for each example, whose gradient is the per-example gradient."""
    tape.open(leaf, "gradient", operation)
    return leaf.detach() + tape.keep((tape.examples, *leaf.shape), leaf.dtype)


def per_row(
    tape: Tape, leaf: Tensor, ndim: int, rows: int, operation: str, axis: int = 0
) -> Tensor:
    """A copy of a parameter for each row of a batch: `ndim` axes, that of the rows at `axis`."""
    shape = (1,) * (ndim - leaf.ndim) + tuple(leaf.shape)
    tape.open(leaf, "gradient", operation)
    own = tape.keep((tape.examples, *shape[:axis], *shape[axis + 1 :]), leaf.dtype)
    copies = leaf.detach().reshape(shape) + own.movedim(0, axis)
    each = rows // max(1, tape.examples)
    return copies if each == 1 else copies.repeat_interleave(each, dim=axis)


def _same(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    scale = other.abs().amax().clamp(min=1e-30) if other.numel() else 1.0
    wrong = (one.detach() - other).abs() > 1e-3 * scale
    return not bool((wrong & other.isfinite()).any())


def leaf_among(args: Any, kwargs: Any) -> Tensor:
    """The first parameter among the arguments of an operation."""
    return next(
        t for t in flat_tensors((args, tuple(kwargs.values()))) if isinstance(t, LeafTensor)
    )


def no_rule(tape: Tape, leaf: Tensor, func: Callable[..., Any]) -> str:
    """What to say of an operation that cannot be made one example at a time."""
    return (
        f'"{tape.name_of(leaf)}" is used by {func.__name__}, which has no rule and cannot be run '
        "one example at a time. Write a rule for it with @layer_rule, or freeze the parameter."
    )
