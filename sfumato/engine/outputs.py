"""What a model says, in whatever it says it: a tensor, a tuple, a mapping, a dataclass.

Two things are asked of it. That the test on noise looks at all of it; and that the loss of one
example looks at nothing that was said of another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import ConfigError, PrivacyError


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


def refuse_mixing_losses(losses: Tensor, outputs: Sequence[Tensor]) -> None:
    """A loss that looks at another example's output (contrastive ones do) is none of one example.

    Nor is one that looks at what is said of all together: an average over the batch, say. Asked of
    the first and the last loss, once for each kind of batch.
    """
    examples = len(losses)
    learnt = [out for out in outputs if out.requires_grad]
    for i in {0, examples - 1} if learnt else ():
        found = torch.autograd.grad(losses[i], learnt, retain_graph=True, allow_unused=True)
        if any(g is not None and _touches_others(g, i, examples) for g in found):
            raise PrivacyError(
                "the loss of one example depends on what the model says of another, or of all of "
                "them together, so no per-example gradient exists. Use a loss that looks at one "
                "example at a time."
            )


def _touches_others(gradient: Tensor, i: int, examples: int) -> bool:
    if not _has_rows(gradient, examples):
        return True
    rows = gradient.reshape(examples, -1).abs().sum(dim=1)
    rows[i] = 0
    return bool((rows > 0).any())


def _has_rows(tensor: Tensor, examples: int) -> bool:
    """Whether it can have a row for each example, or several side by side."""
    return tensor.ndim > 0 and tensor.numel() > 0 and len(tensor) % examples == 0
