"""What rounding depends on beside the code."""

import torch


def machine() -> dict:
    """The kind of CPU, as far as products in bf16 care."""
    has = torch.cpu.get_capabilities()
    names = ("architecture", "avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    return {name: has.get(name) for name in names}
