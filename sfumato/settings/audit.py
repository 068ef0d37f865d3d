"""What `sfumato audit` can be asked for, and presets with what each found.

It has three subcommands, each with settings of its own: run, heads, and trainer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sfumato.config import Withdrawn
from sfumato.errors import ConfigError
from sfumato.setting_groups import Settings, Subcommand, leaves
from sfumato.settings.checks import check_share
from sfumato.settings.heads import HeadRecipe
from sfumato.settings.train import Data


@dataclass(frozen=True, kw_only=True, init=False)
class Audit(Settings):
    """What all subcommands share."""

    MAY_CHANGE: ClassVar = ("device",)
    """Settings that say how, not what: a run may go on with others."""

    confidence: float = 0.95
    """Confidence of all bounds together, and of the intervals."""
    seed: int = 0
    """Seed of halves, shadow models, the canary and trials."""
    device: str = "auto"
    """Where to compute: cpu, cuda, or auto."""

    def __post_init__(self) -> None:
        check_share(self, "confidence")


@dataclass(frozen=True, kw_only=True, init=False)
class AuditRun(Audit):
    """Does a model keep its guarantee? Attacks on it, and what they prove, beside the ledger.

    sfumato audit run RUN: a finished run of sfumato train; these are its settings.
    sfumato audit heads: a recipe for small heads, by thousands of them (audit heads --help).
    sfumato audit trainer module:function: your own training, called again and again
    (audit trainer --help).
    """

    WORD: ClassVar = "run"

    run: Path | None = None
    """Run of sfumato train to audit (also: sfumato audit run RUN)."""
    practice: bool = False
    """Without --run: audit a small private network, trained first on the digits with canaries."""
    data_root: Path = Path("data")
    """Folder that the named data sets are in."""
    shadows: int = 16
    """Shadow models to train, in pairs; 0 for the loss attack alone, which needs none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is None and not self.practice:
            raise ConfigError(
                "audit what? Give a run (sfumato audit run RUN), or heads or trainer as the first "
                "word, or try --preset digits-cpu."
            )
        if self.shadows < 0 or self.shadows % 2:
            raise ConfigError(
                f"shadows={self.shadows}: they come in pairs, one with each half of the images. "
                "Give 0, 2, 4, 8, 16 ..."
            )

    @property
    def subject(self) -> str | Path:
        """What is audited."""
        return self.run or "digits"


@dataclass(frozen=True, kw_only=True, init=False)
class AuditHeads(Audit):
    """Audit a recipe for small linear heads: thousands of them, with one image and without."""

    source: Data = Data()
    head: HeadRecipe = HeadRecipe()
    """The training of one head."""
    trials: int = 20_000
    """Heads that are trained with the image, and as many without it."""
    delta: float = 1e-5
    """Delta that the bounds on epsilon are for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bound_delta(self.delta)
        if self.trials < 100:
            raise ConfigError(f"trials={self.trials}: fewer than 100 prove nothing.")
        if self.head.noise_multiplier and self.head.hidden:
            raise ConfigError("audit heads is for linear heads: leave --hidden out.")

    @property
    def subject(self) -> str | Path:
        """What is audited."""
        return self.data


@dataclass(frozen=True, kw_only=True, init=False)
class AuditTrainer(Audit):
    """Audit a training of your own: a function that is called again and again."""

    WORD: ClassVar = "trainer"

    source: Data = Data()
    trainer: str = ""
    """Function (module:function) that is called with images and returns a model trained on them."""
    runs: int = 200
    """Calls of the trainer, half of them with one mislabelled image more."""
    epsilon: float | None = None
    """Epsilon that the trainer claims to guarantee."""
    delta: float = 1e-5
    """Delta that the bound on epsilon is for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bound_delta(self.delta)
        if not self.trainer:
            raise ConfigError("audit what? Give sfumato audit trainer module:function.")

    @property
    def subject(self) -> str | Path:
        """What is audited."""
        return self.trainer


def check_bound_delta(delta: float) -> None:
    """Refuse what is no delta of a bound."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta={delta:g} must lie in 0 to 1, 1 excluded.")


SUBCOMMANDS = {
    "run": Subcommand(kind=AuditRun, former=("--run",)),
    "heads": Subcommand(kind=AuditHeads, former=("--heads",)),
    "trainer": Subcommand(kind=AuditTrainer, former=("--trainer",)),
}


def kind_of(stored: Mapping[str, Any]) -> type[Audit]:
    """The subcommand that stored settings are of; in the last version all had all settings."""
    if stored.get("heads", "shadows" not in stored and "trials" in stored):
        return AuditHeads
    return AuditTrainer if stored.get("trainer") is not None else AuditRun


def _of_others(kind: type[Settings]) -> dict[str, Withdrawn]:
    """The settings of other subcommands, which every run had in the last version."""
    former = {name for one in SUBCOMMANDS.values() for name in leaves(one.kind)} | {"heads"}
    instead = Withdrawn("it belongs to another of sfumato audit run, heads and trainer")
    return dict.fromkeys(sorted(former - leaves(kind).keys()), instead)


for _subcommand in SUBCOMMANDS.values():
    _subcommand.kind.WITHDRAWN = _of_others(_subcommand.kind)


def digits_cpu() -> AuditRun:
    """A small private network with canaries: of epsilon 3, 0.77 proved by attack, 2.97 measured.

    The shadow models find nothing: AUC 0.51. 40 s on one core.
    """
    return AuditRun(practice=True, shadows=4)


def heads_cpu() -> AuditHeads:
    """20,000 heads with a lone image, as many without: 3.75 proved of epsilon 4.09, in 20 s."""
    return AuditHeads(image_size=8, head=HeadRecipe(max_norm=4.0, noise_multiplier=6.0))


PRESETS: dict[str, Callable[[], Audit]] = {"digits-cpu": digits_cpu, "heads-cpu": heads_cpu}

SETTINGS = AuditRun
