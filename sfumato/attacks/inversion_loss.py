"""How far a target is from naming the class that an attacker wants to see.

Each loss is a mean over images. The margin (Yuan et al. 2023) has a gradient of 1 on two logits,
however sure the target is; but it counts in the target's own unit, and a private target has
another. So `InversionLoss` divides logits by the margin that the target usually has on public
images: without that a private target may look safe when it is not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Logits = Float[Tensor, "n classes"]
Labels = Int[Tensor, " n"]


def margins(logits: Logits, labels: Labels) -> Float[Tensor, " n"]:
    """By how much the logit of the wanted class leads the others; negative if it is behind."""
    wanted = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return wanted[:, 0] - others.amax(dim=1)


def margin_loss(logits: Logits, labels: Labels) -> Float[Tensor, ""]:
    """The mean margin, negated: the wanted logit should lead by as much as possible."""
    return -margins(logits, labels).mean()


def cross_entropy(logits: Logits, labels: Labels) -> Float[Tensor, ""]:
    """The classical loss; its gradient vanishes when the target is sure."""
    return F.cross_entropy(logits, labels)


def logit_loss(logits: Logits, labels: Labels) -> Float[Tensor, ""]:
    """The wanted logit itself, negated, whatever the others do."""
    return -logits.gather(1, labels[:, None]).mean()


def poincare(logits: Logits, labels: Labels) -> Float[Tensor, ""]:
    """Distance in the Poincare ball between logits of L1 norm 1 and the wanted corner of it."""
    inside = logits / logits.abs().sum(dim=1, keepdim=True).clamp(min=1e-12)
    # Corners lie on the rim, which is infinitely far away: a step of 1e-4 inside.
    corner = (F.one_hot(labels, logits.shape[1]).to(logits.dtype) - 1e-4).clamp(0, 1)
    apart = (inside - corner).square().sum(dim=1)
    rim = (1 - inside.square().sum(dim=1)) * (1 - corner.square().sum(dim=1))
    return torch.arccosh(1 + 2 * apart / rim.clamp(min=1e-9)).mean()


LOSSES: dict[str, Callable[[Logits, Labels], Float[Tensor, ""]]] = {
    "margin": margin_loss,
    "cross-entropy": cross_entropy,
    "poincare": poincare,
    "logit": logit_loss,
}


def margin_scale(logits: Logits) -> float:
    """The usual lead of the first answer over the second: the target's unit of sureness."""
    first, second = logits.topk(2, dim=1).values.unbind(dim=1)
    return max(float((first - second).mean()), 1e-6)


@dataclass(frozen=True)
class InversionLoss:
    """A loss, and the unit that logits are counted in."""

    loss: str = "margin"
    scale: float = 1.0

    def __call__(self, logits: Logits, labels: Labels) -> Float[Tensor, ""]:
        """How far these answers are from the classes that are wished for."""
        return LOSSES[self.loss](logits.float() / self.scale, labels)
