"""Triton kernels for a GPU: noise for research, secure noise, a digest of sums where they lie."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there, without a wait for what a GPU is doing."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def require_flat(total: Tensor) -> None:
    """Refuse what a kernel would not write in its own place."""
    if not total.is_contiguous():
        raise ValueError("a kernel writes noise on numbers that lie side by side.")
