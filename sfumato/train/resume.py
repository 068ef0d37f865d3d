"""Optimizers that go on from a file."""

from typing import Any

import torch
from torch import Tensor


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state, with moments laid out in memory as the parameters are.

    A file keeps numbers and not their order in memory, and fused optimizers refuse moments that lie
    otherwise than a channels-last parameter.
    """
    optimizer.load_state_dict(state)
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
