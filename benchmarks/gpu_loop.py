"""The steps of `sfumato train` itself, for `benchmarks/gpu.py`: "plain loop", "private loop".

The other methods make a gradient of inputs that lie there. These read images, make views, look
whether all is finite and read the losses, as training does: what is left out of a benchmark is what
it flatters. A GPU captures them in any case, so they belong to the ways with graphs.
"""

import itertools
from collections.abc import Callable

import torch
from gpu_cases import Case, Way

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.data.images import Images
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.privacy.session_key import SessionKey
from sfumato.training.captured_clip import quick_clip
from sfumato.training.hooks import Step
from sfumato.training.inputs import Inputs
from sfumato.training.plain_step import plain_step
from sfumato.training.private_step import PrivacyContext, private_step


def loop_step(
    method: str, case: Case, way: Way, device: torch.device, batch: int, chunks: int
) -> tuple[torch.nn.Module, Callable[[], object]]:
    """The model, and a step of so many physical batches of it, with fused SGD."""
    model, inputs = case.model(device, way), random_inputs(case, way, device, batch)
    if method == "plain loop":
        step = plain_step(model, inputs, compiled=way.compiled)
    else:
        step = noisy_step(model, inputs, way, chunks * batch)
    # A rate of zero: as much work as any other, and the model stays what it is.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    chunk = Chunk(torch.arange(batch), torch.ones(batch, dtype=torch.bool))
    # Real batches are checked often in the first steps and rarely after them: a late step is timed.
    numbers = itertools.count(10_000)

    def go() -> None:
        step(Batch(next(numbers), (chunk,) * chunks))
        optimizer.step()
        optimizer.zero_grad()

    return model, go


def random_inputs(case: Case, way: Way, device: torch.device, count: int) -> Inputs:
    """So many images of noise on the device, read in the precision of the way."""
    torch.manual_seed(1)
    images = Images(
        pixels=torch.randint(0, 256, (count, 3, case.size, case.size), dtype=torch.uint8),
        labels=torch.arange(count) % case.classes, classes=tuple(map(str, range(case.classes))),
        name="noise", private=False,
    ).to(device)  # fmt: skip
    precision = torch.bfloat16 if way.low else torch.float32
    middle = (0.5,) * 3
    return Inputs(images, device, middle, middle, views=case.views, precision=precision)


def noisy_step(model: torch.nn.Module, inputs: Inputs, way: Way, expected: int) -> Step:
    """The private step of training, with its secret and its ledger in memory."""
    secret = SessionKey.draw()
    ledger = Ledger(LedgerHeader(data="noise", delta=1e-5, secret=secret.commitment))
    plan = Plan(noise_multiplier=1.0, expected_batch=expected, rate=0.01, steps=10**6)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=plan.max_norm))
    clipper.clip(inputs.losses, inputs.trial(), 3)  # it examines the model
    clip = quick_clip(clipper, inputs, compiled=way.compiled)
    return private_step(clipper, inputs, PrivacyContext(plan, ledger, secret), clip=clip)
