"""What `sfumato audit` can be asked for, and presets with what each found."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sfumato.errors import ConfigError
from sfumato.groups import Settings, defaults
from sfumato.settings.heads import HeadRecipe
from sfumato.settings.train import Data


@dataclass(frozen=True, kw_only=True, init=False)
class Audit(Settings):
    """Does a model keep its promise? Attacks on it, and what they prove, beside the ledger.

    sfumato audit --run RUN: a finished run of sfumato train.
    sfumato audit heads: a recipe for small heads, by thousands of them.
    sfumato audit --trainer module:function: your own training, called again and again.
    """

    FIRST_WORDS: ClassVar = {"heads": ("--heads",)}
    MAY_CHANGE: ClassVar = ("device",)
    """Settings that say how, not what: a run may go on with others."""

    source: Data = Data()
    run: Path | None = None
    """The run of sfumato train to audit."""
    trainer: str | None = None
    """In its place, module:function: called with images, it returns a model that learnt them."""
    heads: bool = False
    """In its place, heads by --noise-multiplier, --max-norm, ... (as first word: audit heads)."""
    practice: bool = False
    """In its place, a small private network that is first trained on the digits, with canaries."""

    shadows: int = 16
    """Of a run: shadow models, in pairs; 0 for the loss attack alone, which needs none."""
    runs: int = 200
    """Of a trainer: how often it is called, half of the times with a mislabelled image more."""
    trials: int = 20_000
    """Of heads: so many with the image, and as many without."""
    head: HeadRecipe = HeadRecipe()
    """How the heads are trained."""

    epsilon: float | None = None
    """What the trainer is claimed to promise. Runs and heads have a ledger or recipe."""
    delta: float = 1e-5
    """Of a trainer or of heads: the delta that bounds are for. A run has it in its ledger."""
    confidence: float = 0.95
    """How sure all bounds together are, and how wide the intervals."""
    seed: int = 0
    """Of halves, shadow models, canary and trials."""
    device: str = "auto"
    """cpu, cuda, or auto."""

    def __post_init__(self) -> None:
        given = {
            "--run": self.run is not None,
            "--trainer": self.trainer is not None,
            "heads": self.heads,
            "--practice": self.practice,
        }
        named = [name for name, there in given.items() if there]
        if len(named) != 1:
            found = f"{' and '.join(named)} cannot go together." if named else "audit what?"
            raise ConfigError(
                f"{found} Give one of --run RUN, --trainer module:function and heads, or try "
                "--preset digits-cpu."
            )
        if self.shadows < 0 or self.shadows % 2:
            raise ConfigError(
                f"shadows={self.shadows}: they come in pairs, one with each half of the images. "
                "Give 0, 2, 4, 8, 16 ..."
            )
        if self.trials < 100:
            raise ConfigError(f"trials={self.trials}: fewer than 100 prove nothing.")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence={self.confidence:g} must lie between 0 and 1.")
        if not 0 <= self.delta < 1:
            raise ConfigError(f"delta={self.delta:g} must lie in 0 to 1, 1 excluded.")
        self._check_own()
        if self.epsilon is not None and self.trainer is None:
            raise ConfigError("--epsilon is what a --trainer promises: leave it out here.")
        if self.heads and self.head.noise_multiplier and self.head.hidden:
            raise ConfigError("audit heads is for linear heads: leave --hidden out.")

    def _check_own(self) -> None:
        """Refuse beside a run what it has of its own."""
        if self.run is None and not self.practice:
            return
        own = ("data", "centre_crop", "image_size", "grey", "delta")
        given = [name for name in own if getattr(self, name) != defaults(Audit)[name]]
        if given:
            raise ConfigError(
                f"--{given[0].replace('_', '-')}: a run has its own images and its own delta, and "
                "is audited with these. Leave it out."
            )


def digits_cpu() -> Audit:
    """A small private network with canaries: of epsilon 3, 0.77 proved by attack, 2.97 measured.

    The shadow models find nothing: AUC 0.51. 40 s on one core.
    """
    return Audit(practice=True, shadows=4)


def heads_cpu() -> Audit:
    """20,000 heads with a lone image, as many without: 3.75 proved of epsilon 4.09, in 20 s."""
    return Audit(heads=True, image_size=8, head=HeadRecipe(max_norm=4.0, noise_multiplier=6.0))


PRESETS: dict[str, Callable[[], Audit]] = {"digits-cpu": digits_cpu, "heads-cpu": heads_cpu}

SETTINGS = Audit
