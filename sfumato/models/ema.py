"""The exponential moving average of weights: what noise does to single steps averages out in it."""

from collections.abc import Callable, Sequence
from math import log
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


def new_half_life_average(
    model: nn.Module, *, batch_size: int, half_life: float, ramp: float = 0.05
) -> AveragedModel | None:
    """The same with memory measured in images: half of it is gone after `half_life` of them.

    Early on that is at most the share `ramp` of the images seen so far (Karras et al. 2022), so
    that the first weights are soon forgotten. To be updated once an optimizer step, for which
    `batch_size` images were seen; None for half-life 0.
    """
    if not (half_life >= 0 and ramp > 0 and batch_size > 0):
        raise ConfigError(
            f"a half-life of {half_life:g} images with ramp {ramp:g} and {batch_size} images a "
            "step is no average: the half-life must be at least 0, the others more. Half-life "
            "500,000 and ramp 0.05 are usual."
        )
    if half_life == 0:
        return None
    update = half_life_average(batch_size, half_life, ramp)
    return AveragedModel(model, multi_avg_fn=update, use_buffers=True)


Update = Callable[[Sequence[Any], Sequence[Any], Any], None]


def moving_average(decay: float) -> Update:
    """An update whose decay warms up as (1 + t) / (10 + t), as De et al. 2022 have it.

    With the full decay from the start a short training would never forget its first weights.
    """

    def update(averages: Sequence[Any], current: Sequence[Any], count: Any) -> None:
        number: Tensor = torch.as_tensor(count, device=averages[0].device)
        _move(averages, current, 1 - ((1 + number) / (10 + number)).clamp(max=decay))

    return update


def half_life_average(batch_size: int, half_life: float, ramp: float) -> Update:
    """An update whose decay is 1/2 to the power of batch size over half-life."""

    def update(averages: Sequence[Any], current: Sequence[Any], count: Any) -> None:
        number: Tensor = torch.as_tensor(count, device=averages[0].device)
        # The first weights are copied, so this is asked from count 1 on: some images were seen.
        life = (number * (ramp * batch_size)).clamp(max=half_life)
        _move(averages, current, -torch.expm1(-log(2) * batch_size / life))

    return update


@torch.no_grad()
def _move(averages: Sequence[Any], current: Sequence[Any], share: Tensor) -> None:
    """Bring averages a share of the way to the current values; counters all of it."""
    pairs = list(zip(averages, current, strict=True))
    moving = [(average, value) for average, value in pairs if average.is_floating_point()]
    for average, value in pairs:
        if not average.is_floating_point():
            average.copy_(value)
    if not moving:
        return
    # All tensors in three launches.
    old = [average for average, _ in moving]
    way = torch._foreach_sub([value for _, value in moving], old)  # pyright: ignore
    torch._foreach_mul_(way, share.to(old[0].dtype))  # pyright: ignore
    torch._foreach_add_(old, way)  # pyright: ignore
