"""What happens in one optimizer step: the private way, and the plain one.

Both take a logical batch in chunks that fit memory and leave a gradient on every parameter. The
private one sums clipped per-example gradients, sends the sum through `privatize`, and charges the
ledger; the plain one averages, and is what the private one is compared with.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.augment import Augmentation
from sfumato.data.images import Images
from sfumato.ghost.clip import Ghost
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.noise import privatize
from sfumato.privacy.sampling import Batch, Chunk, Secret


@dataclass(frozen=True)
class Reading:
    """How images become inputs: device, pixel statistics, augmented views, precision."""

    images: Images
    device: torch.device
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augmentation: Augmentation = field(default_factory=Augmentation)
    views: int = 1
    precision: torch.dtype = torch.float32

    def inputs(self, chunk: Chunk, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Normalised views, those of one example side by side, and one label an example."""
        pixels = self.images.pixels[chunk.indices].to(self.device).float() / 255
        views = pixels.repeat_interleave(self.views, dim=0)
        return self.normalise(self.augmentation(views, generator)), self._labels(chunk)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels between 0 and 1, centred and scaled by fixed, public numbers."""
        shape = (1, -1, 1, 1)
        mean = torch.tensor(self.mean, device=pixels.device).reshape(shape)
        return (pixels - mean) / torch.tensor(self.deviation, device=pixels.device).reshape(shape)

    def losses(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """One cross-entropy an example, averaged over its views."""
        lower = self.precision != torch.float32
        with torch.autocast(self.device.type, self.precision) if lower else nullcontext():
            logits = model(x)
        labels = y.repeat_interleave(self.views)
        each = F.cross_entropy(logits.float(), labels, reduction="none")
        return each.unflatten(0, (-1, self.views)).mean(dim=1)

    def _labels(self, chunk: Chunk) -> Tensor:
        return self.images.labels[chunk.indices].to(self.device)


def private_step(
    ghost: Ghost, reading: Reading, plan: Plan, ledger: Ledger, secret: Secret
) -> Callable[[Batch, torch.Generator], dict[str, float]]:
    """A step that leaves the noisy mean of clipped gradients on every parameter.

    Guarantee: what it leaves is `privatize` of a sum over the Poisson batch of vectors of norm at
    most `plan.max_norm`; the ledger has its line before it is left.
    """

    def step(batch: Batch, generator: torch.Generator) -> dict[str, float]:
        named = ghost.parameters
        total = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in named.items()}
        loss = clipped = count = 0.0
        for chunk in batch.chunks:
            x, y = reading.inputs(chunk, generator)
            mask = chunk.mask.to(reading.device)
            found = ghost.clip(reading.losses, (x, y), len(mask), mask)
            for name, part in found.total.items():
                total[name] += part
            loss += float(found.losses[mask].sum())
            clipped += float((found.factors[0][mask] < 1).sum())
            count += float(mask.sum())
        noisy = privatize(total, plan, ledger, secret, step=batch.step, stage="train")
        for name, parameter in named.items():
            parameter.grad = noisy[name]
        return _averages(loss, clipped, count)

    return step


def plain_step(
    model: nn.Module, reading: Reading
) -> Callable[[Batch, torch.Generator], dict[str, float]]:
    """A step that leaves the ordinary mean gradient: no clipping, no noise, no promise."""

    def step(batch: Batch, generator: torch.Generator) -> dict[str, float]:
        model.zero_grad(set_to_none=True)
        size = max(1, len(batch.indices))
        loss = 0.0
        for chunk in batch.chunks:
            x, y = reading.inputs(chunk, generator)
            losses = reading.losses(model, x, y)
            kept = torch.where(chunk.mask.to(reading.device), losses, 0.0)
            (kept.sum() / size).backward()
            loss += float(kept.detach().sum())
        return _averages(loss, 0.0, size)

    return step


def _averages(loss: float, clipped: float, count: float) -> dict[str, float]:
    return {"loss": loss / max(count, 1.0), "clipped": clipped / max(count, 1.0), "batch": count}


@torch.no_grad()
def accuracy(model: nn.Module, reading: Reading, batch_size: int = 512) -> float:
    """The share of the images that the model names rightly, in evaluation mode."""
    was_training = [m for m in model.modules() if m.training]
    model.eval()
    right = 0
    for start in range(0, len(reading.images), batch_size):
        places = slice(start, start + batch_size)
        pixels = reading.images.pixels[places].to(reading.device).float() / 255
        found = model(reading.normalise(pixels)).argmax(dim=1).cpu()
        right += int((found == reading.images.labels[places]).sum())
    for module in was_training:
        module.training = True
    return right / len(reading.images)


def state_of(value: Any) -> Any:
    """The state to checkpoint of a module, optimizer, schedule or generator."""
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def restore(value: Any, state: Any) -> None:
    """Put a checkpointed state back."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)
