"""What may be done around a step: one protocol for extenders, sharpness and canaries.

A hook sees the weights before the step and the gradient that the step has left on the parameters.
It never sees a sum without noise, so whatever it does costs no privacy: the guarantee stays that of
the step. Which losses are clipped, a hook says by `wrap_loss`, and admission tests those.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from sfumato.privacy.sampling import Batch
from sfumato.training.inputs import Losses

Step = Callable[[Batch], dict[str, float]]
"""Leaves a gradient on every parameter, and says what is to be logged of its batch."""


class StepHook:
    """Done around every step. This one does nothing."""

    def around(self, batch: Batch) -> AbstractContextManager[object]:
        """Inside it the step is taken; an error in the step passes through."""
        return nullcontext()

    def wrap_loss(self, losses: Losses) -> Losses:
        """The losses whose gradients are clipped. Each example's must stay its own."""
        return losses


def with_hooks(step: Step, hooks: Sequence[StepHook]) -> Step:
    """The step with hooks around it, the first of them outermost."""

    def hooked(batch: Batch) -> dict[str, float]:
        with ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(hook.around(batch))
            return step(batch)

    return hooked if hooks else step
