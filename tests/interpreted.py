"""What a GPU does by kernels, here in Triton's interpreter, on tensors of a CPU."""

import pytest
import torch


def interpret_kernels(monkeypatch, has_noise_kernels=lambda flat: True):
    """Let releases go by kernels; where there is a GPU they are compiled, and tested there."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    if torch.cuda.is_available():
        pytest.skip("with a GPU kernels are compiled: tests/privacy/test_noise_on_gpu.py")
    for module in ("noise", "seal", "secure"):
        monkeypatch.setattr(f"sfumato.privacy.{module}.has_noise_kernels", has_noise_kernels)
