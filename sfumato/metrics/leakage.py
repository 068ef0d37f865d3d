"""How much an attack got: errors, ROC curves and honest intervals.

An attack on images is scored by trials. In a true trial the guess is compared with an image that
the model was trained on; in a null trial with one that it was not. A small error counts as a hit.
Neither rate of hits says anything alone: on some classes a fixed image, the same for everybody, is
close to a fifth of all images (`blind_guess_rates`). So what counts is the ROC of true against null
trials, with an interval, beside the bound of `sfumato.privacy.audit.tradeoff`. The epsilon that
trials prove is found in `sfumato.privacy.audit.lower`.

Errors are mean squared errors of pixels in [-1, 1]. Nothing here knows of models or runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.data.images import Images
from sfumato.errors import DataError
from sfumato.privacy.audit.lower import check_confidence

TrueErrors = Float[np.ndarray, " true"]
NullErrors = Float[np.ndarray, " null"]
Statistic = TypeVar("Statistic", float, np.ndarray)
"""One error a trial. There need not be as many null trials as true ones."""


def min_errors(
    guesses: Float[Tensor, "m c h w"], truths: Float[Tensor, "m k c h w"]
) -> Float[Tensor, " m"]:
    """The mean squared error of each guess to the nearest of its k admissible images."""
    errors = [(guesses - truths[:, j]).square().mean((1, 2, 3)) for j in range(truths.shape[1])]
    return torch.stack(errors).amin(0)


def nearest_neighbour_threshold(test: Images, train: Images) -> float:
    """How far a test image is from the nearest train image of its class: the mean, over classes.

    A guess within this is as close as a look into other images of the class would come. All classes
    count alike, however many test images they have. Both sets need images of every class.
    """
    means = []
    for here, there in _by_class(test, train):
        nearest = [_errors_between(rows, there).amin(1) for rows in here.split(512)]
        means.append(float(torch.cat(nearest).mean()))
    return float(np.mean(means))


@dataclass(frozen=True, kw_only=True)
class BlindGuess:
    """What share of a class's test images one fixed image comes close to, class by class."""

    best: Float[np.ndarray, " classes"]
    """By the best image that was tried: a lower bound on kappa, the base rate of reconstruction."""
    class_mean: Float[np.ndarray, " classes"]
    """By the mean of the class's train images alone."""


def blind_guess_rates(test: Images, train: Images, threshold: float) -> BlindGuess:
    """How often a guess that never saw the model is within `threshold`, for each class.

    Tried are the mean of the class, up to 1,500 of its train images, spread evenly, and where 200
    of these drift to when each moves, four times, to the mean of the train images around it. The
    best is chosen on the test images themselves, which favours the blind guess, as it should.
    """
    best, class_mean = [], []
    for here, there in _by_class(test, train):
        some = there[_spread(len(there), 1500)]
        moving = some[_spread(len(some), 200)]
        for _ in range(4):
            # 1.5 found more than 1 and 2 on MNIST, Fashion-MNIST and CIFAR-10.
            around = (_errors_between(moving, there) <= 1.5 * threshold).float()
            counts = around.sum(1, keepdim=True)
            moving = torch.where(counts > 0, around @ there / counts.clamp(min=1), moving)
        guesses = torch.cat([there.mean(0, keepdim=True), some, moving])
        rates = (_errors_between(guesses, here) <= threshold).double().mean(1)
        best.append(float(rates.max()))
        class_mean.append(float(rates[0]))
    return BlindGuess(best=np.array(best), class_mean=np.array(class_mean))


@dataclass(frozen=True, kw_only=True)
class Roc:
    """Rates of hits among null and true trials, for every threshold that tells errors apart.

    Both rates rise from 0 (a threshold of minus infinity) to 1.
    """

    thresholds: Float[np.ndarray, " points"] = field(repr=False)
    fpr: Float[np.ndarray, " points"] = field(repr=False)
    tpr: Float[np.ndarray, " points"] = field(repr=False)

    @property
    def auc(self) -> float:
        """The chance that a true trial has the smaller error, ties counted half (Mann-Whitney)."""
        return float(np.trapezoid(self.tpr, self.fpr))

    def tpr_at(self, fpr: float) -> float:
        """The largest rate of hits at a threshold whose false-positive rate is at most `fpr`."""
        return float(self.tpr[np.searchsorted(self.fpr, fpr, side="right") - 1])


def roc(true_errors: TrueErrors, null_errors: NullErrors) -> Roc:
    """The empirical ROC: an error up to the threshold is a hit, and equal errors stay together."""
    curve = _curves(true_errors, null_errors)
    return curve(np.ones(len(true_errors)), np.ones(len(null_errors)))


def clustered_interval(
    statistic: Callable[[Roc], Statistic],
    true_errors: TrueErrors,
    null_errors: NullErrors,
    true_images: Int[np.ndarray, " true_images"],
    null_images: Int[np.ndarray, " null_images"],
    *,
    level: float = 0.95,
    resamples: int = 500,
    seed: int = 0,
) -> tuple[Statistic, Statistic]:
    """Limits of a statistic of the ROC when trials share images: a bootstrap that draws images.

    A statistic of several numbers has limits for each by itself.

    `true_images` and `null_images` number the image that each trial was compared with. An image is
    drawn with all of its trials, true and null, so a thousand trials of one easy image count as
    one. Percentile limits: right for many images (100 or more), not exact. The same seed gives the
    same limits. Draws with no true or no null trial at all are left out.
    """
    check_confidence(level, "level")
    if true_images.shape != true_errors.shape or null_images.shape != null_errors.shape:
        raise DataError("each trial needs the number of its image: the lengths differ.")
    both = np.concatenate([true_images, null_images])
    names, numbers = np.unique(both, return_inverse=True)
    if len(names) < 2:
        raise DataError("all trials share one image: give trials of several, or no interval.")
    true_numbers, null_numbers = np.split(numbers, [len(true_images)])
    curve = _curves(true_errors, null_errors)
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(resamples):
        times = np.bincount(generator.integers(len(names), size=len(names)), minlength=len(names))
        true_counts, null_counts = times[true_numbers], times[null_numbers]
        if true_counts.any() and null_counts.any():
            found.append(statistic(curve(true_counts, null_counts)))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def _curves(
    true_errors: TrueErrors, null_errors: NullErrors
) -> Callable[[np.ndarray, np.ndarray], Roc]:
    """The ROC as a function of how often each true and each null trial counts: sorted only once."""
    for errors in (true_errors, null_errors):
        if len(errors) == 0 or np.isnan(errors).any():
            raise DataError(
                "an ROC needs true and null trials, and no error may be NaN. Give a guess that is "
                "not a number an error of infinity."
            )
    thresholds = np.unique(np.concatenate([true_errors, null_errors]).astype(np.float64))
    orders = [np.argsort(errors) for errors in (true_errors, null_errors)]
    places = [
        np.searchsorted(errors[order], thresholds, side="right")
        for errors, order in zip((true_errors, null_errors), orders, strict=True)
    ]
    thresholds, places = np.append(-np.inf, thresholds), [np.append(0, place) for place in places]

    def curve(true_counts: np.ndarray, null_counts: np.ndarray) -> Roc:
        tpr, fpr = (
            np.append(0.0, np.cumsum(counts[order]))[place] / counts.sum()
            for counts, order, place in zip((true_counts, null_counts), orders, places, strict=True)
        )
        return Roc(thresholds=thresholds, fpr=fpr, tpr=tpr)

    return curve


def _by_class(test: Images, train: Images) -> Iterator[tuple[Tensor, Tensor]]:
    """For each class, its test and its train images as rows of pixels in [-1, 1]."""
    if (test.shape, test.classes) != (train.shape, train.classes):
        raise DataError(
            f'"{test.name}" and "{train.name}" differ in size or classes: load both by load_splits.'
        )
    for label, name in enumerate(test.classes):
        rows = [part.pixels[part.labels == label].flatten(1) for part in (test, train)]
        if min(map(len, rows)) == 0:
            raise DataError(
                f'class "{name}" has {len(rows[0])} images in "{test.name}" and {len(rows[1])} in '
                f'"{train.name}": give at least one in each.'
            )
        yield rows[0].float() / 127.5 - 1, rows[1].float() / 127.5 - 1


def _errors_between(
    some: Float[Tensor, "n pixels"], others: Float[Tensor, "m pixels"]
) -> Float[Tensor, "n m"]:
    """The mean squared error of every pair, to about 1e-6."""
    squares = some.square().sum(1)[:, None] + others.square().sum(1)
    return (squares.addmm_(some, others.T, alpha=-2) / some.shape[1]).clamp_(min=0)


def _spread(size: int, most: int) -> Tensor:
    """Up to `most` places out of `size`, evenly spread."""
    return torch.linspace(0, size - 1, min(size, most)).round().long()
