"""Judges of an inversion attack: networks that never met the target look at four sets of images.

Judges are trained elsewhere, on other images than the target and on the public classes too: one
that knows only the classes attacked has to call any picture one of them. All sets are shown to them
in one range of pixels, and `attacked_only` makes sure that what they said can be compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from sfumato.errors import ConfigError, DataError

T = TypeVar("T")
U = TypeVar("U")
Judge = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Pixels in [0, 1] to logits over all class names, public ones included, and features."""


@dataclass(frozen=True)
class JudgedSets(Generic[T]):
    """The four sets of images that an attack is judged by, or one thing about each: labels, say."""

    guesses: T
    """What the attack made. The label is the class that it claims to show."""
    members: T
    """What the target was trained on."""
    held_out: T
    """Images of the same classes that the target never saw."""
    public: T
    """What the attack selected. The label is the class that the target took the image for."""

    def each(self, function: Callable[..., U], *others: "JudgedSets[Any]") -> "JudgedSets[U]":
        """The same about every set: `function` of what this and `others` hold for it."""
        rows = zip(*(vars(sets).values() for sets in (self, *others)), strict=True)
        return JudgedSets(*(function(*row) for row in rows))


@dataclass(frozen=True)
class JudgeOutput:
    """One set of images, as one judge sees it."""

    logits: Float[Tensor, "n names"]
    features: Float[Tensor, "n d"]


Judged = JudgedSets[JudgeOutput]
"""All that one judge says."""


@torch.no_grad()
def judge_images(judge: Judge, pixels: JudgedSets[Tensor], batch: int = 500) -> Judged:
    """What a judge says of every set, whose pixels must be floats in [0, 1], the guesses' too."""

    def see(images: Shaped[Tensor, "n c h w"]) -> JudgeOutput:
        # Not `min < 0 or max > 1`: that would let NaN through.
        if not (images.is_floating_point() and bool(((images >= 0) & (images <= 1)).all())):
            raise ConfigError(
                "a judge is shown pixels that are not floats between 0 and 1: it would judge other "
                "pictures than people see. Divide bytes by 255; map [-1, 1] by x / 2 + 0.5."
            )
        logits, features = zip(*(judge(some) for some in images.split(batch)), strict=True)
        return JudgeOutput(torch.cat(logits).float(), torch.cat(features).flatten(1).float())

    return pixels.each(see)


def attacked_only(
    labels: JudgedSets[Tensor], judged_by: Mapping[str, Judged]
) -> tuple[JudgedSets[Tensor], dict[str, Judged]]:
    """Without images of other classes, and on one device; or a sentence on what does not fit."""
    if not judged_by:
        raise ConfigError("nobody judges the guesses: give at least one judge, better three.")
    device = next(iter(judged_by.values())).guesses.logits.device
    labels = labels.each(lambda numbers: numbers.to(device))
    for judge, judged in judged_by.items():
        for kind, seen in vars(judged).items():
            _check(judge, kind, seen, getattr(labels, kind))
    classes = labels.guesses.unique()
    if len(classes) == 0:
        raise ConfigError("there are no guesses to judge: run the attack first.")
    for kind, numbers in vars(labels).items():
        missing = [label for label in classes.tolist() if not (numbers == label).any()]
        if missing:
            raise ConfigError(
                f"{kind} has no image of class {missing[0]}, which is guessed ({len(missing)} such "
                f"classes): give {kind} images of it, or leave it out of the guesses."
            )
    keep = labels.each(lambda numbers: torch.isin(numbers, classes))
    kept = {
        judge: judged.each(
            lambda seen, rows: JudgeOutput(seen.logits[rows], seen.features[rows]), keep
        )
        for judge, judged in judged_by.items()
    }
    return labels.each(lambda numbers, rows: numbers[rows], keep), kept


def _check(judge: str, kind: str, seen: JudgeOutput, labels: Tensor) -> None:
    rows, names = seen.logits.shape
    if not rows == len(seen.features) == len(labels):
        raise ConfigError(
            f'judge "{judge}" saw {rows} images of {kind} and there are {len(labels)} labels: let '
            "every judge look at the same images, in the order of their labels."
        )
    if names < 2 or ((labels < 0) | (labels >= names)).any():
        raise ConfigError(
            f'judge "{judge}" knows {names} names, too few for the labels of {kind}: labels number '
            "all names of the judge, private and public, from 0."
        )
    if not (seen.logits.isfinite().all() and seen.features.isfinite().all()):
        raise DataError(
            f'judge "{judge}" says NaN or infinity of {kind}: repair it or leave it out.'
        )
