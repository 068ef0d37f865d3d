"""Optimizers that go on from a file."""

from typing import Any

import torch
from torch import Tensor


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state, with moments laid out in memory as the parameters are, and rates in place.

    A file keeps numbers and not their order in memory, and fused optimizers refuse moments that lie
    otherwise than a channels-last parameter. A rate that is a tensor stays the tensor it was: it
    may be read by a capture on a GPU, and a file's lies on the CPU.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):
            group["lr"] = rate.copy_(torch.as_tensor(group["lr"]))
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
