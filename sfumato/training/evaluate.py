"""What a classifier says of images: its logits, and the share that it names rightly."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sfumato.models.observe import evaluating
from sfumato.training.reading import Reading


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
