"""A step of ordinary training: the mean gradient, with no clipping, no noise and no guarantee.

It is what the private step is compared with, and how public images are trained on.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.clipping.plain_group_norm import QuickGroupNorm, has_group_norm
from sfumato.data.example_rng import seed_of
from sfumato.device_transfer import to_device
from sfumato.privacy.flat import Layout
from sfumato.privacy.sampling import Batch
from sfumato.training.batch_stats import BatchStats, averages_of
from sfumato.training.cuda_graph import Captured
from sfumato.training.hooks import Step
from sfumato.training.inputs import Inputs
from sfumato.training.process_group import ProcessGroup


def plain_step(
    model: nn.Module,
    inputs: Inputs,
    *,
    processes: ProcessGroup | None = None,
    compiled: bool = False,
) -> Step:
    """A step that leaves the ordinary mean gradient: no clipping, no noise, no guarantee.

    On a GPU passes of one shape are captured and replayed, as those of the private way are, with
    the same GroupNorm.
    """
    processes = ProcessGroup() if processes is None else processes
    # Sizes are few, and each is worth a program of its own.
    answer: Any = torch.compile(model, dynamic=False) if compiled else model
    quick = inputs.device.type == "cuda" and not compiled and has_group_norm(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layout, stats = Layout.of(named), BatchStats(inputs.device)

    def work(mask: Tensor, *tensors: Tensor) -> dict[str, Tensor]:
        """The gradient of the sum of the losses: zero where no example reached a parameter."""
        with QuickGroupNorm() if quick else nullcontext():
            losses = torch.where(mask, inputs.losses(answer, *tensors), 0.0)
        stats.add(losses.detach(), mask)
        found = torch.autograd.grad(
            losses.sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(named, found, strict=True))

    captured = Captured(work, inputs.device)

    def step(batch: Batch) -> dict[str, float]:
        total = layout.zeros()
        stats.begin()
        for place, chunk in processes.share(batch.chunks):
            tensors = inputs.tensors(chunk, batch.step)
            mask = to_device(chunk.mask, inputs.device)
            torch.manual_seed(seed_of(inputs.seed, batch.step, place))
            if inputs.wrap_loss is None:
                total.add(captured(model.training, mask, *tensors))
            else:  # it may change from step to step
                total.add(work(mask, *tensors))
        processes.all_reduce({**total, "": stats.numbers})
        size = max(1, len(batch.indices))
        for flat in total.flats:
            flat /= size
        for name, parameter in named.items():
            parameter.grad = total[name]
        return averages_of(stats.read(len(batch.chunks), processes))

    return step
