"""Small runs to audit: a network for digits of 8 x 8 pixels, trained with and without privacy."""

import torch
from torch import nn

from sfumato.data.load import load_images
from sfumato.recipes import train
from sfumato.runs import open_run


def small_network(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, classes))


def few_digits(path, learnt=120, others=400):
    """An .npz of digits of 8 x 8 pixels."""
    images = [load_images("digits", split, image_size=8) for split in ("train", "test")]
    members, rest = (
        part.select(torch.randperm(len(part), generator=torch.Generator().manual_seed(0))[:count])
        for part, count in zip(images, (learnt, others), strict=True)
    )
    return members.save_npz(path, rest)


def settings(data, **options):
    return train.Config(
        data=str(data), model="audits:small_network", physical_batch_size=60, device="cpu",
        **{"batch_size": 30, **options},
    )  # fmt: skip


def small_run(out, data, **options):
    config = settings(data, **options)
    with open_run(config, verb="train", out=out) as run:
        train.run(config, run)
    return out


def learn_digits(images):
    """A trainer for `sfumato audit --trainer`: overfits quickly."""
    model = small_network(len(images.classes))
    x = images.pixels.float() / 255
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(25):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), images.labels).backward()
        optimizer.step()
    return model
