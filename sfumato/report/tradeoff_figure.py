"""ROC curves of membership attacks, beside what a ledger allows any attack at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.report.figures import ACCENT, GREY, INK, new_figure, save_figure

STYLES = ("-", "--", ":", "-.")


def save_tradeoff(
    path: Path,
    attacks: Sequence[Mapping[str, Any]],
    curve: Mapping[str, Sequence[float]] | None,
    *,
    title: str = "",
) -> Path:
    """The attacks of an audit as its record has them, with chance and what no attack exceeds."""
    figure, axes = new_figure(1, 1, cell=(5.4, 4.2))
    axis = axes[0][0]
    for number, attack in enumerate(attacks):
        axis.step(
            attack["roc"]["fpr"], attack["roc"]["tpr"], STYLES[number % len(STYLES)],
            where="post", color=ACCENT, linewidth=1.8, alpha=1 - 0.15 * (number // len(STYLES)),
            label=f"{attack['name']}: AUC {attack['auc'][0]:.3f}",
        )  # fmt: skip
    if curve is not None:
        fpr, tpr = curve["fpr"], curve["tpr"]
        axis.plot(fpr, tpr, color=INK, linewidth=1.5, label="the ledger allows no more")
        axis.fill_between(fpr, tpr, 1, color=GREY, alpha=0.15)
    chance = [10 ** (-4 + 4 * i / 50) for i in range(51)]
    axis.plot(chance, chance, color=GREY, linewidth=1, label="chance")
    axis.set(xscale="log", xlim=(1e-4, 1), ylim=(0, 1.01))
    axis.set_xlabel("false-positive rate: others taken for members")
    axis.set_ylabel("true-positive rate")
    axis.set_title(title, fontsize=9, color=INK)
    axis.grid(color=GREY, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", frameon=False)
    return save_figure(figure, path)
