"""Whether the loss of one example looks at another, asked of the very passes that train the model.

The trial before training (`admit`) sees the model alone, on noise, a few examples at a time. Here
one example's loss is sent back through the graph of a real batch. Nothing of it may arrive at
another example: neither at its rows of the inputs, nor where parameters meet it. That sees losses
on whatever a model keeps aside, and branches that depend on chance, on values or on how many there
are. What no graph shows (numbers that are detached, counts, labels) it does not see.

What is computed for an example must also be the same among other examples, and at another place
among them. Otherwise one example more or less changes the gradients of all the others, and the sum
by more than the bound. So some of the batch is computed again in another order, and half of it.

It is asked at times that nobody can foresee, and no number of it is kept.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.clipping.clip import GradientClipper, kind_of_batch
from sfumato.clipping.probe import (
    evaluation_mode,
    examples_at,
    random_state,
    same_state,
    set_random_state,
    without_dropout,
)
from sfumato.clipping.sums import norms_of
from sfumato.clipping.tape import Tape
from sfumato.errors import PrivacyError

EXACT, ROUNDED = 1e-2, 1e-1
"""Share of a tensor's size by which rounding may move it, in float32 and where bfloat16 is used."""
RARELY = 50
"""In the long run, one pass in this many is looked at."""
SOME = 64
"""Examples of a pass that is made for this alone."""
PLACE_MATTERS = (
    "the loss of an example depends on the other examples, on how many they are, or on its place "
    "among them. One example more would change the gradients of all, beyond the norm bound. Give "
    "the loss of each example as it is, without a division by len(batch): the sum is divided by "
    "the expected batch size. Let the model use no number of examples, and no buffer with a row "
    "for each place in the batch."
)
_DICE = random.SystemRandom()  # not torch's, so that nobody else's chance moves


def is_due(before: int, rarely: int | None = RARELY) -> bool:
    """Whether to look at a pass, after this many others of its kind.

    At the first for certain, then with a chance of 1/2, 1/3, ... down to one in `rarely`.
    """
    turns = before + 1
    return _DICE.randrange(turns if rarely is None else min(turns, rarely)) == 0


def refuse_mixing(
    clipper: GradientClipper,
    tape: Tape,
    losses: Tensor,
    inputs: Sequence[Tensor],
    *,
    retain: bool = False,
) -> None:
    """Raise `PrivacyError` if the loss of an example, drawn at random, reaches another.

    `inputs` are those of the pass that can be differentiated, each with the examples first. With
    `retain` the graph can be used once more.
    """
    one = _DICE.randrange(tape.examples)
    dummies = [*tape.norms, *tape.keeps]
    found = clipper.go_back(tape, losses[one], [*inputs, *dummies], retain=retain)
    with torch.no_grad():
        reached = [
            g.reshape(tape.examples, -1).abs().amax(dim=1)
            for g in found[: len(inputs)]
            if g is not None
        ]
        reached.append(norms_of(tape, found[len(inputs) :]))
        far = torch.stack([row.float() for row in reached]).nan_to_num(0.0).amax(dim=0)
        far[one] = 0.0
    if bool(far.any()):
        raise PrivacyError(
            "the loss of one example depends on what the model says of another, or of all of them "
            "together, so no per-example gradient exists. Use a loss, and a model, that looks at "
            "one example at a time: normalise over no batch, compare with no other example. This "
            "batch is in no step. If earlier ones were made like it, their epsilon does not hold: "
            "begin again."
        )


@torch.enable_grad()  # as in the pass itself: a model may look
def place_matters(
    model: nn.Module,
    found_for: Callable[[Tensor], list[Tensor]],
    examples: int,
    fewer: int,
    tolerance: float,
) -> bool:
    """Whether examples get other numbers when all, or `fewer`, have moved on by one place.

    `found_for` computes something for the examples at these places of the batch. Dropout is off. A
    model that draws random numbers all the same is asked in evaluation mode; if it draws there as
    well, nothing can be compared.
    """
    whole = torch.arange(examples)
    orders = [whole, whole.roll(1), whole[:fewer].roll(1)]
    for quiet in (without_dropout, evaluation_mode):
        state = random_state()
        with quiet(model):
            first, *others = ([t.detach() for t in found_for(order)] for order in orders)
        is_steady = same_state(state, random_state())
        set_random_state(state)
        if is_steady:
            return any(
                _differ(one, two, order, examples, tolerance)
                for order, found in zip(orders[1:], others, strict=True)
                for one, two in zip(first, found, strict=False)
            )
    return False


def _differ(before: Tensor, after: Tensor, moved: Tensor, examples: int, tolerance: float) -> bool:
    """Whether the rows of an example are others; what has no rows of examples is not compared."""
    rows, rest = divmod(len(before) if before.ndim else 1, examples)
    if rest or not before.ndim or before.shape[1:] != after.shape[1:]:
        return False
    if len(after) != rows * len(moved) or not before.numel() or not before.is_floating_point():
        return False
    one, two = before.unflatten(0, (examples, rows))[moved.to(before.device)].flatten(0, 1), after
    # What is not finite says nothing; and where all are near zero, rounding is not.
    scale = one.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1e-3)
    low = one.dtype in (torch.bfloat16, torch.float16)
    return bool(((one - two).abs() > (ROUNDED if low else tolerance) * scale).any())


def refuse_places(
    clipper: GradientClipper, found_for: Callable[[Tensor], list[Tensor]], examples: int, key: Any
) -> None:
    """Raise `PrivacyError` if some of the examples of a real batch get other numbers elsewhere."""
    some = min(examples, SOME)
    tolerance = ROUNDED if any(part.rounded for part in clipper.layouts[key]) else EXACT
    if place_matters(clipper.model, found_for, some, (some + 1) // 2, tolerance):
        raise PrivacyError(f"{PLACE_MATTERS} This batch is in no step.")


def check_mixing(
    clipper: GradientClipper,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    examples: int,
) -> None:
    """The same of passes that are made for this alone, with some of the examples of a real one."""
    some = min(examples, SOME)
    if some < 2:
        return
    key = kind_of_batch(inputs, examples)
    if key not in clipper.layouts:
        clipper.survey(lambda marked: loss_fn(clipper.model, *marked), inputs, examples, key)
    whole = [x.detach() for x in inputs]

    def losses_of(places: Tensor) -> list[Tensor]:
        return [loss_fn(clipper.model, *(examples_at(x, places, examples) for x in whole))]

    refuse_places(clipper, losses_of, examples, key)
    first = [x[: some * (len(x) // examples)] for x in whole]
    leaves = [x.requires_grad_() for x in first if x.is_floating_point()]
    with clipper.recording(some, key) as tape:
        losses = loss_fn(clipper.model, *first)
    refuse_mixing(clipper, tape, losses, leaves)
