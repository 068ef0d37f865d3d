"""What `sfumato account` can be asked for."""

from dataclasses import dataclass
from pathlib import Path

from sfumato.groups import Settings
from sfumato.privacy.releases import Relation


@dataclass(frozen=True, kw_only=True, init=False)
class Account(Settings):
    """Budget arithmetic: epsilon of a plan, noise or steps for an epsilon, cost of a ledger."""

    epsilon: float | None = None
    """Find the noise for this epsilon (or, with a noise multiplier, the steps it allows)."""
    noise_multiplier: float | None = None
    """Noise deviation over norm bound: find its epsilon."""
    size: int | None = None
    """Number of private examples."""
    batch_size: float | None = None
    """Expected (logical) batch; all of the data when left out."""
    epochs: float | None = None
    """Passes over the data."""
    steps: int | None = None
    """Steps, instead of epochs."""
    delta: float | None = None
    """Chance of failure; 1e-5, or less for large data, when left out."""
    relation: Relation = "add-or-remove"
    """Which data sets are neighbours: one example more or less, or one replaced."""
    max_batch: int | None = None
    """Truncate Poisson batches to this many examples. Only a `Plan` built by hand can run that."""
    ledger: Path | None = None
    """Price a ledger.jsonl, or a run directory, instead of a plan."""
    plot: Path | None = None
    """Draw epsilon over steps into this PNG file."""


def digits_cpu() -> Account:
    """The 4,000 embedded digits at epsilon 3: noise multiplier 1.35."""
    return Account(epsilon=3.0, size=4000, batch_size=400, epochs=5)


PRESETS = {"digits-cpu": digits_cpu}

SETTINGS = Account
