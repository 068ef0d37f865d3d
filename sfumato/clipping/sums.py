"""From what a backward pass left to clip factors, and to the sum of clipped gradients.

For every group of parameters that is clipped together there are two squared norms an example: the
norm itself, and one that lies above all that rounding may add to what is summed up. Factors come
from the second, so an example may be clipped a little more than asked, never less.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sfumato.clipping import standardised
from sfumato.clipping.arithmetic import square_norm, sum_of_squares, weighted_sum, zero_broken_rows
from sfumato.clipping.factors import Clipping, clip_factors
from sfumato.clipping.method_choice import joint_names
from sfumato.clipping.tape import Tape
from sfumato.clipping.use_gradients import (
    SmallGradients,
    UseGradients,
    group_small_gradients,
    pull_back,
    sort_kept,
)
from sfumato.device_transfer import from_device
from sfumato.errors import UnsupportedLayer

Squares = Float[Tensor, "groups 2 n"]
Tell = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
"""What is told losses, norms, factors and mask as soon as they are there, before the sums are."""


@dataclass(frozen=True)
class Clipped:
    """What `GradientClipper.clip` returns: sums by parameter name, in float32, and what they came
    from.
    """

    total: dict[str, Tensor]
    norms: Float[Tensor, " n"]
    factors: Float[Tensor, "groups n"]
    losses: Float[Tensor, " n"]


@dataclass(frozen=True)
class SortedGradients:
    """What the backward pass left, sorted by how it is measured and added up."""

    bundles: list[SmallGradients]
    single: list[UseGradients]
    several: dict[str, Tensor]
    """Per-example gradients of parameters with several uses, added up."""


def clip_and_sum(
    tape: Tape,
    losses: Tensor,
    found: Sequence[Tensor | None],
    clipping: Clipping,
    margin: float,
    mask: Bool[Tensor, " n"] | None,
    tell: Tell | None = None,
    *,
    retain: bool = False,
) -> Clipped:
    """Norms, factors and sums; `found` are the gradients of the tape's dummies.

    An example whose gradient is not finite spoils the sums, so then they are made once more without
    it. Finding that out means waiting for the GPU. A caller that gives `tell` avoids the wait and
    must look at the norms itself.
    """
    kept = sort_kept(tape, found[len(tape.norms) :])
    squares, left = _measure(tape, kept, found[: len(tape.norms)])
    norms = squares[:, 0].sum(dim=0).sqrt()
    bound = clipping.max_norm / tape.num_groups**0.5
    above = squares[:, 1].sqrt()
    factors = clip_factors(above, bound, clipping.style, clipping.stability, margin)
    factors = torch.where(norms.isfinite(), factors, 0.0)
    if mask is not None:
        factors = torch.where(mask, factors, 0.0)
    if tell is not None:
        tell(losses.detach(), norms, factors, mask)
    total = _sums(tape, left, norms, factors, look=tell is None, again=retain)
    return Clipped(total, norms, factors, losses.detach())


def norms_of(tape: Tape, found: Sequence[Tensor | None]) -> Float[Tensor, " n"]:
    """How long each example's gradient is; `found` are the gradients of the tape's dummies."""
    kept = sort_kept(tape, found[len(tape.norms) :])
    squares, _ = _measure(tape, kept, found[: len(tape.norms)])
    return squares[:, 0].sum(dim=0).sqrt()


def _sums(
    tape: Tape, left: SortedGradients, norms: Tensor, factors: Tensor, *, look: bool, again: bool
) -> dict[str, Tensor]:
    """The sums; if it is to `look`, without examples that are not finite."""
    if not look:
        return _add_up(tape, left, factors, None, again=again)
    broken = ~norms.isfinite()
    if torch.compiler.is_compiling():
        return _add_up(tape, left, factors, broken, again=again)
    # Whether one is broken arrives while the sums are made: nearly always they are good.
    is_spoilt = from_device(broken.any())
    total = _add_up(tape, left, factors, None, again=True)
    return _add_up(tape, left, factors, broken, again=again) if bool(is_spoilt()) else total


def _measure(
    tape: Tape, kept: list[UseGradients], from_products: Sequence[Tensor | None]
) -> tuple[Squares, SortedGradients]:
    """Squared norms: from the products, from kept gradients, and from sums of several uses.

    Several uses may cancel (a loss less a product with the weights), so what is measured is what
    is added up: there is no difference that rounding could hide.
    """
    zero = torch.zeros(2, tape.examples, device=tape.seed.device)
    rows = [zero if found is None else found for found in from_products]
    joint = joint_names(tape.parts)
    apart = [one for one in kept if joint.isdisjoint(one.part.sources)]
    bundles, single = group_small_gradients(apart, tape.group_of)
    for some in bundles:
        rows[some.group] = rows[some.group] + sum_of_squares(some.rows)
    for one in single:
        group = tape.group_of[one.part.path]
        rows[group] = rows[group] + _square_norm(one, tape)
    several: dict[str, Tensor] = {}
    for one in kept:
        gradient = None if joint.isdisjoint(one.part.sources) else one.per_example()
        if gradient is None:
            continue
        names = list(one.part.sources)
        pulled = pull_back(one.value, [tape.parameters[name] for name in names], gradient)
        for name, more in zip(names, pulled, strict=True):
            several[name] = several[name] + more if name in several else more
    for name, gradient in several.items():
        group = tape.group_of[name]
        rows[group] = rows[group] + square_norm(gradient)
    return torch.stack(rows), SortedGradients(bundles, single, several)


def _square_norm(one: UseGradients, tape: Tape) -> Float[Tensor, " n"] | float:
    eps = one.part.standardised if one.part.method == "store" else None
    if eps is None or not one.tensors or one.tensors[0] is None:
        return one.square_norm()
    return standardised.standardised_square_norm(
        one.tensors[0], tape.parameters[one.part.path], eps
    )


def _add_up(
    tape: Tape,
    left: SortedGradients,
    factors: Tensor,
    broken: Tensor | None,
    *,
    again: bool = False,
) -> dict[str, Tensor]:
    """The sums of clipped gradients, pulled back from where they met the batch.

    `again`: it may have to be done once more.
    """
    total = {}
    for name, each in left.several.items():
        sound = zero_broken_rows(each, broken)
        total[name] = weighted_sum(sound, factors[tape.group_of[name]].to(each.dtype))
    values: list[Tensor] = []
    sums: list[Tensor] = []
    for some in left.bundles:
        values += [one.value for one in some.members]
        sums += some.weighted(factors[some.group], broken)
    for one in left.single:
        values.append(one.value)
        sums.append(one.weighted(factors[tape.group_of[one.part.path]], broken))
    parts = [one.part for some in left.bundles for one in some.members]
    met = {name for part in (*parts, *(one.part for one in left.single)) for name in part.sources}
    names = [name for name in tape.parameters if name in met]
    if names:
        sums = [summed.to(value.dtype) for summed, value in zip(sums, values, strict=True)]
        wanted = [tape.parameters[n] for n in names]
        found = torch.autograd.grad(values, wanted, sums, retain_graph=again, allow_unused=True)
        for name, gradient in zip(names, found, strict=True):
            if gradient is None:
                raise UnsupportedLayer(tape.lost_track(f"what uses {name}"))
            total[name] = gradient.detach()
    return total
