"""Small releases: three digits are private, clouds are public, a teacher learns in a few steps."""

import json
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from sfumato.commands.release import command as release
from sfumato.commands.release.command import Config
from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.runs import open_run
from sfumato.sharing.feature_matching import Matching


@cache
def digits(split):
    """The digits 0, 1 and 2: 80 of each to learn from, 20 of each to test with."""
    images, each = load_images("digits", split), 80 if split == "train" else 20
    places = [torch.nonzero(images.labels == label)[:each, 0] for label in range(3)]
    return replace(images.select(torch.cat(places)), classes=("zero", "one", "two"))


def clouds(count=60, *, size=28, channels=1, seed=0):
    """Public images that show nothing."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 5, 5, generator=generator)
    fine = F.interpolate(coarse, (size, size), mode="bilinear")
    return Images(
        pixels=(255 * fine).round().to(torch.uint8), labels=torch.arange(count) % 2,
        classes=("high", "low"), name="clouds", private=False,
    )  # fmt: skip


def tiny(folder, **changes):
    """Settings of a release that takes seconds; its images are written to the folder."""
    digits("train").save_npz(folder / "digits.npz", digits("test"))
    clouds().save_npz(folder / "clouds.npz", clouds(9, seed=1))
    config = Config(
        data=str(folder / "digits.npz"), public=str(folder / "clouds.npz"), device="cpu",
        model="group-cnn-small", noise_multiplier=2.0, batch_size=60, steps=5, lr=1.0,
        matching=Matching(k=2, match_batch=20), student="group-cnn-small", student_epochs=1,
        student_batch=20,
    )  # fmt: skip
    return replace(config, **changes)


def guaranteeing(config, epsilon, **changes):
    """The same with a budget in the place of a noise multiplier."""
    return replace(config, epsilon=epsilon, noise_multiplier=None, **changes)


def moved(config, k, **changes):
    """The same with k steps of matching."""
    return replace(config, matching=replace(config.matching, k=k), **changes)


def make(config, out):
    with open_run(config, verb="release", out=out) as run:
        return release.run(config, run)


def ledger_of(out):
    return Ledger.from_records(read_lines(out / "ledger.jsonl"))


def stages_of(out):
    """How many events each stage has paid for."""
    found = [release.stage for release in ledger_of(out).releases]
    return {stage: found.count(stage) for stage in dict.fromkeys(found)}


def scores_of(out):
    return json.loads((out / "private" / "scores.json").read_text())
