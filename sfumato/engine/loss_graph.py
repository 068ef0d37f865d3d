"""What a loss does outside the recorded pass, as far as its graph shows.

The engine sees the loss as a number for each example, and cannot compute it again with other
examples. But autograd's graph says which operations led from the model's output to it. Two mistakes
show there: parameters of the model that are used without the pass that is clipped, and factors that
are the number of examples.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfumato.clipping.checks import COMPILED_LOSS
from sfumato.clipping.mixing import PLACE_MATTERS
from sfumato.errors import ConfigError, PrivacyError

NEAR = 1e-6
"""Relative: a factor is a float32 number."""


class GraphNodes(NamedTuple):
    """The nodes of autograd's graph that a pass has made, by the numbers they get in turn."""

    first: int
    end: int


class OutsideTensors(NamedTuple):
    """What a loss uses besides what the pass has made."""

    leaves: list[Tensor]
    factors: list[Tensor]
    """Constants that it multiplies with, or divides by, in the order of the graph."""


def next_node() -> int:
    """The number after which autograd's next nodes come."""
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        return _number(leaf.view(()).grad_fn)


def find_outside(loss: Tensor, span: GraphNodes) -> OutsideTensors:
    """Walk the graph of the loss, up to what the pass has made."""
    found = OutsideTensors([], [])
    open_nodes: list[Any] = [loss.grad_fn]
    known: set[Any] = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in known or span.first < _number(node) < span.end:
            continue
        known.add(node)
        if node.name() == "CompiledFunctionBackward":
            raise ConfigError(COMPILED_LOSS)
        if hasattr(node, "variable"):
            found.leaves.append(node.variable)
        if node.name().startswith(("MulBackward", "DivBackward")):
            saved = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
            found.factors.extend(_constant(one) for one in saved if one is not None)
        open_nodes.extend(node for node, _ in reversed(node.next_functions))
    return found


def refuse_parameters(leaves: Sequence[Tensor], names: dict[int, str]) -> None:
    """Refuse a loss that uses parameters of the model itself: those gradients would be lost."""
    for leaf in leaves:
        if id(leaf) in names:
            raise ConfigError(
                f'the loss uses "{names[id(leaf)]}" outside the model\'s forward pass in training '
                "mode, so that part of its gradient would be lost. Use all parameters inside "
                "model.forward (call a head there, and return what a penalty needs), or leave a "
                "penalty on weights to the optimizer's weight_decay."
            )


class LossFactors:
    """The constants in the loss of some batches, by the number of examples in these.

    A factor that is the number of examples, or moves with it, makes the gradient of one example
    depend on whether others are there.
    """

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}

    def wants(self, examples: int) -> bool:
        """Whether batches of two sizes are not known yet, and this is of another."""
        return len(self._seen) < 2 and examples not in self._seen

    def check(self, examples: int, factors: Sequence[Tensor]) -> None:
        """Refuse factors that count the examples."""
        now = [_value(one) for one in factors]
        counts = not self._seen and examples > 2 and any(_is_count(f, examples) for f in now)
        for before, then in self._seen.items():
            if before != examples and len(then) == len(now):
                counts |= any(
                    _moves_with(pair, before / examples) for pair in zip(then, now, strict=True)
                )
        if counts:
            raise PrivacyError(
                f"{PLACE_MATTERS} This batch is in no step. (A fixed factor that is as large as "
                "this batch by accident: give another physical batch size.)"
            )
        if self.wants(examples):
            self._seen[examples] = now


def _is_count(factor: float, examples: int) -> bool:
    return abs(factor - examples) <= NEAR * examples or abs(factor * examples - 1) <= NEAR


def _moves_with(pair: tuple[float, float], ratio: float) -> bool:
    """Whether the two are as the numbers of examples are to each other, one way or the other."""
    then, now = pair
    return any(
        now != 0 and abs(then / now - wanted) <= NEAR * wanted for wanted in (ratio, 1 / ratio)
    )


def _value(factor: Tensor) -> float:
    """The one number that a constant holds; no number if they are several."""
    if not factor.numel() or factor.is_complex():
        return float("nan")
    low, high = factor.aminmax()
    return float(low) if bool(low == high) else float("nan")


def _constant(saved: Any) -> Tensor:
    made = saved.detach() if isinstance(saved, Tensor) else torch.tensor(saved)
    if isinstance(saved, Tensor) and saved.requires_grad:
        return made.new_empty(0)
    return made


def _number(node: Any) -> int:
    # What orders nodes on the way back; the profiler's name for it, and there is no other.
    return node._sequence_nr()
