"""A small teacher, what it looks at, and what it sees."""

import torch
from torch import nn

from sfumato.data.images import Images
from sfumato.sharing.moments import make_gauge, observe_features, sum_moments
from sfumato.training.inputs import Inputs


class Explosive(nn.Module):
    """Leaves images alone, except for those that are all white: these grow beyond float32."""

    def forward(self, x):
        white = x.flatten(1).min(dim=1).values > 0.99
        return torch.where(white[:, None, None, None], 1e30 * x, x)


def teacher(first=None):
    torch.manual_seed(0)
    return nn.Sequential(
        first or nn.Identity(), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, 2), nn.GroupNorm(3, 6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3),
    ).eval()  # fmt: skip


def faces(n=24, seed=1, private=True):
    """Images of all brightnesses; the first is black, the second white."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(n, 1, 1, 1, generator=generator)
    pixels = (256 * scale * torch.rand(n, 1, 12, 12, generator=generator)).byte()
    pixels[0], pixels[1] = 0, 255
    labels = torch.arange(n) % 3
    return Images(
        pixels=pixels, labels=labels, classes=("a", "b", "c"), name="faces", private=private
    )


def inputs_of(images, **changes):
    return Inputs(images, torch.device("cpu"), (0.5,), (0.5,), **changes)


PUBLIC = inputs_of(faces(50, seed=7, private=False))


def gauge_of(model, slack=0.7):
    return make_gauge(model, PUBLIC, slack)


def largest_move(table_of, images):
    """How far taking away one image moves what is computed of all of them, at most."""
    whole = table_of(images)
    places = range(len(images))
    fewer = [images.select([p for p in places if p != gone]) for gone in places]
    return max(float((whole - table_of(rest)).norm()) for rest in fewer)


def sums_with(model, gauge, **options):
    return lambda images: sum_moments(model, inputs_of(images), gauge, **options)


@torch.no_grad()
def vectors_of(model, images, gauge):
    parts = [gauge.vectors(found) for _, found in observe_features(model, inputs_of(images))]
    return torch.cat(parts).double()
