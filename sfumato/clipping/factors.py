"""Clip factors: how much is kept of each example's gradient (Abadi et al. 2016; Bu et al. 2022)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.config import check_given, check_numbers
from sfumato.errors import ConfigError, PrivacyError

MARGIN = 1e-5
"""Factors are this much too small, so that rounding cannot push a contribution over the bound."""
TINY = 1e-15
"""A floor for divisions: the squares of so small a norm's entries may be 0 in float32."""


def _vanilla(norms: Tensor, bound: float, stability: float) -> Tensor:
    return (bound / torch.where(norms > 0, norms, 1.0)).clamp(max=1.0)


def _automatic(norms: Tensor, bound: float, stability: float) -> Tensor:
    length = norms + stability
    return torch.where(length > TINY, bound / length, 0.0)


CLIP_STYLES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "vanilla": _vanilla,
    "automatic": _automatic,
    "auto-v": lambda norms, bound, _: _automatic(norms, bound, 0.0),
    "global": lambda norms, bound, _: (norms <= bound).to(norms.dtype),
}
"""Clip functions by name: factors from norms, bound and stability constant. Add your own here.

None can break the bound: `clip_factors` lowers each factor to what the bound allows.
"""


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How contributions are bounded.

    vanilla: min(1, C / norm), Abadi et al. automatic (AUTO-S): C / (norm + stability); auto-v:
    C / norm. global: 1 where the norm is at most C, else 0. With `per_layer`, each of the L layers
    is clipped on its own to C / sqrt(L), so that the whole stays within C. A norm bound that is not
    positive and finite is refused, and so is a stability below 0.
    """

    max_norm: float = 1.0
    style: str = "vanilla"
    stability: float = 0.01
    per_layer: bool = False

    def __post_init__(self) -> None:
        check_given(max_norm=self.max_norm, stability=self.stability)
        check_numbers(max_norm=self.max_norm, stability=self.stability)
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
    """One factor per example.

    Guarantee, for every style: factor times norm is between 0 and `max_norm`. A norm of zero gives
    a finite factor, a norm that is infinite or NaN gives factor 0.
    """
    if style not in CLIP_STYLES:
        raise ConfigError(f'clip style "{style}": there are {", ".join(CLIP_STYLES)}.')
    bound = max_norm * (1 - margin)
    factors = _wanted(norms, bound, style, stability)
    # Whatever the style wants: no gradient gets longer than the bound.
    factors = torch.minimum(factors, bound / norms.clamp(min=TINY)).clamp(min=0.0)
    # A factor so large that it overflows would turn a tiny gradient into an infinite one.
    return torch.where(norms.isfinite() & factors.isfinite(), factors, 0.0)


def check_clip_function(norms: Tensor, clipping: Clipping) -> None:
    """Raise `PrivacyError` if a factor depends on anything but the norm of the example itself.

    A factor that looks at other examples (divides by the mean of the norms, say) lets one example
    change what all the others add.
    """
    if not len(norms):
        return

    def wanted(norms: Tensor) -> Tensor:
        return _wanted(norms, clipping.max_norm, clipping.style, clipping.stability)

    together, some = wanted(norms), norms[:64]
    alone = torch.cat([wanted(norm[None]) for norm in some])
    for one, two in ((together, wanted(norms.flip(0)).flip(0)), (together[: len(some)], alone)):
        if not torch.allclose(one, two, rtol=1e-5, atol=0.0, equal_nan=True):
            raise PrivacyError(
                f'the clip function "{clipping.style}" gives an example another factor among other '
                "examples. One example more would change what all others add, beyond the norm "
                "bound. Compute each factor from the norm of its example, the bound and fixed "
                "numbers alone: without means, ranks, counts, chance or what earlier calls left."
            )


def _wanted(norms: Tensor, bound: float, style: str, stability: float) -> Tensor:
    """What the style says, in the type of the norms; it gets a copy, so it cannot write there."""
    factors = CLIP_STYLES[style](norms.clone(), bound, stability)
    given = factors if isinstance(factors, Tensor) else None
    if given is None or given.is_complex() or tuple(given.shape) not in ((), tuple(norms.shape)):
        what = f"a {type(factors).__name__}" if given is None else f"{given.dtype} of {given.shape}"
        raise ConfigError(
            f'the clip function "{style}" gives {what}, and must give a tensor of one real factor '
            f"for each norm: the shape {tuple(norms.shape)} of its first argument."
        )
    return given.to(norms.dtype).expand_as(norms)
