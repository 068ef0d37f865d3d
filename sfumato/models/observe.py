"""What goes into the normalisation layers of a network, as a few numbers for each image.

The mean and the mean square of every channel, taken over the positions of one image: that is what
a BatchNorm would have recorded, and it is known of any normalisation layer. Averages over images
of these numbers are the averages over all positions of all images, so they add up.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sfumato.errors import UnsupportedLayer
from sfumato.models.normalise import BatchNorm

CHANNELS_FIRST = (nn.GroupNorm, BatchNorm, nn.modules.instancenorm._InstanceNorm)


def normalisation_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The normalisation layers by their path; empty where a network has none.

    LayerNorm and all that are built like it (RMSNorm, timm's own too) name a normalised shape.
    """
    named = model.named_modules()
    return {
        n: m for n, m in named if isinstance(m, CHANNELS_FIRST) or hasattr(m, "normalized_shape")
    }


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and back to whatever mode each module was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def observed(model: nn.Module) -> Iterator[list[Float[Tensor, "2 n _"]]]:
    """Within this, every forward pass adds to the list: mean and mean square at each layer.

    Guarantee: row i of each depends on image i alone, if the model itself treats images one by one.
    A layer that is called twice adds twice. Empty the list before the next pass. Gradients flow.
    """
    found: list[Tensor] = []
    batch: list[int] = []

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        batch[:] = [len(inputs[0])]

    def look(path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if len(x) != batch[0]:
            raise UnsupportedLayer(
                f'"{path}" sees {len(x)} rows for {batch[0]} images, so its statistics are not '
                "those of one image. Take another teacher, or --k 0, which needs none."
            )
        found.append(moments_of(x, channel_axis(module, x)))

    handles = [model.register_forward_pre_hook(enter)]
    for name, layer in normalisation_layers(model).items():
        hook = lambda m, inputs, name=name: look(name, m, inputs)  # noqa: E731
        handles.append(layer.register_forward_pre_hook(hook))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def moments_of(x: Float[Tensor, "n ..."], axis: int) -> Float[Tensor, "2 n c"]:
    """Mean and mean square of each channel of each image, over all other axes, in float32."""
    flat = x.float().movedim(axis, 1).flatten(2) if x.ndim > 2 else x.float()[:, :, None]
    return torch.stack([flat.mean(2), flat.square().mean(2)])


def channel_axis(module: nn.Module, x: Tensor) -> int:
    """Where the channels are. Libraries have a LayerNorm2d, a LayerNorm with channels first."""
    first = isinstance(module, CHANNELS_FIRST) or type(module).__name__.endswith("2d")
    return 1 if first or x.ndim == 2 else x.ndim - 1
