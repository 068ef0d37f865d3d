"""Losses of a GAN: generator against discriminator, and what both learn from a target.

Two losses. One score per image: hinge loss (Lim and Ye 2017; Miyato et al. 2018). One logit for
each class of the target: the discriminator is itself a classifier, taught by the target's
answers, and the sum of the exponentials of its logits says how real an image is (Salimans et al.
2016; for inversion: Chen et al. 2021, "Knowledge-enriched distributional model inversion").

Pure functions, means over a batch. All is worked out in float32 (or float64, where it is given),
also under autocast and of logits in bfloat16.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Loss = Float[Tensor, ""]


def hinge_discriminator(real: Float[Tensor, " n"], fake: Float[Tensor, " m"]) -> Loss:
    """Real images are wanted above 1 and fakes below -1; beyond, nothing more is gained."""
    return F.relu(1 - _wide(real)).mean() + F.relu(1 + _wide(fake)).mean()


def hinge_generator(fake: Float[Tensor, " m"]) -> Loss:
    """Fakes are wanted as high as can be."""
    return -_wide(fake).mean()


def real_or_fake(real: Float[Tensor, "n classes"], fake: Float[Tensor, "m classes"]) -> Loss:
    """The discriminator's loss without labels, where P(real) = sigmoid(L), L = logsumexp(logits).

    -log sigmoid(L) = softplus(L) - L of real images and -log(1 - sigmoid(L)) = softplus(L) of
    fakes. The published attack adds half of this to the soft-label cross-entropy.
    """
    # softplus(L) - L, without the difference of two large numbers.
    on_real = F.softplus(-_wide(real).logsumexp(dim=1))
    return on_real.mean() + F.softplus(_wide(fake).logsumexp(dim=1)).mean()


def soft_cross_entropy(
    logits: Float[Tensor, "n classes"], wanted: Float[Tensor, "n classes"]
) -> Loss:
    """Cross-entropy to the probabilities that the target gives.

    With the logits' own probabilities it is their entropy, which the published generator makes
    small, by a weight of 1e-4.
    """
    return -(_wide(wanted) * F.log_softmax(_wide(logits), dim=1)).sum(dim=1).mean()


def feature_matching(real: Float[Tensor, "n d"], fake: Float[Tensor, "m d"]) -> Loss:
    """Mean absolute difference of the batches' mean features: what the generator makes small."""
    return (_wide(real).mean(dim=0) - _wide(fake).mean(dim=0)).abs().mean()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
