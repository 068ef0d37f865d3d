"""The exponential moving average of weights: what noise does to single steps averages out in it."""

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sfumato.errors import ConfigError


def new_average(model: nn.Module, decay: float) -> AveragedModel | None:
    """An average of the model's weights, to be updated once an optimizer step; None for decay 0."""
    if not 0 <= decay < 1:
        raise ConfigError(f"ema={decay:g} must be at least 0 and below 1; 0.999 is usual.")
    if decay == 0:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
