"""What a model is given: every tensor is seen, wherever it lies, and settings stay as they are."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.utils._pytree as tree
from torch import Tensor

from sfumato.engine.outputs import tensors_of
from sfumato.errors import ConfigError, PrivacyError

FREE = (Tensor, str, bool, type(None))
"""What may be another in every pass: the model is examined for each string, and each flag."""


class CallArguments(NamedTuple):
    """The arguments of a call, one after the other, and how they lie in lists, tuples and dicts."""

    values: list[Any]
    spec: tree.TreeSpec

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "CallArguments":
        """Those of a call; what may hide a tensor is refused."""
        given = cls(*tree.tree_flatten((tuple(args), dict(kwargs))))
        for value in given.values:
            if not isinstance(value, Hashable) or tensors_of(_inside(value)):
                raise ConfigError(
                    f"the model was given a {type(value).__name__}, in which examples cannot be "
                    "followed. Give tensors, by themselves or in lists, tuples and dicts."
                )
        return given

    def call(self, forward: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call a forward method with these values in their places."""
        args, kwargs = tree.tree_unflatten(values, self.spec)
        return forward(*args, **kwargs)

    @property
    def kind(self) -> Any:
        """What a layout is made for: shapes of rows, and settings, by which a model may branch."""
        kinds = [
            (v.shape[1:], v.dtype) if isinstance(v, Tensor) else (type(v), v) for v in self.values
        ]
        return tuple(kinds), self.spec


class ConstantArguments:
    """What the arguments hold besides tensors, strings and flags: the same in every pass.

    A number that is another in every batch may be a number of the batch: one example more would
    change the gradients of all.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse an argument with another number, or of another length, than it had before."""
        for name, value in [*enumerate(args), *kwargs.items()]:
            values, spec = tree.tree_flatten(value)
            now = spec, [v for v in values if not isinstance(v, FREE)]
            if self._known.setdefault(name, now) != now:
                raise PrivacyError(
                    f'the argument "{name}" of the model has another number, or another length, '
                    "than in an earlier pass. If it depends on the batch (1 / len(x), a mean), one "
                    "example more changes the gradients of all, and the epsilon of earlier steps "
                    "does not hold: begin again without it. A schedule is an attribute of the "
                    "model, set between the steps."
                )


def _inside(value: Any) -> list[Any]:
    """What an object holds, if it is no tensor."""
    if isinstance(value, Tensor):
        return []
    slots = getattr(type(value), "__slots__", ())
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, s, None) for s in slots)]
