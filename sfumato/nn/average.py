"""The exponential moving average of weights: what noise does to single steps averages out in it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from sfumato.errors import ConfigError


def new_average(model: nn.Module, decay: float) -> AveragedModel | None:
    """An average of the model's weights, to be updated once an optimizer step; None for decay 0."""
    if not 0 <= decay < 1:
        raise ConfigError(f"ema={decay:g} must be at least 0 and below 1; 0.999 is usual.")
    if decay == 0:
        return None
    return AveragedModel(model, multi_avg_fn=moving_average(decay), use_buffers=True)


def moving_average(decay: float) -> Callable[[Sequence[Any], Sequence[Any], Any], None]:
    """An update whose decay warms up as (1 + t) / (10 + t), as De et al. 2022 have it.

    With the full decay from the start a short training would never forget its first weights.
    """

    @torch.no_grad()
    def update(averages: Sequence[Any], current: Sequence[Any], count: Any) -> None:
        number: Tensor = torch.as_tensor(count, device=averages[0].device)
        share = 1 - ((1 + number) / (10 + number)).clamp(max=decay)
        for average, value in zip(averages, current, strict=True):
            if average.is_floating_point():
                average.lerp_(value, share.to(average.dtype))
            else:
                average.copy_(value)

    return update
