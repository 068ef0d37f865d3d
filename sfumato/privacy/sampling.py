"""Poisson batches, as index chunks that fit memory.

In each step every example joins the batch by its own coin of chance `rate`; only this sampling is
what the subsampled accountant prices, and only while nobody knows the coins: so they derive from
the run's `SessionKey`. The batch of a step does not depend on the batches before it: a run that was
killed goes on with those it would have had, and the ranks of a distributed run agree on them
without talking.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.session_key import SessionKey


@dataclass(frozen=True)
class Chunk:
    """A part of a batch that fits memory: where `mask` is false the index is only padding."""

    indices: Int[Tensor, " chunk"]
    mask: Bool[Tensor, " chunk"]


@dataclass(frozen=True)
class Batch:
    """One logical batch: the examples of one private step. No chunks at all is a legal batch."""

    step: int
    chunks: tuple[Chunk, ...]

    @property
    def indices(self) -> Int[Tensor, " examples"]:
        """All examples of the batch, in ascending order, without padding."""
        parts = [chunk.indices[chunk.mask] for chunk in self.chunks]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def poisson_batches(
    plan: Plan,
    size: int,
    ledger: Ledger,
    secret: SessionKey,
    *,
    stage: str,
    chunk_size: int | None = None,
    start: int = 0,
    round_to: int | None = None,
) -> Iterator[Batch]:
    """The batches of steps `start` to `plan.steps`, for a data set of `size` examples.

    Guarantee: in every step each example is present independently with probability `plan.rate`
    (off by less than 2^-63), and with `plan.max_batch` a larger batch is cut to a uniformly random
    subset. Which examples make up step t depends on the secret, the ledger, the stage and t alone:
    not on `chunk_size`, `start` or `round_to`. Stages, and ledgers, draw independently.

    Chunks have `chunk_size` rows. The last one is padded to a multiple of `round_to`: by default to
    `chunk_size`, so that compiled code sees one shape; 1 pads nothing. An empty batch is yielded
    with no chunks: it must be noised and paid for like any other.
    """
    if plan.size not in (None, size):
        raise PrivacyError(f"the plan was made for {plan.size} examples, and there are {size}.")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"physical batch size {chunk_size} must be at least 1.")
    scope = secret.scope(ledger.header.id)
    for step in range(start, plan.steps):
        chosen = torch.from_numpy(poisson_sample(plan, size, secret, (*scope, stage, step)))
        length = max(len(chosen), 1) if chunk_size is None else chunk_size
        parts = chosen.split(length) if len(chosen) else ()
        yield Batch(step, tuple(_chunk(part, length, round_to or length) for part in parts))


def poisson_sample(
    plan: Plan, size: int, secret: SessionKey, step: tuple[str | int, ...]
) -> Int[np.ndarray, " examples"]:
    """The examples of the step that `step` names, as ascending indices."""
    chosen = (
        flip_coins(plan.rate, size, secret, ("batch", *step)) if plan.rate < 1 else np.arange(size)
    )
    if plan.max_batch is not None and len(chosen) > plan.max_batch:
        # Ties among 64-bit words are a chance of n^2/2^65: nothing beside delta.
        order = np.argsort(secret.words(("truncate", *step), len(chosen)))
        chosen = np.sort(chosen[order[: plan.max_batch]])
    return chosen.astype(np.int64)


def flip_coins(
    rate: float, size: int, secret: SessionKey, purpose: tuple[str | int, ...]
) -> Int[np.ndarray, " heads"]:
    """The numbers of the coins, of `size`, that fall on their side of chance `rate`.

    A coin is a whole number of 64 bits, compared with the rate (in float32 it would be off by up to
    2^-24). The first byte decides nearly all of them; only for a tie are the other seven drawn.
    """
    first_of_rate, rest_of_rate = divmod(min(round(rate * 2**64), 2**64 - 1), 2**56)
    first = np.frombuffer(secret.derive(purpose, size), dtype=np.uint8)
    tied = np.flatnonzero(first == first_of_rate)
    rest = secret.words((*purpose, "ties"), len(tied)) >> np.uint64(8)
    heads = first < first_of_rate
    heads[tied] = rest < np.uint64(rest_of_rate)
    return np.flatnonzero(heads)


def _chunk(indices: Int[Tensor, " part"], most: int, multiple: int) -> Chunk:
    length = min(most, math.ceil(len(indices) / multiple) * multiple)
    mask = torch.arange(length) < len(indices)
    padded = torch.zeros(length, dtype=torch.int64)
    padded[: len(indices)] = indices
    return Chunk(padded, mask)
