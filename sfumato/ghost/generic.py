"""Operations without a rule of their own, exactly all the same.

Where a parameter broadcasts against the batch, or is expanded to it, it is given a row for each
example, and autograd returns the per-example gradient by itself. Anything else runs once an example
under vmap, each with its own copy of the parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfumato.errors import UnsupportedLayer
from sfumato.ghost.tape import Leaf, Tape, flat


def by_broadcasting(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Give the parameter a row for each example; broadcasting and autograd do the rest."""
    tensors = flat((args, tuple(kwargs.values())))
    batch = [t for t in tensors if not isinstance(t, Leaf) and t.requires_grad]
    ndim, rows = max(t.ndim for t in tensors), batch[0].shape[0]
    leaves = [t for t in tensors if isinstance(t, Leaf)]
    fits = all(t.ndim < ndim or t.shape[0] == 1 for t in leaves)
    if batch[0].ndim != ndim or rows % tape.examples or not fits:
        return by_vmap(tape, func, args, kwargs)

    def widen(item: Any) -> Any:
        if isinstance(item, Leaf):
            return per_row(tape, item, ndim, rows, func.__name__)
        if isinstance(item, list | tuple):
            return type(item)(widen(one) for one in item)
        return item

    return func(*widen(args), **{key: widen(value) for key, value in kwargs.items()})


def by_expanding(
    tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any, kind: type[Leaf]
) -> Any:
    """A token expanded to the batch: from here on every row belongs to its example."""
    leaf = args[0]
    if not isinstance(leaf, Leaf):
        return func(*args, **kwargs)
    result = func(*args, **kwargs)
    rows = result.shape[0] if result.ndim else 0
    single = result.ndim > leaf.ndim or (leaf.ndim > 0 and leaf.shape[0] == 1)
    if tape.survey:
        # A guess, by size; the survey is made at two sizes, and the guesses must agree.
        is_batch = single and rows > 0 and rows % tape.examples == 0
    else:
        is_batch = tape.expects(leaf, func.__name__)
    if not is_batch:
        return tape.derive(func, args, kwargs, kind)
    wide = per_row(tape, leaf, result.ndim, rows, func.__name__)
    tiles = [size // have for size, have in zip(result.shape, wide.shape, strict=True)]
    return (
        wide.repeat(tiles)
        if "repeat" in func.__name__ or "tile" in func.__name__
        else wide.expand(result.shape)
    )


def by_vmap(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The exact fallback: the operation once an example, each with its own copy of the leaf."""
    names = list(kwargs)
    everything = [list(args), [kwargs[name] for name in names]]
    tensors: list[Tensor] = []
    dims: list[int | None] = []
    recipe = _take(tape, everything, tensors, dims, func)

    def one(*values: Tensor) -> Any:
        positional, named = _give(recipe, values)
        return func(*positional, **dict(zip(names, named, strict=True)))

    try:
        result = torch.vmap(one, in_dims=tuple(dims), randomness="different")(*tensors)
    except (RuntimeError, ValueError) as problem:
        raise UnsupportedLayer(_no_rule(tape, func)) from problem
    if not isinstance(result, Tensor) or result.ndim < 2:
        raise UnsupportedLayer(_no_rule(tape, func))
    return result.flatten(0, 1)


class _Place(NamedTuple):
    """Where in the list of tensors an argument went."""

    number: int


def _take(
    tape: Tape, item: Any, tensors: list[Tensor], dims: list[int | None], func: Callable[..., Any]
) -> Any:
    """Move the tensors out of nested arguments, leaving their places."""
    if isinstance(item, list | tuple):
        return [_take(tape, one, tensors, dims, func) for one in item]
    if not isinstance(item, Tensor):
        return item
    if isinstance(item, Leaf):
        value, dim = own_copies(tape, item, func.__name__), 0
    elif not item.requires_grad:
        value, dim = item, None
    elif item.shape[0] % tape.examples:
        raise UnsupportedLayer(_no_rule(tape, func))
    else:
        value, dim = item.unflatten(0, (tape.examples, -1)), 0
    tensors.append(value)
    dims.append(dim)
    return _Place(len(tensors) - 1)


def _give(item: Any, values: Sequence[Tensor]) -> Any:
    """Put tensors back where they were."""
    if isinstance(item, _Place):
        return values[item.number]
    return [_give(one, values) for one in item] if isinstance(item, list) else item


def own_copies(tape: Tape, leaf: Tensor, operation: str) -> Tensor:
    """One copy of a parameter for each example, whose gradient is the per-example gradient."""
    tape.open(leaf, "gradient", operation)
    return leaf.detach() + tape.keep((tape.examples, *leaf.shape), leaf.dtype)


def per_row(tape: Tape, leaf: Tensor, ndim: int, rows: int, operation: str) -> Tensor:
    """A copy of a parameter for each row of a batch, with axes of size one in front."""
    shape = (1,) * (ndim - leaf.ndim) + tuple(leaf.shape)
    tape.open(leaf, "gradient", operation)
    copies = leaf.detach().reshape(shape) + tape.keep((tape.examples, *shape[1:]), leaf.dtype)
    return (
        copies if rows == tape.examples else copies.repeat_interleave(rows // tape.examples, dim=0)
    )


def _no_rule(tape: Tape, func: Callable[..., Any]) -> str:
    where = tape.parts[-1].path if tape.parts else "a parameter"
    return (
        f'"{where}" is used by {func.__name__}, which has no rule and cannot be run one example at '
        "a time. Write a rule for it with @norm_rule, or freeze the parameter."
    )
