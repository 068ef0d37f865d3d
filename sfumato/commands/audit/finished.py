"""`sfumato audit run`: a finished run of sfumato train, under every attack there is.

The members are its training images, the others its test images. A quarter of the test images is
kept apart as the population that RMIA compares with. All of this is the auditor's, who has the
private images: a real attacker has to guess which images to ask about.
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from sfumato.attacks.membership import lira_offline, lira_online, log_odds, loss_scores, rmia
from sfumato.commands.audit.canaries import examine_canaries
from sfumato.commands.audit.record import (
    AuditRecord,
    allowed_curve,
    describe_attack,
    guarantee_record,
)
from sfumato.commands.audit.shadows import shadow_odds
from sfumato.commands.audit.target import Target, open_target
from sfumato.commands.load_model import load_model
from sfumato.errors import RunError
from sfumato.privacy.ledger import Ledger
from sfumato.runs import Run
from sfumato.settings.audit import AuditRun


def audit_run(config: AuditRun, run: Run) -> AuditRecord:
    """Attack the run by its answers, and ask its canaries if it has any."""
    target = open_target(config, run)
    found = AuditRecord(
        target=target.folder.resolve().name, guarantee=audited_guarantee(target.ledger)
    )
    found.curve = curve_of(target.ledger)
    if target.settings.canaries:
        heard = examine_canaries(target.folder, confidence=config.confidence)
        found.bounds, found.checks = heard.bounds, [asdict(check) for check in heard.checks]
        found.attacks = [
            describe_attack(name, *scores, config.confidence)
            for name, scores in heard.attacks.items()
        ]
    found.attacks += membership(config, target, run)
    return found


def audited_guarantee(ledger: Ledger) -> dict[str, Any] | None:
    """What the ledger adds up to; None if that is nothing."""
    guarantee = ledger.guarantee()
    if math.isinf(guarantee["epsilon"]):
        return None
    return guarantee_record(
        **{name: guarantee[name] for name in ("epsilon", "delta", "relation", "unit")}
    )


def curve_of(ledger: Ledger) -> dict[str, list[float]] | None:
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


def membership(config: AuditRun, target: Target, run: Run) -> list[dict[str, Any]]:
    """The loss attack and, with shadow models, LiRA and RMIA: rates with intervals."""
    phi, population = target_odds(target)
    scores = {"loss": loss_scores(phi)}
    if config.shadows:
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


def target_odds(target: Target) -> tuple[Tensor, Tensor]:
    """The log-odds that the target gives to the pool, and to the population."""
    trained = load_model(target.folder, str(target.device))
    known = trained.description
    if (known.classes, known.shape) != (target.pool.classes, target.pool.shape):
        raise RunError(
            f"{target.folder} was trained on images of other classes, or of another size, than "
            f'those of "{target.settings.data}" are now. An audit needs the '
            "very images that the model was trained on."
        )
    trained = replace(trained, description=replace(known, precision="float32"))
    answers = [
        log_odds(trained.logits(images), images.labels)
        for images in (target.pool, target.population)
    ]
    return answers[0], answers[1]
