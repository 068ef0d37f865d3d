"""Pictures for people: grids of images, and epsilon as a run spends it. The door to matplotlib."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from sfumato.files import atomic
from sfumato.privacy.budget import Plan

INK, ACCENT, GREY = "#222222", "#b3541e", "#999999"
Point = tuple[float, float, float, float]
"""Where a mark stands, and the lower and upper end of its interval: x, y, low, high."""
Rates = Sequence[float] | np.ndarray
Curve = tuple[Rates, Rates]
"""False-positive rates, and true-positive rates."""
ROC_STYLES = ("-", "--", ":", "-.")


def save_image_rows(
    path: Path, rows: Sequence[tuple[str, Float[Tensor, "n c h w"]]], columns: Sequence[str]
) -> Path:
    """Rows of images between 0 and 1, with a name before each row and above each column."""
    figure, axes = new_figure(len(rows), len(columns), cell=1.0, left=1.3)
    for row, ((label, images), line) in enumerate(zip(rows, axes, strict=True)):
        for column, (image, axis) in enumerate(zip(images, line, strict=True)):
            picture = image.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy()
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            if row == 0:
                axis.set_title(columns[column], fontsize=9, color=INK)
        text = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 9, "color": INK}
        line[0].set_ylabel(label, **text)
    return save_figure(figure, path)


def save_gallery(
    path: Path,
    blocks: Sequence[tuple[str, Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]],
    columns: Sequence[str],
) -> Path:
    """Blocks of two rows: images as they were, and what was made of them."""
    rows = []
    for name, truths, guesses in blocks:
        rows += [(f"{name}: truth", truths), ("attacker", guesses)]
    return save_image_rows(path, rows, columns)


def save_roc(
    path: Path,
    curves: Mapping[str, Curve],
    *,
    others: str,
    bands: Mapping[str, Curve] | None = None,
    bound: tuple[str, Curve] | None = None,
    title: str = "",
) -> Path:
    """ROC curves on a logarithmic axis, with chance and, if given, what no attack should exceed.

    Curves and bound stand under their names; `others` says who makes a false positive. A band is
    the interval of a curve, point by point: lower ends, and upper ones.
    """
    figure, axes = new_figure(1, 1, cell=(5.4, 4.2))
    axis = axes[0][0]
    for number, (name, curve) in enumerate(curves.items()):
        style = ROC_STYLES[number % len(ROC_STYLES)]
        faint = 1 - 0.15 * (number // len(ROC_STYLES))
        axis.plot(*curve, style, color=ACCENT, linewidth=1.8, alpha=faint, label=name)
        if bands is not None:
            label = "" if number else "interval of each, point by point"
            axis.fill_between(curve[0], *bands[name], color=ACCENT, alpha=0.14, lw=0, label=label)
    if bound is not None:
        name, (fpr, tpr) = bound
        axis.plot(fpr, tpr, color=INK, linewidth=1.5, label=name)
        axis.fill_between(fpr, tpr, 1, color=GREY, alpha=0.15)
    chance = [10 ** (-4 + 4 * i / 50) for i in range(51)]
    axis.plot(chance, chance, color=GREY, linewidth=1, label="chance")
    finest = min(min(rate for rate in fpr if rate > 0) for fpr, _ in curves.values())
    axis.set(xscale="log", xlim=(max(1e-4, finest), 1), ylim=(0, 1.01))
    axis.set_xlabel(f"false-positive rate: {others}")
    axis.set_ylabel("true-positive rate")
    axis.set_title(title, fontsize=9, color=INK)
    axis.grid(color=GREY, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", frameon=False)
    return save_figure(figure, path)


def save_study(path: Path, name: str, rows: Mapping[str, Mapping[str, Any]]) -> Path:
    """What an attack reaches for each value of one setting, and what privacy allows."""
    figure, axes = new_figure(1, 1, cell=(5.4, 3.6))
    axis, places = axes[0][0], range(len(rows))
    found = [row["tpr_at_1_percent_fpr"] for row in rows.values()]
    limits = [row["tpr_at_1_percent_fpr_interval"] for row in rows.values()]
    spread = [
        [max(0.0, f - low) for f, (low, _) in zip(found, limits, strict=True)],
        [max(0.0, high - f) for f, (_, high) in zip(found, limits, strict=True)],
    ]
    axis.errorbar(
        places, found, spread, color=ACCENT, marker="o", capsize=3, label="attack, at 1 % FPR"
    )
    bounds = [row["privacy"].get("tpr_bound_at_1_percent_fpr", 1.0) for row in rows.values()]
    axis.plot(places, bounds, color=INK, marker="_", markersize=14, ls="", label="bound")
    accuracy = [row["accuracy_of_heads"] for row in rows.values()]
    axis.plot(places, accuracy, color=GREY, marker=".", ls="--", label="accuracy of heads")
    axis.set_xticks(list(places), list(rows))
    axis.set(ylim=(0, 1.02))
    axis.set_xlabel(name)
    axis.set_ylabel("rate")
    axis.grid(color=GREY, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    return save_figure(figure, path)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One axis of `save_panels`: points by series, in the same order in all panels."""

    name: str
    series: Mapping[str, Sequence[Point]]
    ticks: Mapping[float, str] | None = None
    """Names of places on a logarithmic axis; without them it is linear, with numbers."""


def save_panels(
    path: Path,
    panels: Sequence[Panel],
    *,
    name: str,
    hollow: Collection[str],
    floor: tuple[str, float],
) -> Path:
    """Rates with their intervals over several quantities, side by side, a mark for each series.

    Marks of the series in `hollow` are empty, and a dashed line has the name and height of `floor`:
    what the other marks are compared with.
    """
    figure, axes = new_figure(1, len(panels), cell=(5.0, 3.8))
    for axis, panel in zip(axes[0], panels, strict=True):
        for number, (series, points) in enumerate(panel.series.items()):
            x, y, low, high = zip(*points, strict=True)
            ends = [
                (max(0.0, b - a), max(0.0, c - b)) for a, b, c in zip(low, y, high, strict=True)
            ]
            colour, fill = (GREY, "none") if series in hollow else (ACCENT, None)
            axis.errorbar(
                x,
                y,
                list(zip(*ends, strict=True)),
                color=colour,
                markerfacecolor=fill,
                marker="osD^v"[number % 5],
                ls="",
                capsize=3,
                label=series,
            )
        axis.axhline(floor[1], color=INK, linewidth=1, ls="--", label=floor[0])
        if panel.ticks is not None:
            axis.set_xscale("log")
            axis.minorticks_off()
            axis.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axis.set(ylim=(-0.02, 1.02))
        axis.set_xlabel(panel.name)
        axis.set_ylabel(name)
        axis.grid(color=GREY, alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return save_figure(figure, path)


def save_epsilon_curve(path: Path, plan: Plan, delta: float, points: int = 24) -> Path:
    """Epsilon over the steps of a plan, as the PLD accountant prices it."""
    from matplotlib.ticker import MaxNLocator

    steps = sorted({max(1, round(plan.steps * i / points)) for i in range(1, points + 1)})
    spent = [plan.epsilon(delta, steps=count) for count in steps]
    figure, axes = new_figure(1, 1, cell=(5.4, 3.2))
    axis = axes[0][0]
    axis.plot([0, *steps], [0, *spent], color=ACCENT, linewidth=2, marker="." if points < 3 else "")
    axis.annotate(f"{spent[-1]:.3g}", (steps[-1], spent[-1]), ha="right", va="bottom", color=INK)
    axis.set_xlabel("steps")
    axis.set_ylabel(f"epsilon at delta = {delta:.2g}")
    axis.set_title(
        f"rate {plan.rate:.4g}, noise multiplier {plan.noise_multiplier:.4g}, {plan.relation}",
        fontsize=9,
        color=INK,
    )
    axis.set(xlim=(0, None), ylim=(0, None))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(color=GREY, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def new_figure(
    rows: int, columns: int, cell: float | tuple[float, float], left: float = 0.0
) -> tuple[Any, Any]:
    """A figure without a screen, and its axes row by row; `cell` is in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = cell if isinstance(cell, tuple) else (cell, cell)
    figure = Figure(figsize=(left + columns * width, 0.3 + rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def save_figure(figure: Any, path: Path) -> Path:
    """Write it, whole or not at all."""
    with atomic(path) as file:
        figure.savefig(file, format="png", dpi=130, facecolor="white")
    return path
