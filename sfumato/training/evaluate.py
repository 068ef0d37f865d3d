"""What a classifier says of images: its logits, and the share that it names rightly."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sfumato.models.observe import in_evaluation_mode
from sfumato.training.inputs import Inputs


def accuracy(model: nn.Module, inputs: Inputs, batch_size: int = 512) -> float:
    """The share of the images that the model names rightly, in evaluation mode."""
    found = logits_of(model, inputs, batch_size).argmax(dim=1)
    return int((found == inputs.images.labels.cpu()).sum()) / len(inputs.images)


@torch.no_grad()
def logits_of(
    model: nn.Module, inputs: Inputs, batch_size: int = 512
) -> Float[Tensor, "images classes"]:
    """The model's answers to all images as they are, in evaluation mode; they lie on the CPU."""
    parts = []
    with in_evaluation_mode(model):
        for start in range(0, len(inputs.images), batch_size):
            x = inputs.normalise(inputs.scale(slice(start, start + batch_size)))
            parts.append(inputs.logits(model, x).cpu())
    return torch.cat(parts)
