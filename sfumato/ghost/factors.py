"""Clip factors: how much is kept of each example's gradient (Abadi et al. 2016; Bu et al. 2022)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sfumato.errors import ConfigError

ClipStyle = Literal["vanilla", "automatic", "auto-v", "global"]
MARGIN = 1e-5
"""Factors are this much too small, so that rounding cannot push a contribution over the bound."""


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How contributions are bounded.

    vanilla: min(1, C / norm), Abadi et al. automatic (AUTO-S): C / (norm + stability); auto-v:
    C / norm. global: 1 where the norm is at most C, else 0. With `per_layer`, each of the L layers
    is clipped on its own to C / sqrt(L), so that the whole stays within C. A norm bound that is not
    positive and finite is refused, and so is a stability below 0, which would lengthen gradients
    beyond the bound.
    """

    max_norm: float = 1.0
    style: ClipStyle = "vanilla"
    stability: float = 0.01
    per_layer: bool = False

    def __post_init__(self) -> None:
        if not (self.max_norm > 0 and math.isfinite(self.max_norm)):
            raise ConfigError(
                f"max_norm={self.max_norm:g} must be positive and finite: it bounds what one "
                "example can change."
            )
        if not (self.stability >= 0 and math.isfinite(self.stability)):
            raise ConfigError(
                f"stability={self.stability:g} must be finite and not negative, or one example "
                "could add more than the norm bound (numerical_stability_constant). 0.01 is usual."
            )


def clip_factors(
    norms: Tensor, max_norm: float, style: str, stability: float, margin: float = MARGIN
) -> Tensor:
    """One factor an example.

    Guarantee: factor times norm is at most `max_norm`. A norm of zero gives a finite factor, a norm
    that is infinite or NaN gives factor 0.
    """
    bound = max_norm * (1 - margin)
    safe = torch.where(norms > 0, norms, 1.0)
    if style == "vanilla":
        factors = (bound / safe).clamp(max=1.0)
    elif style in ("automatic", "auto-v"):
        length = norms + stability if style == "automatic" else norms
        # The square of a smaller norm vanishes in float32, and with it the norm.
        factors = torch.where(length > 1e-15, bound / length, 0.0)
    elif style == "global":
        factors = (norms <= bound).to(norms.dtype)
    else:
        raise ConfigError(f'clip style "{style}": there are vanilla, automatic, auto-v, global.')
    # A factor so large that it overflows would turn a tiny gradient into an infinite one.
    return torch.where(norms.isfinite() & factors.isfinite(), factors, 0.0)
