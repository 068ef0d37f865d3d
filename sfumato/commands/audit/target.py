"""The run that `sfumato audit` attacks: its settings, ledger and images."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sfumato.commands.stages import read_given_run
from sfumato.commands.train import command as train
from sfumato.commands.train.canaries import read_canaries
from sfumato.data.fingerprint import known_data
from sfumato.data.images import Images
from sfumato.data.load import load_splits
from sfumato.errors import DataError, RunError
from sfumato.files import read_json
from sfumato.privacy.ledger import Ledger
from sfumato.runs import Run
from sfumato.settings.audit import AuditRun
from sfumato.training.setup import pick_device

POPULATION = 0.25
"""The share of the test images that RMIA compares with."""


@dataclass(frozen=True)
class Target:
    """A finished run, and the images that its attackers are judged by."""

    folder: Path
    settings: train.Config
    ledger: Ledger
    pool: Images
    """Members, and then the others."""
    members: int
    population: Images
    device: torch.device

    @property
    def alone(self) -> train.Config:
        """How one image of the pool is read: as it is, by itself."""
        return replace(
            self.settings,
            unit="example",
            people=None,
            augmult=1,
            crop=0,
            flip=False,
            precision="float32",
            ema=0.0,
            extender="none",
            extender_images=None,
            canaries=0,
        )


def open_target(config: AuditRun, run: Run) -> Target:
    """The run's settings, ledger and images; or what is wrong with them."""
    folder = train_practice_run(config, run) if config.run is None else config.run
    if not folder.is_dir():
        raise RunError(f"--run {folder}: there is no such folder. Give a run of sfumato train.")
    like = train.Config(mode="non-private", data_root=config.data_root, device=config.device)
    settings, _, ledger = read_given_run(folder, like)
    if ledger is None:
        raise RunError(f"{folder} has no ledger.jsonl: nobody knows what it guaranteed.")
    members, test = load_splits(settings.data, people=settings.people, **settings.source.loading)
    _check_size(folder, len(members), settings)
    known = known_data(folder)
    if known is not None:
        known.require(
            members, str(folder), "An audit needs the very images that the model was trained on."
        )
    members = _without_canaries(replace(members, people=None), folder, settings)
    test = replace(test, people=None)
    population, others = test.split(POPULATION, seed=config.seed)
    return Target(
        folder,
        settings,
        ledger,
        members.joined(others),
        len(members),
        population,
        pick_device(config.device),
    )


def train_practice_run(config: AuditRun, run: Run) -> Path:
    """A small private run on the digits, to try an audit on."""
    settings = train.Config(
        epsilon=3.0,
        batch_size=250,
        epochs=4,
        lr=1.0,
        physical_batch_size=250,
        canaries=1000,
        data_root=config.data_root,
        device=config.device,
    )
    stage = run.stage("target")
    if not stage.finished:
        stage.write_json("config.json", {"verb": "train", "config": settings})
        run.log("stage target: a small private network")
        train.run_on(settings, *load_splits(settings.data, **settings.source.loading), stage)
    return stage.path


def _check_size(folder: Path, size: int, settings: train.Config) -> None:
    """Refuse images that are not as many as the plan was made for."""
    plan = read_json(folder / "plan.json") if (folder / "plan.json").exists() else None
    if plan is None:
        raise RunError(f"{folder} has no plan.json: it is no whole run of sfumato train.")
    planned = round(plan["expected_batch"] / plan["rate"])
    if settings.canaries and settings.canary_kind == "gradient":
        planned -= settings.canaries
    if settings.unit == "example" and planned != size:
        raise DataError(
            f'{folder} was trained on {planned} images, and "{settings.data}" has {size} now. An '
            "audit needs the very images that the model was trained on."
        )


def _without_canaries(images: Images, folder: Path, settings: train.Config) -> Images:
    """The images that were trained on as they are: a canary may be left out, or have a wrong
    label."""
    if not settings.canaries:
        return images

    if not (folder / "private" / "canaries.json").exists():
        raise RunError(
            f"{folder} was trained with canaries, and private/canaries.json is gone: nobody knows "
            "how the coins fell. Audit the run where it was made."
        )
    canaries = set(read_canaries(folder).places)
    return images.select([place for place in range(len(images)) if place not in canaries])
