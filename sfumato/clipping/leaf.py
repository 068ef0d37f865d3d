"""The tensor that a parameter is during a recorded pass, and how it gets into the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

# The only switch that makes a LeafTensor an ordinary tensor in its own `__torch_function__`. It has
# no public name; torch's own tensors use it in the same place.
plain = torch._C.DisableTorchFunctionSubclass
"""Inside this context a LeafTensor is an ordinary tensor."""


class TapeCell:
    """Where a type of LeafTensors finds the tape of the pass that is being recorded."""

    tape: Any = None


class LeafTensor(Tensor):
    """A parameter, or something computed from parameters alone, during a recorded pass."""

    cell: ClassVar[TapeCell]
    dispatch: ClassVar[Callable[..., Any]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Tell the tape of every operation a LeafTensor takes part in."""
        tape = cls.cell.tape
        with plain():
            if tape is None:
                return func(*args, **(kwargs or {}))
            return cls.dispatch(tape, func, args, kwargs or {})


def new_leaf_type(dispatch: Callable[..., Any]) -> type[LeafTensor]:
    """A LeafTensor type of its own for one recorder, so that two of them never meet."""
    return type(
        "BoundLeaf", (LeafTensor,), {"cell": TapeCell(), "dispatch": staticmethod(dispatch)}
    )


def change_leaves(item: Any, change: Callable[[LeafTensor], Any]) -> Any:
    """The same lists and tuples with something else in the place of LeafTensors.

    (Not a function inside its callers: one that calls itself there refers to itself, and keeps the
    whole pass in memory until Python looks for such circles.)
    """
    if isinstance(item, LeafTensor):
        return change(item)
    if isinstance(item, list | tuple):
        return type(item)(change_leaves(one, change) for one in item)
    return item


@contextmanager
def parameters_as_leaves(
    model: nn.Module, parameters: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> Iterator[None]:
    """The model's parameters are LeafTensors inside: for a forward pass."""
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    by_id = {id(parameters[name]): leaf for name, leaf in leaves.items()}
    # In the dictionaries themselves: set as an attribute, what is no nn.Parameter is refused.
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in by_id:
                places.append((module, name, parameter))
    try:
        for module, name, parameter in places:
            module._parameters[name] = by_id[id(parameter)]  # pyright: ignore
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
