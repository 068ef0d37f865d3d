"""What can be found in a run's `private/`: rates, attacks, lower bounds on epsilon, and checks."""

from dataclasses import dataclass

from sfumato.privacy.audit.checks import Check

Limits = tuple[float, float | None, float | None]
"""A value, and the lower and upper end of its interval where there is one."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A share of some images."""

    name: str
    value: Limits
    of: str
    """What it is a share of, and how the interval was found."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """How well an attack tells those who were in from those who were not."""

    name: str
    auc: Limits | None
    tpr_at_1_percent_fpr: Limits | None
    tpr_at_0_1_percent_fpr: Limits | None
    roc: tuple[tuple[float, ...], tuple[float, ...]] | None
    """False-positive rates and true-positive rates."""
    band: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """The interval of these, point by point: lower ends, and upper ones."""


@dataclass(frozen=True, kw_only=True)
class Proved:
    """An epsilon that the mechanism cannot be below, at a confidence, and the one promised."""

    name: str
    own: bool
    """Whether it is about the run itself, and not about a stage or a model that it attacked."""
    by_attack: bool
    """Whether somebody guessed who was in; else the mechanism was measured."""
    epsilon: float
    promised: float | None
    """The upper bound for the same delta and relation; None where nothing is promised."""
    kept: bool | None
    """Whether what is proved lies within what is promised; None without a promise."""
    delta: float | None
    confidence: float | None
    relation: str
    thresholds: str
    assumes: str


@dataclass(frozen=True, kw_only=True)
class Promised:
    """What was promised of a model that was audited."""

    epsilon: float
    delta: float
    relation: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that `private/` says."""

    rates: tuple[Rate, ...] = ()
    attacks: tuple[Attack, ...] = ()
    bounds: tuple[Proved, ...] = ()
    checks: tuple[Check, ...] = ()
    allowed: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """The ROC that no attack exceeds, by the ledger: false- and true-positive rates."""
    audited: str | None = None
    """What an audit was about."""
    promised: Promised | None = None
    """By what was audited; None if that is nothing."""
    seconds_per_step: float | None = None
    """The median time of a training step."""
    seconds_per_example: float | None = None
    """The same over the size of its batch: runs have batches of several sizes."""
    pictures: tuple[str, ...] = ()
    """Paths in the run."""
    notes: tuple[str, ...] = ()
