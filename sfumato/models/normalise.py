"""What to do with BatchNorm, which mixes the examples of a batch.

For a pretrained network, freeze it: its statistics come from public pre-training, its scale and
shift go on learning, and the network keeps what it knows. For a network trained from scratch,
replace it by GroupNorm, with scale and shift kept. Subclasses with a fused activation (timm's
BatchNormAct2d) keep their activation.
"""

from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn

from sfumato.batch_norm import BatchNorm as BatchNorm
from sfumato.batch_norm import guard_batch_norm

NormPolicy = Literal["group", "frozen", "keep"]


class GroupNormAct(nn.GroupNorm):
    """GroupNorm followed by the dropout and activation of the layer it replaces."""

    def __init__(self, num_groups: int, num_channels: int, eps: float, then: nn.Module) -> None:
        super().__init__(num_groups, num_channels, eps)
        self.then = then

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, then activate."""
        return self.then(super().forward(input))


def apply_norm_policy(model: nn.Module, policy: NormPolicy) -> nn.Module:
    """The model with its BatchNorm layers replaced, frozen or kept."""
    if policy == "group":
        replace_batch_norm(model)
    if policy == "frozen":
        freeze_batch_norm(model)
    return model


def has_batch_norm(model: nn.Module) -> bool:
    """Whether there is a BatchNorm in the model."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


def freeze_batch_norm(model: nn.Module) -> nn.Module:
    """Put every BatchNorm into evaluation mode. Call it again after `model.train()`."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval()
    return guard_batch_norm(model)


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm below `model` by GroupNorm with the same scale and shift."""
    for name, child in list(model.named_children()):
        if isinstance(child, BatchNorm):
            setattr(model, name, group_norm_like(child))
        else:
            replace_batch_norm(child)
    return model


def group_norm_like(norm: BatchNorm) -> nn.Module:
    """A GroupNorm with the scale and shift of a BatchNorm, and its fused activation if it has one.

    A scale or shift that does not learn goes on not learning. At most 32 groups, and at least 8
    channels in each where there are that many: on a map of one pixel, a group of one channel would
    normalise a single number to nothing.
    """
    channels = norm.num_features
    groups = gcd(32, channels)
    while groups > 1 and channels // groups < min(8, channels):
        groups //= 2
    then = [m for m in (getattr(norm, "drop", None), getattr(norm, "act", None)) if m is not None]
    if then:
        made: nn.GroupNorm = GroupNormAct(groups, channels, norm.eps, nn.Sequential(*then))
    else:
        made = nn.GroupNorm(groups, channels, norm.eps)
    if norm.affine:
        with torch.no_grad():
            made.weight.copy_(norm.weight)
            made.bias.copy_(norm.bias)
        made.weight.requires_grad_(norm.weight.requires_grad)
        made.bias.requires_grad_(norm.bias.requires_grad)
    return made
