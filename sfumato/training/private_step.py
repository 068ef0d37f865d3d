"""The private step: clip what each example adds, add it up, and release it with noise.

A logical batch comes in chunks that fit memory. In one process an ordinary step does not wait for a
GPU's sums: what must be known before a release (`BatchStats`) is there with the norms.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sfumato.clipping.admit import check_contributions, contributions_due
from sfumato.clipping.buffers import Buffers
from sfumato.clipping.clip import Clipped, GradientClipper
from sfumato.clipping.mixing import check_mixing, is_due
from sfumato.device_transfer import to_device
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.sampling import Batch
from sfumato.privacy.seal import tag_of
from sfumato.privacy.session_key import SessionKey
from sfumato.training.batch_stats import BROKEN, BatchStats, averages_of
from sfumato.training.hooks import Step
from sfumato.training.inputs import Inputs
from sfumato.training.noisy_gradient import NoisyGradient
from sfumato.training.process_group import ProcessGroup

LEFT_OUT = "left_out"
"""Among a step's numbers if it was paid for and left out (`is_lost`)."""


@dataclass(frozen=True)
class PrivacyContext:
    """What makes steps private: how much noise, where chance comes from, and who writes it down."""

    plan: Plan
    ledger: Ledger
    secret: SessionKey


def private_step(
    clipper: GradientClipper,
    inputs: Inputs,
    paid: PrivacyContext,
    *,
    processes: ProcessGroup | None = None,
    clip: Callable[..., Clipped] | None = None,
) -> Step:
    """A step that leaves the noisy mean of clipped gradients on every parameter.

    Guarantee: what it leaves is `privatize` of a sum over the Poisson batch of vectors of norm at
    most the plan's norm bound; the ledger has its line before it is left. With several processes
    each adds its share of the batch, and noise enters once. No buffer of the model is written to by
    the batch: that is an error, at the latest in the plan's last step.

    `clip` is `clipper.clip`, or what is quicker and does the same (`quick_clip`). In the first
    step, and rarely after it, two examples are added alone: a contribution beyond the bound is an
    error.
    """
    plan, ledger, secret = paid.plan, paid.ledger, paid.secret
    gather = GradientSum(clipper, inputs, paid, clip or clipper.clip, processes or ProcessGroup())
    noisy, processes, buffers = gather.noisy, gather.noisy.processes, Buffers(clipper.model)

    def step(batch: Batch) -> dict[str, float]:
        is_last = batch.step == plan.steps - 1
        buffers.remember()
        if is_last or is_due(batch.step):
            buffers.remember_parameters()
        max_norm = plan.at(batch.step).max_norm
        if clipper.clipping.max_norm != max_norm:
            clipper.clipping = replace(clipper.clipping, max_norm=max_norm)
        gather(batch)
        ledger.settle()  # while the GPU is busy: the last step's tag is there by now
        numbers = gather.stats.read(len(batch.chunks), processes)
        if numbers[BROKEN]:
            # An example that is not finite has spoilt the sums, which is rare: again, without it.
            gather.without_broken(batch)
        # What replays write moves no version: before the weights are done, values are looked at.
        buffers.check(values=is_last)
        if processes.agree(processes.leads and is_lost(noisy.sums, ledger, secret, batch.step)):
            for parameter in clipper.parameters.values():
                parameter.grad = None
            return {**averages_of(numbers), LEFT_OUT: 1.0}
        noisy.release(batch.step, plan, ledger, secret)
        return averages_of(numbers)

    return step


def is_lost(total: Mapping[str, Tensor], ledger: Ledger, secret: SessionKey, step: int) -> bool:
    """Whether this step was paid for before a crash, and its sum comes out otherwise now.

    Sums that are added in another order (another physical batch, another machine) differ in their
    last bits. To release such a sum again would cost again, and break the budget. So the step is
    left out: it stays paid for, and its effect is lost.
    """
    if secret.fixed:
        return False
    tags = ledger.tags("train", step)
    return bool(tags) and tag_of(total, secret, (ledger.header.id, "train", step)) not in tags


class GradientSum:
    """Adds up the clipped gradients of a batch; in several processes, those of all of them."""

    def __init__(
        self,
        clipper: GradientClipper,
        inputs: Inputs,
        paid: PrivacyContext,
        clip: Callable[..., Clipped],
        processes: ProcessGroup,
    ) -> None:
        self.clipper, self.clip, self.secret = clipper, clip, paid.secret
        self.scope = paid.secret.scope(paid.ledger.header.id)
        # Views belong to the place of an image in the data, and dropout to its place in a batch.
        # Both places move when a person joins, which is covered only while nobody knows what is
        # drawn.
        self.inputs = replace(inputs, seed=self.secret.seed(("views", *self.scope, "train")))
        self.noisy = NoisyGradient(lambda: clipper.parameters, processes=processes)
        self.stats = BatchStats(inputs.device)
        self._turns = count()
        """Batches so far of which this process had a share."""

    def __call__(self, batch: Batch) -> None:
        """Sums and `stats` of the batch. An example that is not finite spoils the sums."""
        self.noisy.begin()
        self.stats.begin()
        # At first often, then ever more rarely: recorded steps are much faster than this.
        unmixed = is_due(batch.step, rarely=None)
        for number, (seed, given) in enumerate(self._chunks(batch)):
            if unmixed and not number:
                losses, inputs, examples, _ = given
                check_mixing(self.clipper, losses, inputs, examples)
                torch.manual_seed(seed)
            if not number and contributions_due(next(self._turns)):
                # Before: what a captured clip gives is overwritten by its next call.
                self._check_contributions(given)
                self.stats.begin()
                torch.manual_seed(seed)
            # It gets no name: it is as large as the sums, and memory is short where noise is added.
            self.noisy.add(self.clip(*given, tell=self.stats).total)
        self.noisy.all_reduce(stats=self.stats.numbers)

    def without_broken(self, batch: Batch) -> None:
        """The sums without examples that are not finite: slower, and rarely needed."""
        self.noisy.begin()
        for _, given in self._chunks(batch):
            self.noisy.add(self.clipper.clip(*given).total)
        self.noisy.all_reduce()

    def _chunks(self, batch: Batch) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """What to clip of each of this process's chunks, with torch's seed set, and that seed."""
        for place, chunk in self.noisy.processes.share(batch.chunks):
            inputs = self.inputs.tensors(chunk, batch.step)
            seed = self.secret.seed(("dropout", *self.scope, "train", batch.step, place))
            torch.manual_seed(seed)
            mask = to_device(chunk.mask, self.inputs.device)
            yield seed, (self.inputs.losses, inputs, len(mask), mask)

    def _check_contributions(self, given: tuple[Any, ...]) -> None:
        """What an example of this chunk adds, clipped as the step clips, must be in the bound."""
        losses, inputs, examples, _ = given

        def look(alone: Tensor) -> Clipped:
            found = self.clip(losses, inputs, examples, alone, tell=self.stats)
            if bool(found.norms.isfinite().all()):
                return found
            return self.clipper.clip(losses, inputs, examples, alone)

        check_contributions(self.clipper, look, examples)
