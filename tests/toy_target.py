"""A target for attacks on it: three classes of stripes, told apart by a linear map.

What it wants to see is known: class k is bright in its own third of the rows, and dark elsewhere.
"""

import torch
from torch import nn

from sfumato.attacks.access import TargetAccess, access_to
from sfumato.data.images import Images
from sfumato.training.inputs import Inputs

SHAPE = (1, 8, 8)
CLASSES = ("top", "middle", "bottom")
CPU = torch.device("cpu")


def stripes():
    """An image of each class, as the target likes it best."""
    bright = torch.arange(8) * 3 // 8
    return (bright == torch.arange(3)[:, None]).float()[:, None, :, None].expand(3, *SHAPE)


def linear_target(sure=1.0):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with torch.no_grad():
        model[1].weight.copy_(sure * (stripes() - 0.4).flatten(1) / 8)
        model[1].bias.zero_()
    return model


def some_images(n=12, private=False, seed=0):
    """Noise of bytes."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, *SHAPE), generator=generator).to(torch.uint8)
    labels = torch.arange(n) % 3
    return Images(pixels=pixels, labels=labels, classes=CLASSES, name="noise", private=private)


def access_to_toy(model=None, **inputs):
    return access_to(model or linear_target(), Inputs(some_images(), CPU, (0.5,), (0.5,), **inputs))


def access_by_table(logits):
    """A target that answers the image of value i with row i."""

    def ask(pixels):
        return logits[(pixels[:, 0, 0, 0] * 255).round().long()]

    return TargetAccess(ask, tuple(map(str, range(logits.shape[1]))), SHAPE, CPU)


def numbered_images(n, private=False):
    """Images of one value each: 0, 1, 2, ..."""
    pixels = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, *SHAPE).clone()
    labels = torch.zeros(n, dtype=torch.int64)
    return Images(pixels=pixels, labels=labels, classes=("any",), name="numbers", private=private)
