"""Triton kernels for a GPU: noise for research, secure noise, digests and seals of sums."""

from torch import Tensor


def has_kernels(flat: Tensor) -> bool:
    """Whether kernels do the work on such a vector: on a GPU they do."""
    return flat.is_cuda


def require_flat(total: Tensor) -> None:
    """Refuse what a kernel would not write in its own place."""
    if not total.is_contiguous():
        raise ValueError("a kernel writes noise on numbers that lie side by side.")
