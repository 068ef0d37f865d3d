"""What an attacker may use: logits of the target, and their gradients with respect to the image.

An attack gets an `Access` and nothing else of the target: no weights, no inner layers, no training
images. So what it finds is what anybody finds who can ask the model and differentiate its answers.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.training.inputs import Inputs


class TargetAccess:
    """A target that can be asked: pixels between 0 and 1 in, logits out, gradients by autograd."""

    __slots__ = ("_ask", "asked", "classes", "device", "shape")

    def __init__(
        self,
        ask: Callable[[Tensor], Tensor],
        classes: tuple[str, ...],
        shape: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        self._ask = ask
        self.classes = classes
        self.shape = shape
        self.device = device
        self.asked = 0
        """Images that were shown to the target, without those of replayed CUDA graphs."""

    def logits(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """The target's answers, in float32. Gradients flow to the pixels."""
        if tuple(pixels.shape[1:]) != self.shape:
            raise ConfigError(
                f"the target takes images of {self.shape} (channels, height, width), and these are "
                f"{tuple(pixels.shape[1:])}. Give --image-size, or --grey."
            )
        self.asked += len(pixels)
        return self._ask(pixels)

    @torch.no_grad()
    def answers(self, pixels: Tensor, batch_size: int = 1000) -> Float[Tensor, "n classes"]:
        """Answers to many images of bytes, without gradients."""
        parts = [
            self.logits(part.to(self.device).float() / 255) for part in pixels.split(batch_size)
        ]
        return torch.cat(parts)


def access_to(model: nn.Module, inputs: Inputs) -> TargetAccess:
    """Access to a model that takes images like `inputs`. Freezes the model in place."""
    model.eval().requires_grad_(False)
    images = inputs.images

    def ask(pixels: Tensor) -> Tensor:
        return inputs.logits(model, inputs.normalise(pixels))

    access = TargetAccess(ask, images.classes, images.shape, inputs.device)
    found = access.logits(torch.zeros(2, *images.shape, device=inputs.device)).shape[1]
    if found != len(images.classes):
        raise ConfigError(
            f"the target knows {found} classes, and the private data has {len(images.classes)}."
        )
    access.asked = 0
    return access
