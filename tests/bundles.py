"""Small bundles, and what a forger does to them."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import torch

from sfumato.config import from_json
from sfumato.data.images import Images
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.releases import Release
from sfumato.sharing.bundle import verify_bundle, write_bundle
from sfumato.sharing.card import BundleCard
from sfumato.sharing.card_words import markdown

COPIES = {"share": 0.01, "threshold": 12.0, "standard_error": 0.004}
FORMATS = ("npz", "png")


def images(count=7, channels=3, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    made = Images(
        pixels=torch.randint(0, 256, (count, channels, 4, 5), generator=generator).byte(),
        labels=torch.arange(count) % 3,
        classes=("ant", 'b"e,e', "naïve\r\ncat"),
        name="flowers",
        private=False,
    )
    return replace(made, **changes)


def paid(*stages, rate=1.0, moments_noise=6.0, **header):
    """A ledger with three steps of training and one event for each further stage."""
    ledger = Ledger(LedgerHeader(**{"data": "faces", "delta": 1e-5, "noise": "chacha20", **header}))
    for step in range(3 if "train" in stages else 0):
        ledger.charge(Release(stage="train", step=step, rate=rate, noise_multiplier=3.0))
    noises = {"moments": moments_noise, "card": 20.0}
    for stage in stages:
        if stage != "train":
            ledger.charge(Release(stage=stage, noise_multiplier=noises[stage]))
    return ledger


def write(folder, *, made=None, ledger=None, logits=None, **changes):
    made = images() if made is None else made
    values = {
        "format": "npz",
        "k": 10,
        "model": "wrn16-4",
        "public": "flowers",
        "temperature": 4.0,
        "moved": {"mean": 3.25, "largest": 41.0},
        "near_copies": COPIES,
        **changes,
    }
    logits = torch.randn(len(made), len(made.classes)) if logits is None else logits
    return write_bundle(folder, made, logits, ledger or paid("train", "moments", "card"), **values)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit(folder, *, words=True, **changes):
    """Change the card as a forger would: words and hashes fit again afterwards."""
    path = folder / "card.json"
    card = {**json.loads(path.read_text()), **changes}
    if words:
        (folder / "card.md").write_text(markdown(from_json(BundleCard, card)))
    card["files"] = {name: digest(folder / name) for name in card["files"]}
    path.write_text(json.dumps(card))


def rewrite_ledger(folder, change):
    path = folder / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(change(lines)))


def rewrite_arrays(path, change):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    change(arrays)
    np.savez_compressed(path, **arrays)


def the_problem(folder, *words):
    """The one problem that holds all these words; every problem ends in a remedy."""
    verdict = verify_bundle(folder)
    assert not verdict.ok
    assert all(problem.endswith(".") and ". " in problem for problem in verdict.problems)
    found = [p for p in verdict.problems if all(word in p for word in words)]
    assert len(found) == 1, verdict.problems
    return found[0]
