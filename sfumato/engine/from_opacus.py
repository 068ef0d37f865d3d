"""`make_private`: the engine for people who have a loader and come from Opacus."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from sfumato.engine.cover import PrivacyEngine
from sfumato.errors import ConfigError


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    physical_batch_size: int | None = None,
    **settings: Any,
) -> tuple[PrivacyEngine, Iterator[Any]]:
    """For people who come from Opacus: an attached engine, and a Poisson loader of the same data.

    Batch size and number of examples are those of `loader`; `settings` are the engine's. Epochs or
    steps are among them: what is returned is the whole training, and no loop over epochs is needed.
    """
    if loader.batch_size is None:
        raise ConfigError("the loader has no batch size to take over.")
    size = len(loader.dataset)  # pyright: ignore
    engine = PrivacyEngine(model, batch_size=loader.batch_size, sample_size=size, **settings)
    engine.attach(optimizer)
    pieces = physical_batch_size or loader.batch_size
    return engine, engine.loader(loader.dataset, physical_batch_size=pieces)
