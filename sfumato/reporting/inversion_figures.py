"""Inversion attacks for the eye: pictures beside training images, and sweeps over targets.

A sweep has one row a target. Against epsilon it says little: privacy costs accuracy, and a worse
model gives less away with or without privacy. So each private target has a control without privacy,
stopped at the same accuracy, and what privacy earns is the gap below the control.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.metrics.judges import Judged, JudgedSets
from sfumato.reporting.figures import Panel, Point, save_image_rows, save_panels

Estimate = Mapping[str, Any]
"""A mean and an interval (or None), as `score` returns them by name."""


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One target of a sweep, and what the attack on it reached."""

    target: str
    """What kind of target it is: one mark in the plots, and a line of their legend."""
    epsilon: float
    """What it spent (`math.inf` without privacy); of a control, what its private twin spent."""
    control: bool = False
    """Trained without privacy and stopped at the accuracy of a private target."""
    seed: int
    test_accuracy: float
    attack: Estimate
    """For instance `score(...)["majority"]["top1"]`."""
    floor: Estimate
    """The same, of the public images that the attack selected."""
    gap: Estimate
    """The member gap of one judge, the same in all rows."""


def mean_log_probability(
    labels: JudgedSets[Tensor], judged_by: Mapping[str, Judged]
) -> Float[Tensor, " guesses"]:
    """How sure the judges are, on average, that each guess is of its class."""
    logs = [judged.guesses.logits.log_softmax(dim=1).cpu() for judged in judged_by.values()]
    columns = labels.guesses.cpu()[:, None]
    return torch.stack([log.gather(1, columns)[:, 0] for log in logs]).mean(dim=0)


def contact_sheet(
    path: Path,
    members: Float[Tensor, "m c h w"],
    guesses: Float[Tensor, "n c h w"],
    labels: JudgedSets[Tensor],
    judged_by: Mapping[str, Judged],
    names: Sequence[str],
) -> Path:
    """A column for each of the first 20 classes: two training images, and three guesses of it.

    These are the best, the median and the worst by `mean_log_probability`, so nobody can choose the
    pictures that look good. `names` are those of all labels. A class with one training image has a
    white second one; of a single guess all three are the same.
    """
    sure, said = mean_log_probability(labels, judged_by), labels.guesses.cpu()
    members, guesses = members.cpu(), guesses.cpu()
    classes, columns = said.unique()[:20].tolist(), []
    for label in classes:
        real = members[labels.members.cpu() == label][:2]
        blank = members.new_ones(2 - len(real), *members.shape[1:])
        here = (said == label).nonzero()[:, 0]
        here = here[sure[here].argsort(descending=True, stable=True)]
        chosen = guesses[here[[0, len(here) // 2, -1]]]
        columns.append(torch.cat([real, blank, chosen.to(real)]))
    rows = ("trained on", "", "guess: best\n(say judges)", "median", "worst")
    lines = zip(rows, torch.stack(columns, dim=1), strict=True)
    return save_image_rows(path, list(lines), [str(names[label]) for label in classes])


def sweep_plots(path: Path, rows: Sequence[SweepRow]) -> Path:
    """Attack accuracy over epsilon (infinity at the right end) and over test accuracy.

    Controls are hollow and stand at the epsilon of their twin. The dashed line is the highest floor
    of any row: what a judge grants public images that nobody attacked with.
    """
    if not rows or any(not row.epsilon > 0 for row in rows):
        raise ConfigError("a sweep needs targets, each with an epsilon above 0 (or infinite).")
    finite = sorted({row.epsilon for row in rows if row.epsilon < math.inf})
    places = {epsilon: epsilon for epsilon in finite}
    places[math.inf] = 4 * max(finite, default=1.0)
    ticks = {place: f"{epsilon:.3g}" for epsilon, place in places.items()}
    series: dict[str, list[SweepRow]] = {}
    for row in rows:
        series.setdefault(_kind(row), []).append(row)
    # Series stand a little apart: their intervals would hide each other.
    over_epsilon = {
        kind: [
            _point(places[row.epsilon] * 1.06 ** (number - len(series) // 2), row) for row in some
        ]
        for number, (kind, some) in enumerate(series.items())
    }
    over_accuracy = {
        kind: [_point(row.test_accuracy, row) for row in some] for kind, some in series.items()
    }
    return save_panels(
        path,
        [
            Panel(name="epsilon", series=over_epsilon, ticks=ticks),
            Panel(name="test accuracy of the target", series=over_accuracy),
        ],
        name="attack accuracy",
        hollow={_kind(row) for row in rows if row.control},
        floor=("public images, no attack", max(row.floor["mean"] for row in rows)),
    )


def sweep_table(rows: Iterable[SweepRow]) -> str:
    """The rows of a sweep in Markdown, with intervals in brackets."""
    lines = [
        "| target | epsilon | seed | test accuracy | attack accuracy | floor | member gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        epsilon = f"inf, stopped as {row.epsilon:.3g}" if row.control else f"{row.epsilon:.3g}"
        cells = (
            _kind(row),
            epsilon,
            str(row.seed),
            f"{row.test_accuracy:.3f}",
            _text(row.attack),
            f"{row.floor['mean']:.3f}",
            _text(row.gap),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _kind(row: SweepRow) -> str:
    return f"{row.target} (control)" if row.control else row.target


def _point(x: float, row: SweepRow) -> Point:
    mean = row.attack["mean"]
    low, high = row.attack["interval"] or (mean, mean)
    return x, mean, low, high


def _text(found: Estimate) -> str:
    if found["interval"] is None:
        return f"{found['mean']:.3g}"
    low, high = found["interval"]
    return f"{found['mean']:.3g} [{low:.3g}, {high:.3g}]"
