"""What `sfumato account` can be asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sfumato.privacy.releases import Relation
from sfumato.setting_groups import Settings


@dataclass(frozen=True, kw_only=True, init=False)
class Account(Settings):
    """Budget arithmetic: epsilon of a plan, noise or steps for an epsilon, cost of a ledger.

    sfumato account RUN: what a run has spent, by its ledger.
    """

    WORD: ClassVar = "ledger"

    epsilon: float | None = None
    """Find the noise that this epsilon needs; with --noise-multiplier, the steps that it allows."""
    noise_multiplier: float | None = None
    """Find the epsilon of this noise: its standard deviation in units of the norm bound."""
    size: int | None = None
    """Number of private examples."""
    batch_size: float | None = None
    """Expected (logical) batch size; all of the data when left out."""
    epochs: float | None = None
    """Passes over the data."""
    steps: int | None = None
    """Number of steps, in place of --epochs."""
    delta: float | None = None
    """Delta of the guarantee, the chance that it fails; 1e-5, or less for large data, when left
    out."""
    relation: Relation = "add-or-remove"
    """Which data sets count as neighbours: one example more or less, or one replaced."""
    max_batch: int | None = None
    """Cut Poisson batches to at most this many examples; only a `Plan` made in Python can train
    so."""
    ledger: Path | None = None
    """Compute the epsilon of this run directory, or ledger.jsonl, in place of a plan (also:
    sfumato account RUN)."""
    plot: Path | None = None
    """Draw epsilon over steps into this PNG file."""


def digits_cpu() -> Account:
    """The 4,000 embedded digits at epsilon 3: noise multiplier 1.35."""
    return Account(epsilon=3.0, size=4000, batch_size=400, epochs=5)


PRESETS = {"digits-cpu": digits_cpu}

SETTINGS = Account
