"""Trials of a reconstruction attack: guesses, what they are held against, and what they score.

The null is exchangeable: a guess made from one head is held against the images of another, real
head. Two statistics decide. One is the error itself. The other is how much smaller it is than
usual, that is, than the errors of guesses made from heads without the image: some images (a plain
1) are close to any guess of their class, and only the second statistic knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.data.images import Images
from sfumato.errors import ConfigError
from sfumato.metrics.leakage import (
    Roc,
    blind_guess_rates,
    clustered_interval,
    min_errors,
    nearest_neighbour_threshold,
    roc,
)
from sfumato.privacy.audit.lower import binomial_interval

SHOWN = 0.01
"""The false-positive rate that results are quoted at."""


@dataclass(frozen=True)
class Trials:
    """Guesses for m heads, a picture for each class (or one), and what they are held against."""

    guesses: Float[Tensor, "m wanted c h w"]
    truths: Float[Tensor, "m wanted k c h w"]
    """The images that a head was trained on."""
    images: Int[Tensor, "m wanted"]
    """Which image of the data the first of them is."""
    partner: Int[Tensor, " m"]
    """Another head, which shares no image with this one."""
    usual: Float[Tensor, "n 2"]
    """Mean and deviation of the log error of each image with guesses of other heads."""
    accuracy: float
    """Of the heads, on all target images."""
    fake: Float[Tensor, "m wanted c h w"] | None = None
    """What is seen in weights that are Gaussian noise of the right covariance."""
    simple: Mapping[str, Tensor] = field(default_factory=dict)
    """Guesses of simpler attacks, to compare with."""

    def errors(self, guesses: Tensor, *, null: bool = False) -> Float[Tensor, "m wanted"]:
        """Errors to the nearest image of the head itself, or of its partner."""
        truths = self.truths[self.partner] if null else self.truths
        found = min_errors(guesses.flatten(0, 1), truths.flatten(0, 1))
        return found.unflatten(0, guesses.shape[:2])

    def relative(self, *, null: bool = False) -> Float[Tensor, "m wanted"]:
        """How much below usual the log error to one image is, in deviations: small is close."""
        rows = self.partner if null else torch.arange(len(self.guesses))
        gaps = (self.guesses - self.truths[rows][:, :, 0]).flatten(2).square().mean(dim=2)
        mean, deviation = self.usual[self.images[rows]].unbind(dim=-1)
        return (gaps.clamp(min=1e-9).log() - mean) / deviation.clamp(min=1e-3)

    def records(self, *, null: bool = False) -> Float[Tensor, " m"]:
        """One trial a head, about one image of it: what a guarantee about one image speaks of."""
        heads, (_, wanted, count) = torch.arange(len(self.guesses)), self.truths.shape[:3]
        if wanted > 1:
            return self.relative(null=null)[heads, heads % wanted]
        truths = (self.truths[self.partner] if null else self.truths)[heads, 0, heads % count]
        return (self.guesses[:, 0] - truths).flatten(1).square().mean(dim=1)


def usual_errors(images: Images, references: Float[Tensor, "r wanted c h w"]) -> Tensor:
    """Mean and deviation of the log error of each image with guesses that never saw it."""
    found = torch.empty(len(images), 2)
    pixels = images.pixels.flatten(1).float() / 127.5 - 1
    for label in range(references.shape[1]):
        same = images.labels == label if references.shape[1] > 1 else images.labels >= 0
        guesses = references[:, label].flatten(1)
        errors = torch.cdist(pixels[same], guesses).square() / pixels.shape[1]
        logs = errors.clamp(min=1e-9).log()
        found[same] = torch.stack([logs.mean(dim=1), logs.std(dim=1)], dim=1)
    return found


def shuffle_partners(count: int, per_permutation: int) -> Int[Tensor, " count"]:
    """For each head the next one of its permutation: they share no image."""
    numbers = torch.arange(count)
    first = numbers // per_permutation * per_permutation
    sizes = (count - first).clamp(max=per_permutation)
    if int(sizes.min()) < 2:
        raise ConfigError(
            f"{count} heads in permutations of {per_permutation} leave one without another head to "
            "be held against. Change --trials by one, or give more images a class."
        )
    return first + (numbers - first + 1) % sizes


def reconstruction_scores(
    trials: Trials, targets: Images, own: Images, *, level: float
) -> tuple[dict[str, Any], dict[str, Roc]]:
    """All that is counted, by name, and the curves it comes from.

    `own` are the attacker's images: thresholds, blind guesses and baselines come from them.
    """
    true, null = trials.errors(trials.guesses), trials.errors(trials.guesses, null=True)
    size = trials.truths.shape[2]
    nearest = "error" if size == 1 else f"error, nearest of {size}"
    curves = {nearest: curve(true, null)}
    better, usual = true, null
    if true.shape[1] > 1:  # a guess of any image cannot be held against one
        better, usual = trials.relative(), trials.relative(null=True)
        curves = {"relative error": curve(better, usual), **curves}
    threshold = nearest_neighbour_threshold(targets, own)
    blind = blind_guess_rates(targets, own, threshold)
    scores: dict[str, Any] = {
        "trials": true.numel(),
        "test_images": len(trials.images.unique()),
        "accuracy_of_heads": trials.accuracy,
        "statistic": next(iter(curves)),
        **_numbers(next(iter(curves.values()))),
        **_intervals(trials, better, usual, level),
        "by_error": _numbers(curves[nearest]),
        "median_error": float(true.median()),
        "median_error_of_null": float(null.median()),
        "threshold": threshold,
        "at_threshold": _at_threshold(trials, true, null, threshold, level),
        "blind_guess": {
            "best_picture": float(blind.best.mean()),
            "class_mean": float(blind.class_mean.mean()),
        },
    }
    if true.shape[1] > 1:
        by_class = [curve(a, b) for a, b in zip(better.T, usual.T, strict=True)]
        scores["by_class"] = dict(zip(own.classes, map(_numbers, by_class), strict=True))
        scores["baselines"] = {
            name: _numbers(curve(trials.errors(guesses), trials.errors(guesses, null=True)))
            for name, guesses in {**trials.simple, **_own_images(trials, own)}.items()
        }
    if trials.fake is not None:
        curves["error, Gaussian heads"] = curve(true, trials.errors(trials.fake))
        scores["gaussian_null"] = _numbers(curves["error, Gaussian heads"])
    return scores, curves


def curve(true: Tensor, null: Tensor) -> Roc:
    """The ROC of all classes together."""
    return roc(true.flatten().numpy(), null.flatten().numpy())


def _numbers(found: Roc) -> dict[str, float]:
    return {"auc": found.auc, "tpr_at_1_percent_fpr": found.tpr_at(SHOWN)}


def _intervals(trials: Trials, true: Tensor, null: Tensor, level: float) -> dict[str, Any]:
    """Intervals of the same numbers: the wider of those that know of shared images and heads."""
    heads = torch.arange(len(true))[:, None].expand_as(true)
    by_image = (trials.images, trials.images[trials.partner])
    found = {}
    for name, statistic in STATISTICS.items():
        limits = [
            clustered_interval(
                statistic,
                *(column.flatten().numpy() for column in (true, null, *numbers)),
                level=level,
            )
            for numbers in (by_image, (heads, heads))
        ]
        found[f"{name}_interval"] = [min(low for low, _ in limits), max(up for _, up in limits)]
    return found


STATISTICS = {"auc": lambda found: found.auc, "tpr_at_1_percent_fpr": lambda f: f.tpr_at(SHOWN)}


def _at_threshold(
    trials: Trials, true: Tensor, null: Tensor, threshold: float, level: float
) -> dict[str, Any]:
    """The rates at the distance of a test image to its nearest neighbour.

    The exact interval is of trials that are independent: one a head, no image twice.
    """
    found: dict[str, Any] = {}
    heads = torch.arange(len(true))
    columns = heads % true.shape[1]
    _, first = np.unique(trials.images[heads, columns].numpy(), return_index=True)
    for name, errors in (("tpr", true), ("fpr", null)):
        found[name] = float((errors <= threshold).float().mean())
        alone = errors[heads, columns][first] <= threshold
        limits = binomial_interval(int(alone.sum()), len(alone), level)
        found[f"{name}_independent"] = {
            "trials": len(alone),
            "rate": float(alone.float().mean()),
            "interval": [float(limit) for limit in limits],
        }
    return found


def _own_images(trials: Trials, own: Images) -> dict[str, Tensor]:
    """Guesses to compare with: the attacker's own image nearest to the guess; the class's mean."""
    pixels = own.pixels.float() / 127.5 - 1
    nearest, mean = torch.empty_like(trials.guesses), torch.empty_like(trials.guesses)
    for label in range(len(own.classes)):
        images = pixels[own.labels == label]
        mean[:, label] = images.mean(dim=0)
        for rows in torch.arange(len(trials.guesses)).split(512):
            guesses = trials.guesses[rows, label].flatten(1)
            nearest[rows, label] = images[torch.cdist(guesses, images.flatten(1)).argmin(dim=1)]
    return {"nearest_own_image": nearest, "class_mean": mean}


def pick_examples(trials: Trials, shown: int = 10) -> Sequence[tuple[str, Tensor, Tensor]]:
    """Pairs of truth and guess to look at: the best, the median and the worst of each class."""
    gaps = (trials.truths - trials.guesses[:, :, None]).flatten(3).square().mean(dim=3)
    errors, which = gaps.min(dim=2)
    order, rows, columns = errors.argsort(dim=0), len(errors), torch.arange(errors.shape[1])[:shown]
    places = {"best": order[0], "median": order[rows // 2], "worst": order[-1]}
    if errors.shape[1] == 1:  # one picture a head: ten of each kind
        columns = torch.zeros(min(shown, rows), dtype=torch.int64)
        middle = (rows - len(columns)) // 2
        kinds = (order[:shown, 0], order[middle : middle + shown, 0], order[-shown:, 0])
        places = dict(zip(places, kinds, strict=True))
    blocks = []
    for name, chosen in places.items():
        heads = chosen[: len(columns)]
        truths = trials.truths[heads, columns, which[heads, columns]]
        blocks.append((name, truths / 2 + 0.5, trials.guesses[heads, columns] / 2 + 0.5))
    return blocks
