"""Sums of clipped gradients over a logical batch, chunk after chunk, and what is known of them.

In one process an ordinary step does not wait for a GPU's sums: `numbers` waits for norms alone (see
`stats`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sfumato.clipping.admit import check_contributions, contributions_due
from sfumato.clipping.clip import Clipped, GradientClipper
from sfumato.clipping.mixing import check_mixing, is_due
from sfumato.privacy.flat import Layout, Sums
from sfumato.privacy.sampling import Batch
from sfumato.privacy.secret import SessionKey
from sfumato.training.batch_stats import BatchStats
from sfumato.training.process_group import ProcessGroup
from sfumato.training.quick import Clip
from sfumato.training.reading import Reading
from sfumato.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Adds up the clipped gradients of a batch; in several processes, those of all of them."""

    clipper: GradientClipper
    reading: Reading
    clip: Clip
    """`clipper.clip`, or what is quicker and does the same (`quick_clip`)."""
    secret: SessionKey
    scope: tuple[str, ...]
    """`secret.scope` of the ledger: what is drawn is drawn for it alone."""
    processes: ProcessGroup
    turns: Iterator[int] = field(default_factory=count)
    """Batches so far of which this process had a share."""

    @cached_property
    def layout(self) -> Layout:
        """How the sums lie."""
        return Layout.of(self.clipper.parameters)

    @cached_property
    def _stats(self) -> BatchStats:
        return BatchStats(self.reading.device)

    def __call__(self, batch: Batch) -> Sums:
        """The sums. An example that is not finite spoils them, which `numbers` shows."""
        total = self._nothing()
        self._stats.begin()
        # At first often, then ever more rarely: recorded steps are much quicker than this.
        unmixed = is_due(batch.step, rarely=None)
        for number, (seed, given) in enumerate(self._chunks(batch)):
            if unmixed and not number:
                losses, inputs, examples, _ = given
                check_mixing(self.clipper, losses, inputs, examples)
                torch.manual_seed(seed)
            if not number and contributions_due(next(self.turns)):
                # Before: what a captured clip gives is overwritten by its next call.
                self._check_contributions(given)
                self._stats.begin()
                torch.manual_seed(seed)
            # It gets no name: it is as large as the sums, and memory is short where noise is added.
            total.add(self.clip(*given, tell=self._stats).total)
        self.processes.all_reduce({**total, "": self._stats.numbers})
        return total

    def with_care(self, batch: Batch) -> Sums:
        """The sums without examples that are not finite: slower, and rarely needed."""
        total = self._nothing()
        for _, given in self._chunks(batch):
            total.add(self.clipper.clip(*given).total)
        self.processes.all_reduce(total)
        return total

    def numbers(self, batch: Batch) -> list[float]:
        """The tally of the batch, which was gathered last."""
        return self._stats.read(len(batch.chunks), self.processes)

    def _nothing(self) -> Sums:
        # Not where the last sums were: what was released lies there, and whoever kept a gradient
        # would see the sums of this step before they have their noise.
        return self.layout.zeros()

    def _chunks(self, batch: Batch) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """What to clip of each of this process's chunks, with torch's seed set, and that seed."""
        for place, chunk in self.processes.share(batch.chunks):
            inputs = self.reading.inputs(chunk, batch.step)
            seed = self.secret.seed(("dropout", *self.scope, "train", batch.step, place))
            torch.manual_seed(seed)
            mask = to_device(chunk.mask, self.reading.device)
            yield seed, (self.reading.losses, inputs, len(mask), mask)

    def _check_contributions(self, given: tuple[Any, ...]) -> None:
        """What an example of this chunk adds, clipped as the step clips, must be in the bound."""
        losses, inputs, examples, _ = given

        def look(alone: Tensor) -> Clipped:
            found = self.clip(losses, inputs, examples, alone, tell=self._stats)
            if bool(found.norms.isfinite().all()):
                return found
            return self.clipper.clip(losses, inputs, examples, alone)

        check_contributions(self.clipper, look, examples)
