"""Small runs to audit: a network for digits of 8 x 8 pixels, trained with and without privacy."""

from dataclasses import replace

import torch
from torch import nn

from sfumato.commands.audit import command as audit
from sfumato.commands.train import command as train
from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.files import read_json
from sfumato.runs import open_run
from sfumato.trusted_code import trusting


def small_network(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, classes))


def narrow_network(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, classes))


def noise_images(count, size, seed=0):
    """Noise of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return Images(
        pixels=torch.randint(256, (count, 1, size, size), dtype=torch.uint8, generator=generator),
        labels=torch.arange(count) % 3, classes=("a", "b", "c"), name="noise-train", private=True,
    )  # fmt: skip


def few_digits(path, trained_on=80, others=240):
    """An .npz of digits of 8 x 8 pixels; every third has a wrong label, which only memory tells."""
    parts = []
    for split, count in (("train", trained_on), ("test", others)):
        images = load_images("digits", split, image_size=8)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images = images.select(order[:count])
        wrong = (torch.arange(count) % 3 == 0) * (1 + torch.arange(count) % 9)
        parts.append(replace(images, labels=(images.labels + wrong) % 10))
    return parts[0].save_npz(path, parts[1])


def settings(data, **options):
    return train.Config(
        data=str(data), model="audits:small_network", batch_size=60, physical_batch_size=60,
        device="cpu", noise_seed=0, **options,
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


def do(config, out):
    """An audit, whole."""
    with trusting(), open_run(config, verb="audit", out=out) as run:
        return audit.run(config, run)


def findings(out):
    """What it left in private/."""
    return read_json(out / "private" / "audit.json")
