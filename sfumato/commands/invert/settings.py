"""What `sfumato invert` can be asked for, and presets with the score that each reached."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato.attacks.latent import Search
from sfumato.attacks.pupils import GanSettings, Method
from sfumato.attacks.views import Views
from sfumato.commands.train import settings as train_settings
from sfumato.config import Withdrawn
from sfumato.errors import ConfigError

STAGES = ("target", "judge", "select", "prior", "latent", "score")


@dataclass(frozen=True, kw_only=True)
class Config(train_settings.Config):
    """What does a model think that a class looks like? Images back from its answers.

    All settings of `sfumato train` are here too: they are those of the target, if it is trained
    here (--mode non-private, or --epsilon).
    """

    MAY_CHANGE: ClassVar = (*train_settings.Config.MAY_CHANGE, "stage")
    """Settings that say how, not what: a run may go on with others."""
    PASSING: ClassVar = {"stage": "all"}
    """Settings of one command, which a run does not remember."""
    WITHDRAWN: ClassVar = {
        "force": Withdrawn("a judge that knows the target's images is never taken", False),
    }

    stage: Literal["all", "target", "judge", "select", "prior", "latent", "score"] = "all"
    """One stage alone (also as the first word: sfumato invert select ...)."""
    data: str = "digits@0-4"
    """The private images that the target learnt: for judges and scores, not for the attack."""
    target: str | None = None
    """A run of sfumato train, or module:function with --weights, in place of training one."""
    target_pixels: tuple[float, float] | None = None
    """What black and white are to a target of your own, such as 0 1; left out, mostly -1 and 1."""
    public: str = "digits@5-9"
    """The attacker's own images, of other classes."""
    public_centre_crop: int | None = None
    """Another --centre-crop for them: faces of other sources are framed otherwise."""
    shared_classes: bool = False
    """Public images may show private classes: one name is one class."""
    other_classes: bool = False
    """Public classes are other things, also where a name is the same: judges tell them apart."""

    judges: tuple[str, ...] = ("scnn", "resnet18-small")
    """Networks that judge guesses: trained on other images, and on the public classes too."""
    judge: tuple[Path, ...] = ()
    """Judges that are there already: runs of sfumato train."""
    judge_share: float = 0.5
    """The part of the private images that judges learn and the target does not."""
    judge_epochs: float = 4.0
    """Epochs of their training."""

    n: int = 1000
    """Public images for each class, by the target's confidence."""
    method: Method = "plg"
    """plg; or a baseline: gmi (no labels), ked (soft labels), pixels (no generator)."""
    loss: Literal["margin", "cross-entropy", "poincare", "logit"] = "margin"
    """What the target's answers should make small."""
    own_unit: bool = True
    """Count logits in the target's own unit, its usual margin on public images."""
    views: Views = field(default_factory=Views)
    """How guesses are looked at."""
    gan: GanSettings = field(default_factory=GanSettings)
    """How the generator is trained."""
    search: Search = field(default_factory=Search)
    """How codes are searched."""

    sweep: bool = False
    """Attack targets at several epsilons (also: sfumato invert sweep)."""
    epsilons: tuple[str, ...] = ("inf", "clip", "50", "8", "3", "1")
    """Their epsilons; inf is not private, clip is clipped and not noised."""
    units: tuple[Literal["example", "person"], ...] = ("example",)
    """Whose privacy, in turn."""
    seeds: int = 3
    """Targets of each kind."""
    private_lr: float = 2.0
    """Learning rate of the private ones, which are clipped automatically."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_canaries()
        if not 0 < self.judge_share < 1:
            raise ConfigError(f"judge_share={self.judge_share:g} must lie between 0 and 1.")
        if self.n < 1 or self.seeds < 1:
            raise ConfigError("n and seeds must be at least 1.")
        if self.shared_classes and self.other_classes:
            raise ConfigError(
                "--shared-classes says that one name is one class, --other-classes that it is two: "
                "give one of them."
            )
        if not self.judges and not self.judge:
            raise ConfigError("who judges? Give --judges NAME, or --judge RUN.")
        if not self.judge_epochs > 0:
            raise ConfigError(f"judge_epochs={self.judge_epochs:g} must be above 0.")
        if self.target_pixels is not None:
            self._check_pixels(*self.target_pixels)
        if self.sweep:
            self._check_sweep()

    def _check_pixels(self, black: float, white: float) -> None:
        if self.target is None:
            raise ConfigError("--target-pixels are for a --target of your own: leave them out.")
        if not -math.inf < black < white < math.inf:
            raise ConfigError(
                f"--target-pixels {black:g} {white:g}: two numbers, black below white, such as 0 1."
            )

    def _check_sweep(self) -> None:
        if self.target is not None or self.stage != "all":
            word = "--target" if self.target is not None else "--stage"
            raise ConfigError(f"a sweep trains and attacks its own targets: leave {word} out.")
        if not self.epsilons or not self.units:
            raise ConfigError("a sweep needs at least one of --epsilons and one of --units.")
        for text in self.epsilons:
            if text not in ("inf", "clip") and not _is_positive(text):
                raise ConfigError(f'--epsilons "{text}": numbers above 0, inf, or clip.')

    def _check_promise(self) -> None:
        if self.target is None and not self.sweep:
            super()._check_promise()
        elif self.epsilon is not None or self.noise_multiplier is not None:
            what = "a sweep chooses it" if self.sweep else "the target has its own"
            raise ConfigError(f"--epsilon and --noise-multiplier: {what}. Leave them out.")


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


DIGITS = Views(mirror=False, degrees=8.0)
TINY = GanSettings(
    iterations=500, gan_batch=32, d_steps=2, alpha=0.3, gan_lr=2e-3, gan_width=8, latent=64,
    look_every=50, patience=0,
)  # fmt: skip


def digits_cpu() -> Config:
    """Digits 0 to 4 of 16 pixels, from 5 to 9: 0.64 to 0.94 by both judges; a minute on 2 cores."""
    return Config(
        image_size=16, model="group-cnn-small", mode="non-private", batch_size=64, epochs=20,
        optimizer="adam", lr=3e-3, crop=1, judges=("group-cnn", "vgg-tiny"), judge_epochs=12, n=300,
        views=DIGITS, gan=TINY, search=Search(restarts=10, z_steps=60),
    )  # fmt: skip


def small(data: str, public: str, reached: str = "", **others: Any) -> Callable[[], Config]:
    """A protocol on small images: half of the private images for the target, half for judges."""

    def preset() -> Config:
        base = Config(
            data=data, public=public, image_size=32, model="mcnn", mode="non-private",
            batch_size=256, epochs=5, optimizer="adam", lr=1e-3, views=DIGITS,
            gan=GanSettings(gan_width=32), search=Search(restarts=100),
        )  # fmt: skip
        return replace(base, **others)

    preset.__doc__ = f"{data}, from {public}{reached}."
    return preset


def faces(model: str) -> Callable[[], Config]:
    """Faces of 64 pixels, as published: private and public people in folders that you bring."""

    def preset() -> Config:
        return Config(
            data="private_faces", public="public_faces", centre_crop=108, image_size=64,
            model=model, norm="keep", mode="non-private", batch_size=64, epochs=50, lr=0.01,
            momentum=0.9, weight_decay=1e-4, flip=True, judge_epochs=30, n=30,
            judges=("vgg16-face" if model.startswith("ir") else "ir-50", "resnet18-small"),
            gan=GanSettings(iterations=30_000), search=Search(restarts=5, z_steps=600),
        )  # fmt: skip

    preset.__doc__ = f"Faces at 64 pixels with {model}: folders private_faces and public_faces."
    return preset


NEAR = "cat,deer,truck,ship,bird", "dog,horse,automobile,airplane,frog"
SPLITS = ("0,2,4,6,8", "1,3,5,7,9", "0,1,5,8,9", "2,3,4,6,7", "0,3,6,7,9", "1,2,4,5,8")
"""Halves of the ten digits, each with its other half: the six of protocol M2."""
M2_REACHED = (0.75, 0.72, 0.79, 0.85, 0.47, 0.82)
"""What part of the guesses both judges name as they were meant."""
CLOTHES: dict[str, Any] = {"model": "resnet18-small", "judges": ("scnn", "mcnn"), "views": Views()}
OLIVETTI = GanSettings(gan_width=16, gan_batch=32)


def halves() -> dict[str, Callable[[], Config]]:
    """Protocol M2: five digits against the other five, six times."""
    found = {}
    for number, private in enumerate(SPLITS, 1):
        public = ",".join(digit for digit in "0123456789" if digit not in private)
        reached = f": {M2_REACHED[number - 1]}, floor about 0.01"
        found[f"m2-{number}"] = small(f"mnist@{private}", f"mnist@{public}", reached)
    return found


PRESETS: dict[str, Callable[[], Config]] = {
    "digits-cpu": digits_cpu,
    "s1": digits_cpu,
    "m1": small("mnist@0-4", "mnist@5-9", ": 0.96 of guesses by both judges, floor 0.01"),
    "m1-mirror": small("mnist@5-9", "mnist@0-4", ": 0.56, floor 0.006"),
    **halves(),
    "f1": small("fashion_mnist@0-4", "fashion_mnist@5-9", **CLOTHES),
    "f1-no-shirt": small("fashion_mnist@0-4", "fashion_mnist@5,7-9", **CLOTHES),
    "c1": small(
        f"cifar10@{NEAR[0]}",
        f"cifar10@{NEAR[1]}",
        ": 0.51, floor 0.10",
        model="wrn-16-4",
        views=Views(),
    ),
    "o1": small("olivetti.npz@0-19", "olivetti.npz@20-39", n=25, gan=OLIVETTI, views=Views()),
    "faces-vgg16": faces("vgg16-face"),
    "faces-ir50": faces("ir-50"),
    "faces-ir152": faces("ir-152"),
}
