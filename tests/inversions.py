"""Small inversions: three digits of 16 pixels are private, three others are public."""

import json
from dataclasses import replace
from functools import cache

import torch
from contents import content
from torch import nn

from sfumato.attacks.gan_state import GanSettings
from sfumato.attacks.latent_search import Search
from sfumato.attacks.random_views import Views
from sfumato.commands.invert import command as invert
from sfumato.commands.invert.command import Config
from sfumato.commands.train import command as train
from sfumato.data.load import load_images
from sfumato.runs import open_run

GAN = GanSettings(
    iterations=6, gan_batch=16, d_steps=1, gan_width=4, latent=8, look_every=2, patience=0
)
SEARCH = Search(restarts=2, z_steps=3)

MADE = (
    "private/stages/target/model.safetensors", "private/stages/select/selection.safetensors",
    "private/stages/prior/model.safetensors", "private/stages/latent/guesses.safetensors",
    "private/judges/group-cnn-small/model.safetensors", "private/scores.json",
)  # fmt: skip


@cache
def digits(classes, split, each):
    """The first few of each class, of 16 pixels."""
    images = load_images(f"digits@{classes}", split, image_size=16)
    labels = range(len(images.classes))
    places = [torch.nonzero(images.labels == label)[:each, 0] for label in labels]
    return images.select(torch.cat(places))


def save(path, classes, train_each=60, test_each=20):
    train_part, test_part = digits(classes, "train", train_each), digits(classes, "test", test_each)
    return str(train_part.save_npz(path, test_part))


def tiny(folder, **changes):
    """Settings of an attack that takes a second; its images are written to the folder."""
    config = Config(
        data=save(folder / "private.npz", "0-2"), public=save(folder / "public.npz", "5-7"),
        device="cpu", model="group-cnn-small", mode="non-private", batch_size=30, steps=4,
        optimizer="adam", lr=3e-3, noise_seed=1, judges=("group-cnn-small",), judge_epochs=1.5,
        n=20, views=Views(mirror=False), gan=GAN, search=SEARCH,
    )  # fmt: skip
    return replace(config, **changes)


def attack(config, out):
    with open_run(config, verb="invert", out=out) as run:
        return invert.run(config, run)


def learn(config, out):
    """A run of sfumato train."""
    with open_run(config, verb="train", out=out) as run:
        train.run(config, run)
    return out


def task(data, **changes):
    """Its settings."""
    config = train.Config(
        data=str(data), model="group-cnn-small", mode="non-private", batch_size=30, steps=2,
        device="cpu", noise_seed=2,
    )  # fmt: skip
    return replace(config, **changes)


def scores_of(out):
    return json.loads((out / "private" / "scores.json").read_text())


def same(out, other, names=MADE):
    """Which of these files are equal, byte by byte."""
    return {name: content(out / name) == content(other / name) for name in names}


class TwoHeads(nn.Module):
    """Two last layers, of which the mean counts."""

    def __init__(self, classes):
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3)
        self.head, self.head_dist = nn.Linear(3, classes), nn.Linear(3, classes)

    def get_classifier(self):
        return self.head, self.head_dist

    def forward(self, x):
        x = self.body(x).mean(dim=(2, 3))
        return (self.head(x) + self.head_dist(x)) / 2


def two_heads(classes):
    return TwoHeads(classes)


def own_net(classes):
    """A network of your own, with a BatchNorm that has seen images."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        nn.Linear(54, classes),
    )  # fmt: skip
