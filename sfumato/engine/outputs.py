"""What a model says, in whatever it says it: a tensor, a tuple, a mapping, a dataclass.

The test on noise is to look at all of it.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import ConfigError


def tensors_of(out: Any) -> list[Tensor]:
    """All tensors of an output, looking into lists, tuples, mappings and dataclasses."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, Mapping):
        out = list(out.values())
    elif is_dataclass(out):
        out = list(vars(out).values())
    if not isinstance(out, list | tuple):
        return []
    return [tensor for item in out for tensor in tensors_of(item)]


def trial_losses(out: Any, examples: int) -> Tensor:
    """A loss for each example that depends on every number said of it, for the test on noise."""
    said = [t for t in tensors_of(out) if t.is_floating_point() and _has_rows(t, examples)]
    if not said:
        raise ConfigError(
            f"the model gives a {type(out).__name__} in which no tensor of floating-point numbers "
            "has the examples on its first axis, so there is nothing to learn from. Return such a "
            "tensor, or a tuple, list, mapping or dataclass of them."
        )
    return torch.stack([t.reshape(examples, -1).sin().sum(dim=1) for t in said]).sum(dim=0)


def _has_rows(tensor: Tensor, examples: int) -> bool:
    """Whether it can have a row for each example, or several side by side."""
    return tensor.ndim > 0 and tensor.numel() > 0 and len(tensor) % examples == 0
