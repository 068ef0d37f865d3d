"""Flat minima: gradients are taken a little uphill of the weights, and used at the weights.

SAM (Foret et al. 2021) walks up along the gradient of the very batch, so a step takes two passes.
DP-SAT (Park et al. 2023) walks up along the gradient of the step before. That one has its noise
already, so looking at it again costs no privacy and no pass.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from sfumato.privacy.sampling import Batch
from sfumato.training.hooks import Step, StepHook
from sfumato.training.inputs import Inputs
from sfumato.training.plain_step import plain_step
from sfumato.training.process_group import ProcessGroup


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def of_length(rho: float, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The direction of a gradient, `rho` long over all tensors together; zero if that is zero."""
    length = get_total_norm(list(gradient.values()))
    scale = torch.where(length > 0, rho / length, 0.0)
    parts = torch._foreach_mul(list(gradient.values()), scale)  # pyright: ignore
    return dict(zip(gradient, parts, strict=True))


@contextmanager
def moved_parameters(named: Mapping[str, nn.Parameter], by: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters moved by so much inside; afterwards, whatever happens, as they were to the bit."""
    moving = [named[name] for name in by]
    before = [parameter.detach().clone() for parameter in moving]
    try:
        with torch.no_grad():
            torch._foreach_add_(moving, list(by.values()))  # pyright: ignore
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(moving, before)  # pyright: ignore


def sharp_step(
    model: nn.Module,
    inputs: Inputs,
    rho: float,
    *,
    processes: ProcessGroup | None = None,
    compiled: bool = False,
) -> Step:
    """A plain step that leaves the mean gradient at w + rho g / |g|, where g is that at w (SAM).

    Both passes see the same views and the same dropout. Weights, and statistics that layers keep,
    are afterwards those of the first pass. No clipping, no noise, no guarantee.
    """
    plain = plain_step(model, inputs, processes=processes, compiled=compiled)

    def step(batch: Batch) -> dict[str, float]:
        numbers = plain(batch)
        named = trainable_parameters(model)
        gradient = {name: p.grad for name, p in named.items() if p.grad is not None}
        kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with moved_parameters(named, of_length(rho, gradient)):
            plain(batch)
        for buffer, value in kept:
            buffer.copy_(value)
        return numbers

    return step


class LastGradient:
    """The gradient that the step before left: what a learner keeps as it advances."""

    def __init__(self, model: nn.Module) -> None:
        self.gradient = {
            name: torch.zeros_like(p) for name, p in trainable_parameters(model).items()
        }

    def keep(self, model: nn.Module) -> None:
        """Take over what is on the parameters; where a step left nothing, nothing changes."""
        for name, parameter in trainable_parameters(model).items():
            if parameter.grad is not None:
                self.gradient[name].copy_(parameter.grad)

    def state_dict(self) -> dict[str, Tensor]:
        """The gradient by name."""
        return dict(self.gradient)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a gradient."""
        for name, part in self.gradient.items():
            part.copy_(state[name])


class SharpnessStep(StepHook):
    """Takes the step at w + rho g / |g|, where g is what the step before left (DP-SAT).

    Weights are moved by what has been released already, so no step releases more than it did. The
    first moves nothing. Whoever advances the weights must also `keep` the gradient, in one move, as
    `TrainState` does: a run that was cut must find both.
    """

    def __init__(self, model: nn.Module, last: LastGradient, rho: float) -> None:
        self.named, self.last, self.rho = trainable_parameters(model), last, rho

    def around(self, batch: Batch) -> AbstractContextManager[object]:
        """Inside the weights are moved; afterwards, whatever happens, they are as they were."""
        return moved_parameters(self.named, of_length(self.rho, self.last.gradient))
