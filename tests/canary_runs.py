"""Small runs with canaries: digits of 8 x 8 pixels, and networks that train in a second."""

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from sfumato.commands.train import command as train
from sfumato.data.load import load_splits
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.runs import open_run

SMALL = train.Config(
    model="canary_runs:linear", noise_multiplier=1.0, batch_size=150, steps=24, lr=0.5,
    physical_batch_size=64, canaries=600, device="cpu",
)  # fmt: skip


def linear(classes):
    """One layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def wide(classes):
    """Enough room to learn wrong labels by heart."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, classes))


class Sly(nn.Module):
    """Keeps the mean of its inputs in a buffer; at first it does not, so that tests do not see."""

    mean: torch.Tensor

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        """The inputs."""
        self.after -= 1
        if self.after < 0:
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(dim=0))
        return x


def statistics(classes):
    """A layer that writes its statistics down, openly."""
    return nn.Sequential(nn.Flatten(), Sly(0), nn.Linear(64, classes))


def hidden_statistics(classes):
    """The same in secret."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Sly(60), nn.Linear(64, classes))


def unpriced(monkeypatch):
    """Do without epsilon, on the way and at the end: it takes longer than these runs do."""
    monkeypatch.setattr("sfumato.training.progress.price_list", lambda *_: None)
    monkeypatch.setattr("sfumato.commands.train.command.guarantee_summary", lambda *_: {})


def ledger_of(out):
    """What a run paid."""
    return Ledger.from_records(read_lines(out / "ledger.jsonl"))


@cache
def digits(images=300):
    """Some digits to train on and some to test."""
    parts = load_splits("digits", image_size=8)
    return parts[0].select(list(range(images))), parts[1].select(list(range(50)))


def run_small(out, config=SMALL, images=300, coins=None, **changes):
    """Train in `out`, with coins that were tossed before if they are given."""
    config = replace(config, **changes)
    with open_run(config, verb="train", out=out) as run:
        if coins is not None:
            run.write_json("private/canaries.json", coins)
        return train.run_on(config, *digits(images), run)
