"""What an inversion attack got, in the eyes of judges that never met the target.

A guess claims to show a class. It counts if a judge, trained on other images than the target and
on the public classes too, names that class first (or among five). Three things stand beside it.
The floor: how often the judge names the class for the public images that the attack started from,
where no attack has happened yet. The judge's own accuracy on images of the class: the ceiling. And
the member gap: whether guesses are closer to the target's training images than to as many others of
the class. Without a gap the attack found what a class looks like and nobody's record in it, and it
is the gap alone that example-level privacy speaks of.

All classes count alike, and intervals draw classes, not images: a hundred guesses of one easy class
are one success. Distances are squared L2 distances of features. All of it is computed from private
images without a mechanism. The attack must not see any of it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.metrics.class_intervals import class_means, over_classes
from sfumato.metrics.judges import Judged, JudgedSets, JudgeOutput, attacked_only
from sfumato.metrics.quality import nearest_distances, precision_recall
from sfumato.privacy.audit.lower import binomial_interval

Values = dict[str, tuple[Tensor, Tensor]]
"""By name, a number for each image (or class), and the class of each."""
FEW = 10
"""With fewer classes than this, intervals are said to be rough."""


def inversion_scores(
    labels: JudgedSets[Tensor],
    judged_by: Mapping[str, Judged],
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """All that is counted, ready for JSON: for each of `judges`, their `majority`, and `all`.

    `labels` number the names that judges know, in the same order for all of them. Classes are those
    that are guessed: every set needs images of each, and its images of other classes are left out.
    A majority is more than half of the judges: of two, both. What cannot be had is not there:
    top5 where a judge knows five names or fewer, an interval of one class (None), precision and
    recall of a class with too few images (`left_out` says why).
    """
    labels, judged_by = attacked_only(labels, judged_by)
    classes = len(labels.guesses.unique())
    summary = partial(_summary, level=level, resamples=resamples, seed=seed)
    names = [judged.guesses.logits.shape[1] for judged in judged_by.values()]
    kinds = {f"top{k}": k for k in (1, 5) if k < min(names)}
    hits = [
        {kind: judged.each(partial(_named, k=k), labels) for kind, k in kinds.items()}
        for judged in judged_by.values()
    ]
    votes = {kind: hits[0][kind].each(_share, *(hit[kind] for hit in hits[1:])) for kind in kinds}
    majority = {kind: share.each(lambda votes: votes > 0.5) for kind, share in votes.items()}
    everyone = {kind: share.each(lambda votes: votes == 1) for kind, share in votes.items()}
    found: dict[str, Any] = {
        "classes": classes,
        "guesses": len(labels.guesses),
        "level": level,
        "warning": " ".join(_doubts(classes, dict(zip(judged_by, names, strict=True)))),
        "majority": summary(_rates(majority, labels)),
        "all": summary(_rates(everyone, labels)),
        "judges": {},
    }
    for (judge, judged), hit in zip(judged_by.items(), hits, strict=True):
        features = judged.each(lambda seen: seen.features)
        gaps = {"member_gap": (member_gaps(features, labels, seed=seed), labels.guesses)}
        shares, left_out = _precision_recall(features, labels)
        values = {**_rates(hit, labels), **_distances(features, labels), **gaps, **shares}
        found["judges"][judge] = {**summary(values), "left_out": left_out}
    return found


def member_gaps(
    features: JudgedSets[Tensor], labels: JudgedSets[Tensor], *, seed: int = 0
) -> Float[Tensor, " guesses"]:
    """How much closer each guess is to the nearest member than to the nearest held-out image.

    The squared L2 distance to the nearest held-out image of the class, minus that to the nearest
    member of it. Guarantee: 0 on average if members were chosen at random among images of the class
    and the guesses do not depend on the choice. For that both sets must be equally large, so the
    larger one is cut at random, by `seed`. Rows of pixels will do for features.
    """
    gaps = torch.empty(len(labels.guesses), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for label in labels.guesses.unique():
        members, others = (
            rows[found == label]
            for rows, found in (
                (features.members, labels.members),
                (features.held_out, labels.held_out),
            )
        )
        size = min(len(members), len(others))
        members, others = (
            rows[torch.randperm(len(rows), generator=generator)[:size].to(rows.device)]
            for rows in (members, others)
        )
        here = labels.guesses == label
        guesses = features.guesses[here]
        gaps[here.cpu()] = (_squared(guesses, others) - _squared(guesses, members)).cpu()
    return gaps


def _named(seen: JudgeOutput, labels: Tensor, k: int) -> Tensor:
    """Whether the class is among the first k names. Ties count against it: no answer is no hit."""
    own = seen.logits.gather(1, labels[:, None])
    return (seen.logits >= own).sum(1) <= k


def _share(*said: Tensor) -> Tensor:
    return torch.stack(said).double().mean(0)


def _rates(hits: Mapping[str, JudgedSets[Tensor]], labels: JudgedSets[Tensor]) -> Values:
    """The attack, the judge's floor, and the judge's own accuracy.

    A judge that is much better on members than on held-out images has met the target's data.
    """
    found: Values = {}
    for kind, hit in hits.items():
        found[kind] = (hit.guesses, labels.guesses)
        found[f"floor_{kind}"] = (hit.public, labels.public)
        found[f"held_out_{kind}"] = (hit.held_out, labels.held_out)
        found[f"members_{kind}"] = (hit.members, labels.members)
    return found


def _distances(features: JudgedSets[Tensor], labels: JudgedSets[Tensor]) -> Values:
    """From guesses and, for scale, held-out images to the nearest member and to the mean member."""
    found: Values = {}
    for prefix, kind in (("", "guesses"), ("held_out_", "held_out")):
        rows, classes = getattr(features, kind), getattr(labels, kind)
        nearest, centre = torch.empty(2, len(rows), dtype=torch.float64, device=rows.device)
        for label in classes.unique():
            here, members = classes == label, features.members[labels.members == label].double()
            nearest[here] = _squared(rows[here], members)
            centre[here] = _squared(rows[here], members.mean(0, keepdim=True))
        found[f"{prefix}knn"], found[f"{prefix}centroid"] = (nearest, classes), (centre, classes)
    return found


def _squared(of: Tensor, among: Tensor) -> Float[Tensor, " rows"]:
    return nearest_distances(of, among).square() * of.shape[1]


def _precision_recall(
    features: JudgedSets[Tensor], labels: JudgedSets[Tensor]
) -> tuple[Values, dict[str, str]]:
    """Of guesses among the members of their class, and why a class has none."""
    found, left_out = [], {}
    for label in labels.guesses.unique().tolist():
        made = features.guesses[labels.guesses == label]
        try:
            pair = precision_recall(features.members[labels.members == label], made)
        except ConfigError as error:
            left_out[str(label)] = str(error)
        else:
            found.append((label, *pair))
    if not found:
        return {}, left_out
    classes, *pair = (torch.tensor(column) for column in zip(*found, strict=True))
    return {
        name: (share, classes) for name, share in zip(("precision", "recall"), pair, strict=True)
    }, left_out


def _summary(values: Values, *, level: float, resamples: int, seed: int) -> dict[str, Any]:
    """An estimate for each name, what follows from them, and the table of classes."""
    estimate = partial(over_classes, level=level, resamples=resamples, seed=seed)
    columns = {
        name: (numbers.double().cpu().numpy(), classes.cpu().numpy())
        for name, (numbers, classes) in values.items()
    }
    found: dict[str, Any] = {
        # Gaps are small beside the noise in single guesses, so these are drawn again as well.
        name: estimate(*column, inner=name == "member_gap")
        for name, column in columns.items()
    }
    means = {name: class_means(*column) for name, column in columns.items()}
    classes, rates = np.array(list(means["top1"])), np.array(list(means["top1"].values()))
    found["above_floor"] = estimate(rates - list(means["floor_top1"].values()), classes)
    # For classes read as independent trials this is exact, also where the bootstrap has no width.
    recovered = int((rates > 0.5).sum())
    limits = binomial_interval(recovered, len(rates), level)
    found["recovered"] = {
        "mean": recovered / len(rates),
        "interval": [float(limit) for limit in limits],
    }
    found["by_class"] = [
        {"class": label, **{name: column.get(label) for name, column in means.items()}}
        for label in classes.tolist()
    ]
    return found


def _doubts(classes: int, names: Mapping[str, int]) -> list[str]:
    """What a reader has to know before the numbers."""
    found = []
    if classes == 1:
        found.append("There is one class only, so no interval can be drawn: attack several.")
    elif classes < FEW:
        found.append(
            f"Intervals are drawn from {classes} classes only: they are rough, and too narrow "
            "where classes agree. Attack more classes, or pool several splits."
        )
    found += [
        f'Judge "{judge}" knows no other names than the {classes} classes attacked and must call '
        "any picture one of them: its word means little. Train it on the public classes too."
        for judge, count in names.items()
        if count <= classes
    ]
    return found
