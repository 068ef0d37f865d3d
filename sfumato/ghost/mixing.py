"""Whether the loss of one example looks at another, asked of the very passes that are learnt from.

The trial before training (`admit`) sees the model alone, on noise, a few examples at a time. Here
one example's loss is sent back through the graph of a real batch. Nothing of it may arrive at
another example: neither at its rows of the inputs, nor where parameters meet it. That sees losses
on whatever a model keeps aside, and branches that depend on chance, on values or on how many there
are. What no graph shows (numbers that are detached, counts, labels) it does not see.

It is asked at times that nobody can foresee, and no number of it is kept.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sfumato.errors import PrivacyError
from sfumato.ghost.clip import Ghost, kind_of_batch
from sfumato.ghost.sums import norms_of
from sfumato.ghost.tape import Tape

RARELY = 50
"""In the long run, one pass in so many is looked at."""
SOME = 64
"""Examples of a pass that is made for this alone."""
_DICE = random.SystemRandom()  # not torch's, so that nobody else's chance moves


def is_due(before: int, rarely: int | None = RARELY) -> bool:
    """Whether to look at a pass, after so many others of its kind.

    At the first for certain, then with a chance of 1/2, 1/3, ... down to one in `rarely`.
    """
    turns = before + 1
    return _DICE.randrange(turns if rarely is None else min(turns, rarely)) == 0


def refuse_mixing(
    ghost: Ghost, tape: Tape, losses: Tensor, inputs: Sequence[Tensor], *, retain: bool = False
) -> None:
    """Raise `PrivacyError` if the loss of an example, drawn at random, reaches another.

    `inputs` are those of the pass that can be differentiated, each with the examples first. With
    `retain` the graph can be used once more.
    """
    one = _DICE.randrange(tape.examples)
    dummies = [*tape.norms, *tape.keeps]
    found = ghost.go_back(tape, losses[one], [*inputs, *dummies], retain=retain)
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


def check_mixing(
    ghost: Ghost, loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor], examples: int
) -> None:
    """The same of a pass that is made for this alone, with some of the examples of a real one."""
    some = min(examples, SOME)
    if some < 2:
        return
    key = kind_of_batch(inputs, examples)
    if key not in ghost.layouts:
        ghost.survey(lambda marked: loss_fn(ghost.model, *marked), inputs, examples, key)
    first = [x[: some * (len(x) // examples)].detach() for x in inputs]
    leaves = [x.requires_grad_() for x in first if x.is_floating_point()]
    with ghost.recording(some, key) as tape:
        losses = loss_fn(ghost.model, *first)
    refuse_mixing(ghost, tape, losses, leaves)
