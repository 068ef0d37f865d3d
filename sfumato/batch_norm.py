"""A guard against wrong gradients of torch's BatchNorm for one row.

On a CPU the backward pass of torch 2.15 is wrong where a map with a single row gets a gradient with
its channels last in memory, as `flatten(2).transpose(1, 2)` (tokens) sends it. Gradients in the
ordinary order of axes are right, so a guarded BatchNorm gets them in that order. (The bug, in a few
lines: docs/dev/torch_batch_norm.md.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm


class InOrder(torch.autograd.Function):
    """The identity, whose gradient lies in the ordinary order of axes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The same tensor."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The same gradient, copied if its order is another."""
        return gradients[0].contiguous()


def guard_batch_norm(model: nn.Module) -> nn.Module:
    """Let every BatchNorm of the model have right gradients for one row, from now on."""
    for module in _batch_norms(model):
        module.register_forward_hook(_in_order)
    return model


@contextmanager
def guarded(model: nn.Module) -> Iterator[None]:
    """The same for the passes made inside."""
    handles = [module.register_forward_hook(_in_order) for module in _batch_norms(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    """Those that are not guarded yet."""
    found = [module for module in model.modules() if isinstance(module, BatchNorm)]
    return [module for module in found if _in_order not in module._forward_hooks.values()]


def _in_order(_module: nn.Module, _inputs: Any, out: Any) -> Any:
    # Compilers have a backward pass of their own.
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return out
    one_row = isinstance(out, Tensor) and out.device.type == "cpu" and out.shape[0] == 1
    return InOrder.apply(out) if one_row and torch.is_grad_enabled() else out
