"""What happens in one optimizer step: the private way, and the plain one.

Both take a logical batch in chunks that fit memory and leave a gradient on every parameter. The
private one sums clipped per-example gradients, sends the sum through `privatize`, and charges the
ledger; the plain one averages, and is what the private one is compared with.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sfumato.clipping.buffers import Buffers
from sfumato.clipping.clip import Clipped, GradientClipper
from sfumato.clipping.mixing import is_due
from sfumato.clipping.plain_group_norm import QuickGroupNorm, has_group_norm
from sfumato.data.example_rng import seed_of
from sfumato.models.observe import evaluating
from sfumato.privacy.budget import Plan
from sfumato.privacy.flat import Layout
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.noise import privatize
from sfumato.privacy.sampling import Batch
from sfumato.privacy.seal import tag_of
from sfumato.privacy.secret import SessionKey
from sfumato.training.batch_stats import BROKEN, BatchStats, averages_of
from sfumato.training.gather import Gather
from sfumato.training.process_group import ProcessGroup
from sfumato.training.reading import Reading
from sfumato.training.replay import Captured
from sfumato.transfer import to_device

Step = Callable[[Batch], dict[str, float]]
LEFT_OUT = "left_out"
"""Among a step's numbers if it was paid for and left out (`is_lost`)."""


@dataclass(frozen=True)
class Paid:
    """What makes steps private: how much noise, where chance comes from, and who writes it down."""

    plan: Plan
    ledger: Ledger
    secret: SessionKey


def private_step(
    clipper: GradientClipper,
    reading: Reading,
    paid: Paid,
    *,
    processes: ProcessGroup | None = None,
    clip: Callable[..., Clipped] | None = None,
) -> Step:
    """A step that leaves the noisy mean of clipped gradients on every parameter.

    Guarantee: what it leaves is `privatize` of a sum over the Poisson batch of vectors of norm at
    most the plan's norm bound; the ledger has its line before it is left. With several
    processes each adds its share of the batch, and noise enters once. No buffer of the model is
    written to by the batch: that is an error, at the latest in the plan's last step.

    `clip` is `clipper.clip`, or what is quicker and does the same (`quick_clip`). In the first
    step, and rarely after it, two examples are added alone: a contribution beyond the bound is an
    error.
    """
    processes = ProcessGroup() if processes is None else processes
    plan, ledger, secret = paid.plan, paid.ledger, paid.secret
    scope = secret.scope(ledger.header.id)
    # Views belong to the place of an image in the data, and dropout to its place in a batch. Both
    # places move when somebody joins, which is covered only while nobody knows what is drawn.
    reading = replace(reading, seed=secret.seed(("views", *scope, "train")))
    gather = Gather(
        clipper=clipper,
        reading=reading,
        clip=clip or clipper.clip,
        secret=secret,
        scope=scope,
        processes=processes,
    )

    buffers = Buffers(clipper.model)

    def step(batch: Batch) -> dict[str, float]:
        is_last = batch.step == plan.steps - 1
        buffers.remember()
        if is_last or is_due(batch.step):
            buffers.remember_parameters()
        max_norm = plan.at(batch.step).max_norm
        if clipper.clipping.max_norm != max_norm:
            clipper.clipping = replace(clipper.clipping, max_norm=max_norm)
        total = gather(batch)
        ledger.settle()  # while the GPU is busy: the last step's tag is there by now
        numbers = gather.numbers(batch)
        if numbers[BROKEN]:
            # An example that is not finite has spoilt the sums, which is rare: again, without it.
            total = gather.with_care(batch)
        # What replays write moves no version: before the weights are done, values are looked at.
        buffers.check(values=is_last)
        if processes.agree(processes.leads and is_lost(total, ledger, secret, batch.step)):
            for parameter in clipper.parameters.values():
                parameter.grad = None
            return {**averages_of(numbers), LEFT_OUT: 1.0}
        noisy = gather.layout.zeros() if not processes.leads else privatize(
            total, plan, ledger, secret, step=batch.step, stage="train"
        )  # fmt: skip
        processes.broadcast(noisy)
        for name, parameter in clipper.parameters.items():
            parameter.grad = noisy[name]
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


def plain_step(
    model: nn.Module,
    reading: Reading,
    *,
    processes: ProcessGroup | None = None,
    compiled: bool = False,
) -> Step:
    """A step that leaves the ordinary mean gradient: no clipping, no noise, no promise.

    On a GPU passes of one shape are captured and replayed, as those of the private way are, with
    the same GroupNorm.
    """
    processes = ProcessGroup() if processes is None else processes
    # Sizes are few, and each is worth a program of its own.
    answer: Any = torch.compile(model, dynamic=False) if compiled else model
    quick = reading.device.type == "cuda" and not compiled and has_group_norm(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layout, stats = Layout.of(named), BatchStats(reading.device)

    def work(mask: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
        """The gradient of the sum of the losses: zero where no example reached a parameter."""
        with QuickGroupNorm() if quick else nullcontext():
            losses = torch.where(mask, reading.losses(answer, *inputs), 0.0)
        stats.add(losses.detach(), mask)
        found = torch.autograd.grad(
            losses.sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(named, found, strict=True))

    captured = Captured(work, reading.device)

    def step(batch: Batch) -> dict[str, float]:
        total = layout.zeros()
        stats.begin()
        for place, chunk in processes.share(batch.chunks):
            inputs = reading.inputs(chunk, batch.step)
            mask = to_device(chunk.mask, reading.device)
            torch.manual_seed(seed_of(reading.seed, batch.step, place))
            if reading.change is None:
                total.add(captured(model.training, mask, *inputs))
            else:  # it may change from step to step
                total.add(work(mask, *inputs))
        processes.all_reduce({**total, "": stats.numbers})
        size = max(1, len(batch.indices))
        for flat in total.flats:
            flat /= size
        for name, parameter in named.items():
            parameter.grad = total[name]
        return averages_of(stats.read(len(batch.chunks), processes))

    return step


def accuracy(model: nn.Module, reading: Reading, batch_size: int = 512) -> float:
    """The share of the images that the model names rightly, in evaluation mode."""
    found = logits_of(model, reading, batch_size).argmax(dim=1)
    return int((found == reading.images.labels.cpu()).sum()) / len(reading.images)


@torch.no_grad()
def logits_of(
    model: nn.Module, reading: Reading, batch_size: int = 512
) -> Float[Tensor, "images classes"]:
    """The model's answers to all images as they are, in evaluation mode; they lie on the CPU."""
    parts = []
    with evaluating(model):
        for start in range(0, len(reading.images), batch_size):
            x = reading.normalise(reading.scale(slice(start, start + batch_size)))
            parts.append(reading.logits(model, x).cpu())
    return torch.cat(parts)
