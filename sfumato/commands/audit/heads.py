"""`sfumato audit heads`: a recipe for small heads, audited by tens of thousands of them.

Runs are nearly free, so this is the strongest audit there is for them: heads with and without one
image that is the worst there can be, and two bounds. The first assumes nothing about the mechanism.
The second takes it to be a number of steps of this rate, with Gaussian noise of unknown size, and
asks how much noise there can be at most for an attack to succeed as often as this one did.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.attacks.head_audit import add_lone_image, lone_trials
from sfumato.attacks.heads import HeadRecipe, labels_of
from sfumato.commands.audit.record import (
    AuditRecord,
    allowed_curve,
    describe_attack,
    guarantee_record,
    joint_confidence,
    share_error,
)
from sfumato.data.load import load_images
from sfumato.errors import DataError
from sfumato.privacy.accounting import price
from sfumato.privacy.audit.lower import Bound, many_run_bound
from sfumato.privacy.audit.lower_noise import curve_bound
from sfumato.privacy.budget import Plan, check_delta
from sfumato.privacy.releases import LEAST_NOISE
from sfumato.runs import Run
from sfumato.settings.audit import AuditHeads
from sfumato.training.setup import pick_device


def audit_heads(config: AuditHeads, run: Run) -> AuditRecord:
    """Train heads on both of two neighbouring data sets, and bound epsilon from below."""
    images = load_images(config.data, "train", **config.source.loading)
    recipe = replace(config.head, classes=len(images.classes))
    check_delta(config.delta, recipe.images)
    own = _first_of_each(images.labels, recipe)
    features = (images.pixels[own].float() / 255).flatten(1).to(pick_device(config.device))
    scores = _scores(config, recipe, add_lone_image(features, recipe), run)
    found = AuditRecord(
        target=f"heads of {recipe.images} images of {images.name}",
        guarantee=_guarantee(config, recipe),
    )
    if recipe.noise_multiplier:
        found.curve = allowed_curve(
            rate=recipe.rate, noise_multiplier=recipe.noise_multiplier, steps=recipe.steps
        )
    found.bounds = _bounds(config, recipe, *scores)
    found.attacks = [describe_attack("weights along the image", *scores, config.confidence)]
    return found


def _first_of_each(labels: Tensor, recipe: HeadRecipe) -> Tensor:
    """Where the images of one head are, class by class."""
    places = [(labels == k).nonzero()[: recipe.class_size, 0] for k in range(recipe.classes)]
    if min(map(len, places)) < recipe.class_size:
        raise DataError(f"not every class has {recipe.class_size} images: lower --class-size.")
    return torch.cat(places)


def _scores(
    config: AuditHeads, recipe: HeadRecipe, features: Tensor, run: Run
) -> tuple[np.ndarray, np.ndarray]:
    found = []
    for present in (True, False):
        run.log(f"{config.trials} heads {'with' if present else 'without'} the image")
        trials = lone_trials(
            recipe,
            features,
            labels_of(recipe),
            heads=config.trials,
            present=present,
            seed=config.seed,
        )
        found.append(torch.cat(list(trials)).cpu().double().numpy())
    return found[0], found[1]


def _guarantee(config: AuditHeads, recipe: HeadRecipe) -> dict[str, Any] | None:
    if recipe.noise_multiplier < LEAST_NOISE or recipe.max_norm is None:
        return None
    return guarantee_record(price(recipe.mechanisms(), config.delta, "add-or-remove"), config.delta)


def _bounds(
    config: AuditHeads, recipe: HeadRecipe, inside: np.ndarray, outside: np.ndarray
) -> list[Bound]:
    """What the scores prove: of any mechanism, and of Gaussian noise of unknown size."""
    each = share_error(config.confidence, 2 if recipe.noise_multiplier else 1)
    plain = many_run_bound(
        inside,
        outside,
        delta=config.delta,
        confidence=each,
        name="many heads",
        assumes="nothing about the mechanism: heads are independent",
    )
    if not recipe.noise_multiplier:
        return [plain]
    plan = Plan(
        noise_multiplier=recipe.noise_multiplier,
        expected_batch=recipe.divisor,
        rate=recipe.rate,
        steps=recipe.steps,
        max_norm=recipe.max_norm or 1.0,
    )
    # Heads that choose the threshold are not counted.
    some = max(1, len(inside) // 10)
    threshold = (np.median(inside[:some]) + np.median(outside[:some])) / 2
    gaussian = curve_bound(
        inside[some:] - threshold,
        outside[some:] - threshold,
        plan,
        delta=config.delta,
        confidence=each,
        name="many heads, Gaussian noise",
    )
    gaussian = replace(
        gaussian,
        thresholds="chosen on a tenth of the heads, counted on the others",
        assumes=f"{recipe.steps} steps of rate {recipe.rate:g} with Gaussian noise of any size",
    )
    return joint_confidence([plain, gaussian], config.confidence)
