"""Shadow models of a target, group by group: each group is kept, so a cut audit goes on.

They have the target's network, optimizer, learning rate, batch and number of passes, and learn
plainly, without noise or augmentation, each a random half of the members and the others together.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from sfumato.attacks.membership import log_odds
from sfumato.attacks.shadow_models import (
    Optimize,
    ShadowModels,
    draw_halves,
    shadow_batches,
    train_copies,
)
from sfumato.commands.audit.target import Target
from sfumato.commands.train import command as train
from sfumato.commands.train.train_state import number_of_steps
from sfumato.data.images import Images
from sfumato.runs import Run
from sfumato.settings.audit import AuditRun
from sfumato.training.inputs import Inputs
from sfumato.training.setup import OPTIMIZERS, make_schedule

GROUP = 8
"""Shadow models that are trained side by side, and kept together."""
IN_MEMORY = 512
"""Images in memory at once, of all of them together."""


def shadow_odds(config: AuditRun, target: Target, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Which model was trained on which image, and the log-odds of the pool and of the population,
    by model."""
    stage = Run(run.private, run.say).stage("shadows")
    inside = draw_halves(config.shadows, len(target.pool), config.seed)
    found = []
    for first in range(0, config.shadows, GROUP):
        numbers = range(first, min(first + GROUP, config.shadows))
        place = stage.path / f"odds-{first}-{numbers.stop}.safetensors"
        if not place.exists():
            stage.save_tensors(place.name, _group(config, target, inside, numbers, run))
            run.log(f"{numbers.stop} of {config.shadows} shadow models")
        found.append(load_file(place))
    pool, population = (
        torch.cat([part[name] for part in found]) for name in ("pool", "population")
    )
    return inside, pool, population


def _group(
    config: AuditRun, target: Target, inside: Tensor, numbers: Sequence[int], run: Run
) -> dict[str, Tensor]:
    """Train these models; fewer at a time where a GPU has no room for all."""
    try:
        copies, inputs = _train(config, target, inside, numbers, run)
        return {
            name: log_odds(copies.logits(_inputs_of(inputs, images), IN_MEMORY), images.labels)
            for name, images in (("pool", target.pool), ("population", target.population))
        }
    except torch.cuda.OutOfMemoryError:
        if len(numbers) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(numbers) // 2
    parts = [_group(config, target, inside, part, run) for part in (numbers[:half], numbers[half:])]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _train(
    config: AuditRun, target: Target, inside: Tensor, numbers: Sequence[int], run: Run
) -> tuple[ShadowModels, Inputs]:
    half = int(inside.sum(1).min())
    size = max(1, min(round(target.settings.batch_size), half))
    settings = replace(target.alone, batch_size=size)
    steps = number_of_steps(settings, half)
    made = [
        train.prepare_classifier(
            replace(settings, seed=config.seed + 1 + k), target.pool, target.device
        )
        for k in numbers
    ]
    inputs = made[0][1]
    batches = [
        shadow_batches(inside[k], steps=steps, size=size, seed=config.seed, number=k)
        for k in numbers
    ]
    torch.manual_seed(config.seed)  # for dropout
    copies = train_copies(
        [train_state.model for train_state, _ in made],
        inputs,
        torch.stack(batches),
        optimizer_of(settings, steps),
        at_once=max(1, IN_MEMORY // len(numbers)),
        say=run.say,
    )
    return copies, inputs


def _inputs_of(inputs: Inputs, images: Images) -> Inputs:
    """The same reading, of other images."""
    return replace(inputs, images=images.to(inputs.device))


def optimizer_of(settings: train.Config, steps: int) -> Optimize:
    """The target's optimizer and schedule, for whatever is to learn."""

    def optimize(tensors: Sequence[Tensor]):  # noqa: ANN202
        options = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        if settings.optimizer == "sgd":
            options["momentum"] = settings.momentum
        optimizer = OPTIMIZERS[settings.optimizer](list(tensors), **options)
        return optimizer, make_schedule(optimizer, settings.schedule, steps)

    return optimize
