"""Triton kernels for a GPU: each does where the sums lie what another file does on a CPU.

1. `philox`   noise for research (`noise`)
2. `chacha`   the ChaCha20 stream, for the kernels below
3. `release`  secure noise (`secure`)
4. `digest`   many numbers to a few words that stand for them
5. `seal`     those words to a tag and keys (`seal`)
"""

from torch import Tensor


def has_noise_kernels(flat: Tensor) -> bool:
    """Whether kernels do the work on such a vector: on a GPU they do."""
    return flat.is_cuda


def require_flat(total: Tensor) -> None:
    """Refuse what a kernel would not write in its own place."""
    if not total.is_contiguous():
        raise ValueError("a kernel writes noise on numbers that lie side by side.")
