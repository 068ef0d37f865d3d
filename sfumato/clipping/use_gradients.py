"""What a backward pass leaves for each use of a parameter: norms, gradients, weighted sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.clipping import layer_algebra, lookups
from sfumato.clipping.arithmetic import (
    square_norm,
    sum_type,
    to_sum_type,
    weighted_sum,
    zero_broken_rows,
)
from sfumato.clipping.leaf import plain
from sfumato.clipping.param_use import ParamUse
from sfumato.clipping.tape import Tape


@dataclass(frozen=True)
class UseGradients:
    """What the backward pass left for one use of a parameter.

    `tensors` are what `Tape.keep` asked for: the per-example gradient, or for a product that stores
    none its input and output gradient. They are None if the use had no effect on the losses.
    """

    part: ParamUse
    value: Tensor
    extra: Tensor | None
    tensors: tuple[Tensor | None, ...]
    examples: int

    def square_norm(self) -> Float[Tensor, " n"] | float:
        """Squared norms; 0 for a product that stores none, whose norms `Tape.norms` has already."""
        (first, *others) = self.tensors or (None,)
        if first is None or others:
            return 0.0
        if self.part.kind == "rows":
            assert self.extra is not None
            return lookups.table_square_norm(self.extra, first, self.examples)
        return square_norm(first)

    def per_example(self) -> Tensor | None:
        """The per-example gradient of the value, formed if need be."""
        (first, *_) = self.tensors or (None,)
        if first is None:
            return None
        if self.part.kind == "rows":
            assert self.extra is not None
            return lookups.table_gradients(self.extra, first, self.value.shape, self.examples)
        return first.reshape(self.examples, *self.value.shape)

    def weighted(self, factors: Tensor, broken: Tensor | None) -> Tensor:
        """The sum over examples of factor times gradient; examples that are broken are left out."""
        kept = [t if t is None else zero_broken_rows(t, broken) for t in self.tensors]
        if not kept or kept[0] is None:
            return torch.zeros_like(self.value)
        if len(kept) == 2:
            x, g = kept
            assert x is not None
            assert g is not None
            assert self.part.geometry is not None
            with plain():
                return layer_algebra.weighted_gradient(
                    x, g, factors, self.value, self.part.geometry
                )
        if self.part.kind == "rows":
            assert self.extra is not None
            return lookups.table_weighted_gradient(self.extra, kept[0], factors, self.value.shape)
        gradient = to_sum_type(kept[0].reshape(self.examples, *self.value.shape))
        return weighted_sum(gradient, factors.to(gradient.dtype))


BUNDLED = 1 << 16
"""Numbers of a parameter up to which its gradients go into a bundle: to copy them costs little."""


@dataclass(frozen=True)
class SmallGradients:
    """Per-example gradients of small parameters, side by side: measured and added up at once."""

    members: list[UseGradients]
    group: int
    rows: Float[Tensor, "n d"]

    def weighted(self, factors: Tensor, broken: Tensor | None) -> list[Tensor]:
        """For each member, the sum over examples of factor times gradient."""
        total = factors.to(self.rows.dtype) @ zero_broken_rows(self.rows, broken)
        parts = total.split([one.value.numel() for one in self.members])
        pairs = zip(parts, self.members, strict=True)
        return [part.reshape(one.value.shape) for part, one in pairs]


def group_small_gradients(
    kept: Sequence[UseGradients], group_of: Mapping[str, int]
) -> tuple[list[SmallGradients], list[UseGradients]]:
    """The gradients of biases, scales and tokens side by side, and the uses that are left over.

    A network has hundreds of them. One by one, a GPU would wait for the next more than it works.
    """
    members: dict[tuple[int, torch.dtype], list[UseGradients]] = {}
    single = []
    for one in kept:
        first = one.tensors[0] if one.part.kind == "gradient" and one.tensors else None
        if first is None or one.value.numel() > BUNDLED:
            single.append(one)
        else:
            kind = (group_of[one.part.path], sum_type(first))
            members.setdefault(kind, []).append(one)
    bundles = []
    for (group, dtype), some in members.items():
        rows = [one.tensors[0].reshape(one.examples, -1).to(dtype) for one in some]  # pyright: ignore
        bundles.append(SmallGradients(some, group, torch.cat(rows, dim=1)))
    return bundles, single


def sort_kept(tape: Tape, found: Sequence[Tensor | None]) -> list[UseGradients]:
    """Hand the kept tensors to their parts, in the order they were asked for."""
    queue, kept = list(found), []
    for part, value, extra in zip(tape.parts, tape.values, tape.extras, strict=True):
        count = 1
        if part.kind == "product" and part.method != "store":
            count = 2
        tensors, queue = tuple(queue[:count]), queue[count:]
        kept.append(UseGradients(part, value, extra, tensors, tape.examples))
    assert not queue
    return kept


def pull_back(
    value: Tensor, parameters: Sequence[Tensor], gradient: Float[Tensor, "n ..."]
) -> tuple[Tensor, ...]:
    """Per-example gradients of parameters, from those of a value that is computed from them."""

    def one(example: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, parameters, example, retain_graph=True)

    # Not is_grads_batched: its older rules take one example after the other where they know none.
    return torch.vmap(one)(gradient)
