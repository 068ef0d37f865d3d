"""How a training loop clips: compiled if asked, and on a GPU captured and replayed.

A small model on a large GPU waits for Python, which launches every kernel by hand: a private step
has more of them than an ordinary one. Shapes repeat, so the whole of forward pass, backward pass,
norms and sums is captured once and launched as one.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.compiled import Compiled
from sfumato.clipping.sums import Clipped, Tell
from sfumato.training.cuda_graph import Captured
from sfumato.training.inputs import Inputs

Clip = Callable[..., Clipped]


def quick_clip(clipper: GradientClipper, inputs: Inputs, *, compiled: bool) -> Clip:
    """`clipper.clip`, the quickest way there is for these losses on this device.

    Losses that something else changes from step to step (extenders, canaries) are not captured.
    """
    clip: Clip = Compiled(clipper) if compiled else clipper.clip
    return captured(clipper, clip, inputs) if captures(clipper, inputs) else clip


def captures(clipper: GradientClipper, inputs: Inputs) -> bool:
    """Whether `quick_clip` captures."""
    return inputs.device.type == "cuda" and inputs.wrap_loss is None


def captured(clipper: GradientClipper, clip: Clip, inputs: Inputs) -> Clip:
    """The same, replayed where the shapes have come before.

    It is to be called with the losses of this reading, which are in the capture, and so is what
    `tell` does. Nothing may wait for the GPU while it is captured, so whether all gradients are
    finite is seen afterwards, if nobody is told. If one is not, which is rare, the examples are
    clipped once more.
    """

    @cache
    def replayed(tell: Tell) -> Captured:
        def work(mask: Tensor, *tensors: Tensor) -> Clipped:
            return clip(inputs.losses, tensors, len(mask), mask, tell=tell)

        return Captured(work, inputs.device)

    def quick(
        loss_fn: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        examples: int,
        mask: Tensor,
        tell: Tell | None = None,
    ) -> Clipped:
        found = replayed(tell or ignore_message)(
            (clipper.clipping, clipper.model.training), mask, *tensors
        )
        if tell is not None or bool(found.norms.isfinite().all()):
            return found
        return clipper.clip(loss_fn, tensors, examples, mask)

    return quick


def ignore_message(*_: Any) -> None:
    """Is told, and does nothing."""
