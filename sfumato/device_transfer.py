"""Tensors on their way to a GPU and back, without a wait for what the GPU is doing."""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there, without a wait for what a GPU is doing."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def from_device(tensor: Tensor) -> Callable[[], Tensor]:
    """A copy for the CPU, on its way from now on.

    To ask for it is to wait for it, and for nothing that a GPU was given to do after it.
    """
    if not tensor.is_cuda:
        there = tensor.clone()
        return lambda: there
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))

    def read() -> Tensor:
        arrived.synchronize()
        return there

    return read
