"""Ordinary training with the GroupNorm of private training.

torch's own GroupNorm knows one layout of memory and, under autocast, one type: maps with channels
last are copied to float32, to another layout and back. Our kernels read them as they lie. Private
training has them from its rules; `QuickGroupNorm` gives them to ordinary training too, so that
what the two are compared by is clipping, and not who has the better GroupNorm.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sfumato.clipping.normalisation_functions import GroupNormed, takes_groups


class QuickGroupNorm(TorchFunctionMode):
    """Inside, GroupNorm of maps with channels last on a GPU runs in our kernels.

    Guarantee: outputs and gradients are torch's, up to rounding in float32. It is for passes that
    no compiler sees: that one fuses norms with their neighbours itself.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any other function is called as it is."""
        func = quick_group_norm if func is F.group_norm else func
        return func(*args, **(kwargs or {}))


def has_group_norm(model: nn.Module) -> bool:
    """Whether there is a GroupNorm in the model: to look at every operation costs time too."""
    return any(isinstance(module, nn.GroupNorm) for module in model.modules())


def quick_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.group_norm`, by our kernels where they take the input."""
    if not takes_groups(input):
        return F.group_norm(input, num_groups, weight, bias, eps)
    fixed = (None if one is None else one.detach() for one in (weight, bias))
    # All rows as those of one example: what it adds to scale and shift is the ordinary gradient.
    learning = (None if one is None else one[None] for one in (weight, bias))
    settings = (num_groups, eps, 1)
    return GroupNormed.apply(input, *fixed, *learning, *settings)  # pyright: ignore
