"""`sfumato audit --run`: a finished run of sfumato train, under every attack there is.

The members are its training images, the others its test images. A quarter of the test images is
kept apart as the population that RMIA compares with. All of this is the auditor's, who has the
private images: a real attacker has to guess which images to ask about.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.commands import train
from sfumato.commands.audit.record import AuditRecord, allowed_curve, describe_attack, promised
from sfumato.errors import DataError, RunError
from sfumato.runs import Run
from sfumato.settings.audit import Audit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sfumato.data.images import Images
    from sfumato.privacy.ledger import Ledger

POPULATION = 0.25
"""The share of the test images that RMIA compares with."""


@dataclass(frozen=True)
class Target:
    """A finished run, and the images that its attackers are judged by."""

    folder: Path
    settings: train.Config
    ledger: "Ledger"
    pool: "Images"
    """Members, and then the others."""
    members: int
    population: "Images"
    device: "torch.device"

    @property
    def alone(self) -> train.Config:
        """How one image of the pool is read: as it is, by itself."""
        return replace(
            self.settings, unit="example", people=None, augmult=1, crop=0, flip=False,
            precision="float32", ema=0.0, extender="none", extender_images=None, canaries=0,
        )  # fmt: skip


def audit_run(config: Audit, run: Run) -> AuditRecord:
    """Attack the run by its answers, and ask its canaries if it has any."""
    target = open_target(config, run)
    found = AuditRecord(target=target.folder.resolve().name, promise=promise_of(target.ledger))
    found.curve = curve_of(target.ledger)
    if target.settings.canaries:
        from sfumato.commands.audit.canaries import examine

        heard = examine(target.folder, confidence=config.confidence)
        found.bounds, found.checks = heard.bounds, [asdict(check) for check in heard.checks]
        found.attacks = [
            describe_attack(name, *scores, config.confidence)
            for name, scores in heard.attacks.items()
        ]
    found.attacks += membership(config, target, run)
    return found


def open_target(config: Audit, run: Run) -> Target:
    """The run's settings, ledger and images; or what is wrong with them."""
    from sfumato.commands.stages import given_run
    from sfumato.data.known import known_data
    from sfumato.data.load import load_splits
    from sfumato.training.setup import pick_device

    folder = practise(config, run) if config.run is None else config.run
    if not folder.is_dir():
        raise RunError(f"--run {folder}: there is no such folder. Give a run of sfumato train.")
    like = train.Config(mode="non-private", data_root=config.data_root, device=config.device)
    settings, _, ledger = given_run(folder, like)
    if ledger is None:
        raise RunError(f"{folder} has no ledger.jsonl: nobody knows what it promised.")
    members, test = load_splits(settings.data, people=settings.people, **settings.loading)
    _check_size(folder, len(members), settings)
    known = known_data(folder)
    if known is not None:
        known.require(members, str(folder), "An audit needs the very images that were learnt.")
    members = _without_canaries(replace(members, people=None), folder, settings)
    test = replace(test, people=None)
    population, others = test.split(POPULATION, seed=config.seed)
    return Target(
        folder, settings, ledger, members.joined(others), len(members), population,
        pick_device(config.device),
    )  # fmt: skip


def practise(config: Audit, run: Run) -> Path:
    """A small private run on the digits, to try an audit on."""
    from sfumato.data.load import load_splits

    settings = train.Config(
        epsilon=3.0, batch_size=250, epochs=4, lr=1.0, physical_batch_size=250, canaries=1000,
        data_root=config.data_root, device=config.device,
    )  # fmt: skip
    stage = run.stage("target")
    if not stage.finished:
        stage.write_json("config.json", {"verb": "train", "config": settings})
        run.log("stage target: a small private network")
        train.run_on(settings, *load_splits(settings.data, **settings.loading), stage)
    return stage.path


def promise_of(ledger: "Ledger") -> dict[str, Any] | None:
    """What the ledger adds up to; None if that is nothing."""
    promise = ledger.promise()
    if math.isinf(promise["epsilon"]):
        return None
    return promised(**{name: promise[name] for name in ("epsilon", "delta", "relation", "unit")})


def curve_of(ledger: "Ledger") -> dict[str, list[float]] | None:
    """What the ledger allows a test for one image; None where it says nothing of single images.

    Where the noise changed from step to step, all steps count as those with the least.
    """
    releases = ledger.releases
    if ledger.header.unit != "example" or not releases:
        return None
    if any(release.is_exact or release.max_batch is not None for release in releases):
        return None
    return allowed_curve(
        rate=max(release.rate for release in releases),
        noise_multiplier=min(release.noise_multiplier for release in releases),
        steps=len(releases),
    )


def membership(config: Audit, target: Target, run: Run) -> list[dict[str, Any]]:
    """The loss attack and, with shadow models, LiRA and RMIA: rates with intervals."""
    import torch

    from sfumato.attacks.membership import lira_offline, lira_online, loss_scores, rmia

    phi, population = target_odds(target)
    scores = {"loss": loss_scores(phi)}
    if config.shadows:
        from sfumato.commands.audit.shadows import shadow_odds

        inside, shadows, shadow_population = shadow_odds(config, target, run)
        scores["lira-online"] = lira_online(phi, shadows, inside)
        scores["lira-offline"] = lira_offline(phi, shadows, inside)
        scores["rmia"] = rmia(phi, shadows, inside, population, shadow_population)
    is_member = torch.arange(len(phi)) < target.members
    return [
        describe_attack(
            name, score[is_member].numpy(), score[~is_member].numpy(), config.confidence
        )
        for name, score in scores.items()
    ]


def target_odds(target: Target) -> "tuple[Tensor, Tensor]":
    """The log-odds that the target gives to the pool, and to the population."""
    from sfumato.attacks.membership import log_odds
    from sfumato.commands.load_model import load_model

    trained = load_model(target.folder, str(target.device))
    known = trained.description
    if (known.classes, known.shape) != (target.pool.classes, target.pool.shape):
        raise RunError(
            f'{target.folder} learnt images of other classes, or of another size, than those of "'
            f'{target.settings.data}" are now. An audit needs the very images that were learnt.'
        )
    trained = replace(trained, description=replace(known, precision="float32"))
    answers = [
        log_odds(trained.logits(images), images.labels)
        for images in (target.pool, target.population)
    ]
    return answers[0], answers[1]


def _check_size(folder: Path, size: int, settings: train.Config) -> None:
    """Refuse images that are not as many as the plan was made for."""
    from sfumato.files import read_json

    plan = read_json(folder / "plan.json") if (folder / "plan.json").exists() else None
    if plan is None:
        raise RunError(f"{folder} has no plan.json: it is no whole run of sfumato train.")
    planned = round(plan["expected_batch"] / plan["rate"])
    if settings.canaries and settings.canary_kind == "gradient":
        planned -= settings.canaries
    if settings.unit == "example" and planned != size:
        raise DataError(
            f'{folder} learnt {planned} images, and "{settings.data}" has {size} now. An audit '
            "needs the very images that were learnt."
        )


def _without_canaries(images: "Images", folder: Path, settings: train.Config) -> "Images":
    """The images that were learnt as they are: a canary may be left out, or have a wrong label."""
    if not settings.canaries:
        return images
    from sfumato.commands.train.canaries import read_canaries

    if not (folder / "private" / "canaries.json").exists():
        raise RunError(
            f"{folder} was trained with canaries, and private/canaries.json is gone: nobody knows "
            "how the coins fell. Audit the run where it was made."
        )
    canaries = set(read_canaries(folder).places)
    return images.select([place for place in range(len(images)) if place not in canaries])
