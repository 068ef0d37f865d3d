"""What rounding depends on beside the code."""

import torch


def machine() -> dict:
    """The kind of CPU, as far as products care, and the version of torch."""
    has = torch.cpu.get_capabilities()
    names = ("architecture", "avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    return {"torch": torch.__version__.split("+")[0], **{name: has.get(name) for name in names}}
