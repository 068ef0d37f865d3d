"""`make_private`: the engine for people who have a loader and come from Opacus."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from sfumato.engine.epochs import size_of
from sfumato.engine.privacy_engine import PrivacyEngine
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

    Batch size, number of examples and `collate_fn` are those of `loader`; `settings` are the
    engine's. Epochs or steps are among them: what is returned is the whole training, and no loop
    over epochs is needed. Nothing else of `loader` is taken over. Its workers and pinned memory are
    not used: examples are read in this process. Its order and `drop_last` have no meaning for
    Poisson batches; a sampler that chooses examples in a way of its own is refused.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            "make_private takes a torch.utils.data.DataLoader with a batch_size, not a "
            f"{type(loader).__name__}."
        )
    if loader.batch_size is None:
        raise ConfigError("the loader has no batch size to take over.")
    size = size_of(loader.dataset)
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise ConfigError(
            f"the loader has a {type(loader.sampler).__name__}, and Poisson batches are drawn from "
            "all of its data set, each example with the same chance. Leave the sampler out; give "
            "a torch.utils.data.Subset if that was its purpose."
        )
    if loader.collate_fn is not default_collate:
        warnings.warn(
            "the loader has a collate_fn of its own, which is taken over. It sees all examples of "
            "a batch before anything is clipped: one that mixes them (MixUp, CutMix, statistics of "
            "the batch) breaks the guarantee, and nothing here can see that. Padding to a common "
            "size that is fixed is fine.",
            stacklevel=2,
        )
    engine = PrivacyEngine(model, batch_size=loader.batch_size, sample_size=size, **settings)
    engine.attach(optimizer)
    pieces = physical_batch_size or loader.batch_size
    batches = engine.loader(loader.dataset, physical_batch_size=pieces, collate=loader.collate_fn)
    return engine, batches
