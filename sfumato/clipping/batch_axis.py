"""Which axis of a tensor holds the examples, told by looking twice.

A tensor that meets a parameter may carry the batch without a gradient that says so: labels, the
features of a frozen backbone, a constant expanded to the number of examples. And the batch need
not be the first axis. So the model runs with two numbers of examples that have no factor in
common, and the shapes of all its operations are compared. An axis that grows with the examples
holds them; one that is the same both times does not, whatever its size.

Where an example has several rows on that axis (windows, heads), they must stand side by side. Sizes
do not tell: rows that are interleaved give other gradients than autograd, which `admit` finds.
"""

import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from sfumato.clipping.leaf import LeafTensor

MANY, FEW = 5, 3
"""Numbers of examples a model is looked at with: first to write down shapes, then to compare."""

Shape = tuple[int, ...]


class ExampleAxis(NamedTuple):
    """Where the examples are when a parameter meets them."""

    axes: tuple[int | None, ...]
    """For each tensor among the arguments, the axis of examples."""
    out: int | None
    """The same for the result."""


NOWHERE = ExampleAxis((), None)


class Shapes(NamedTuple):
    """One operation: what it is called, and the shapes it takes and gives."""

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]


class AnotherPath(Exception):
    """The two passes did not make the same operations, so nothing can be compared."""


class ShapeRecorder(TorchFunctionMode):
    """Sees every operation of a forward pass: writes down its shapes, or finds them again."""

    current: ClassVar[threading.local] = threading.local()
    """In each thread, the innermost of those that look."""

    def __init__(self, before: "ShapeRecorder | None" = None) -> None:
        super().__init__()
        self.seen: list[Shapes] = [] if before is None else before.seen
        self.finds = before is not None
        self.count = 0
        self.here: Shapes | None = None
        """While finding: the operation that is being made, as it was with many examples."""

    def __enter__(self) -> "ShapeRecorder":
        self.before = getattr(self.current, "watch", None)
        self.current.watch = self
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        self.current.watch = self.before
        super().__exit__(*problem)
        if problem[0] is None and self.finds and self.count != len(self.seen):
            raise AnotherPath

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the shapes before the operation changes them, and after."""
        kwargs = kwargs or {}
        if self.current.watch is not self:
            # Another engine is looking at another model inside this one's loss.
            return func(*args, **kwargs)
        name = func.__name__
        if not self.finds:
            inputs = shapes_of((args, tuple(kwargs.values())))
            result = func(*args, **kwargs)
            self.seen.append(Shapes(name, inputs, shapes_of((result,))))
            return result
        if self.count >= len(self.seen):
            raise AnotherPath
        self.here, self.count = self.seen[self.count], self.count + 1
        if self.here.name != name:
            raise AnotherPath
        leaves = [
            t for t in flat_tensors((args, tuple(kwargs.values()))) if isinstance(t, LeafTensor)
        ]
        try:
            if leaves:
                # Said outright: a function may be announced by a form that says nothing itself.
                return type(leaves[0]).__torch_function__(func, types, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.here = None


def flat_tensors(args: Any) -> list[Tensor]:
    """The tensors among arguments, looking into lists and tuples."""
    found: list[Tensor] = []
    for item in args:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found.extend(flat_tensors(item))
    return found


def shapes_of(args: Any) -> tuple[Shape, ...]:
    """The shapes of the tensors among arguments."""
    return tuple(tuple(t.shape) for t in flat_tensors(args))


def axis_of_examples(few: Shape, many: Shape) -> int | None:
    """The one axis that grows with the number of examples, or None if nothing changes.

    Raises `ValueError` where something changes that is no axis of examples: several axes, or one
    that does not have the same number of rows for each example.
    """
    if few == many:
        return None
    if len(few) != len(many):
        raise ValueError
    changed = [i for i, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
    if len(changed) != 1 or few[changed[0]] * MANY != many[changed[0]] * FEW:
        raise ValueError
    return changed[0]
