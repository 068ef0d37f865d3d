"""Top-n selection: for each class of the target, the public images that it takes for it most.

An image is ranked by the confidence in one class alone: it need not be the first answer, and may
serve several classes. So every class gets exactly n images (Yuan et al. 2023).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.attacks.access import TargetAccess
from sfumato.attacks.inversion_loss import margin_scale
from sfumato.data.images import Images
from sfumato.errors import DataError


@dataclass(frozen=True)
class Selection:
    """The n best places in the public set for each class, and how sure the target was."""

    places: Int[Tensor, "classes n"]
    confidence: Float[Tensor, "classes n"]
    scale: float
    """The target's usual margin on public images."""

    @property
    def labels(self) -> Int[Tensor, " chosen"]:
        """The pseudo label of each, class by class."""
        classes, n = self.places.shape
        return torch.arange(classes).repeat_interleave(n)

    def words(self) -> dict[str, float]:
        """How good the selection is, in a few numbers."""
        count = self.places.numel()
        return {
            "least_confidence": float(self.confidence.min()),
            "mean_confidence": float(self.confidence.mean()),
            "worst_class_mean": float(self.confidence.mean(dim=1).min()),
            "shared_between_classes": 1 - len(self.places.unique()) / count,
            "margin_scale": self.scale,
        }


def select_top_n(access: TargetAccess, public: Images, n: int) -> Selection:
    """Ask the target about every public image once, and keep the n best for each class."""
    public.require_public("choosing images to imitate")
    if n > len(public):
        raise DataError(
            f'"{public.name}" has {len(public)} images, and {n} are wanted for each class. Lower '
            "--n, or bring more public images."
        )
    logits = access.answers(public.pixels)
    # In float32 a lead of 17 is a confidence of 1: a sure target would have no favourites.
    best = logits.double().softmax(dim=1).topk(n, dim=0)
    return Selection(best.indices.T.cpu(), best.values.T.float().cpu(), margin_scale(logits))
