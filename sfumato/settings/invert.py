"""What `sfumato invert` can be asked for, and presets with the score that each reached."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato.config import Withdrawn
from sfumato.errors import ConfigError
from sfumato.settings.checks import (
    check_above_0,
    check_counts_above_0,
    check_not_negative,
    check_share,
)
from sfumato.settings.train import ONLY_TRAIN, Training, WithTraining

Method = Literal["plg", "gmi", "ked", "pixels"]


@dataclass(frozen=True)
class Views:
    """How the target sees each image several times, a little changed."""

    least_area: float = 0.8
    """Smallest share of an image that a random crop keeps."""
    degrees: float = 5.0
    """Largest random rotation of an image, in degrees."""
    jitter: float = 0.2
    """Largest random relative change of brightness and contrast."""
    mirror: bool = True
    """Mirror every second view of an image; not for digits."""

    def __post_init__(self) -> None:
        if not 0 < self.least_area <= 1:
            raise ConfigError(f"least_area={self.least_area:g} must be above 0 and at most 1.")
        if not 0 <= self.degrees <= 180:
            raise ConfigError(f"degrees={self.degrees:g} must lie between 0 and 180.")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter={self.jitter:g} must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class GanSettings:
    """How the generator is trained."""

    iterations: int = 10_000
    """Steps of the generator's training, at most."""
    gan_batch: int = 64
    """Images per step of the generator's training."""
    d_steps: int = 5
    """Steps of the discriminator for each step of the generator."""
    alpha: float = 0.2
    """Weight of the inversion loss, beside the adversarial loss."""
    gan_lr: float = 2e-4
    """Learning rate of generator and discriminator (Adam, betas 0 and 0.9)."""
    gan_width: int = 64
    """Width (channels) of generator and discriminator."""
    latent: int = 128
    """Length of the generator's latent code."""
    gan_ema: float = 0.0
    """Decay of the moving average of the generator's weights; 0 for none."""
    look_every: int = 250
    """Iterations of the generator between measurements of the target's confidence."""
    patience: int = 8
    """Measurements without higher confidence after which the generator's training stops; 0 for
    never."""

    def __post_init__(self) -> None:
        counts = ("iterations", "gan_batch", "d_steps", "gan_width", "latent", "look_every")
        check_counts_above_0(self, *counts)
        check_above_0(self, "gan_lr")
        check_not_negative(self, "alpha", "patience")
        if not 0 <= self.gan_ema < 1:
            raise ConfigError(f"gan_ema={self.gan_ema:g} must be 0 (none) or more, and below 1.")


@dataclass(frozen=True, kw_only=True)
class Search:
    """How latent codes are searched for images that the target names."""

    restarts: int = 20
    """Images to find for each class, each from a latent code of its own."""
    z_steps: int = 200
    """Steps of Adam in the search of each latent code."""
    z_lr: float = 0.1
    """Learning rate of the search of latent codes."""
    z_batch: int = 1000
    """Latent codes that are searched at once."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "restarts", "z_batch")
        check_above_0(self, "z_lr")
        check_not_negative(self, "z_steps")


@dataclass(frozen=True, kw_only=True)
class PublicImages:
    """The attacker's own images."""

    public: str = "digits@5-9"
    """The attacker's own images, of other classes than the private ones."""
    public_centre_crop: int | None = None
    """Value of --centre-crop for the public images, where they are framed otherwise."""
    shared_classes: bool = False
    """Allow public images of private classes: classes of the same name are the same."""
    other_classes: bool = False
    """Public classes are others than private ones even where the names are the same."""

    def __post_init__(self) -> None:
        if self.shared_classes and self.other_classes:
            raise ConfigError(
                "--shared-classes says that one name is one class, --other-classes that it is two: "
                "give one of them."
            )


@dataclass(frozen=True, kw_only=True)
class Judges:
    """Networks that judge the attacker's guesses."""

    judges: tuple[str, ...] = ("scnn", "resnet18-small")
    """Networks that are trained to judge the attacker's guesses, on other private images and the
    public classes."""
    judge: tuple[Path, ...] = ()
    """Finished runs of sfumato train that judge guesses, in place of training judges."""
    judge_share: float = 0.5
    """Share of the private images that judges are trained on and the target is not."""
    judge_epochs: float = 4.0
    """Epochs of the judges' training."""

    def __post_init__(self) -> None:
        check_share(self, "judge_share")
        check_above_0(self, "judge_epochs")
        if not self.judges and not self.judge:
            raise ConfigError("who judges? Give --judges NAME, or --judge RUN.")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Attacks on targets trained at several epsilons."""

    sweep: bool = False
    """Train and attack targets at several epsilons (also: sfumato invert sweep)."""
    epsilons: tuple[str, ...] = ("inf", "clip", "50", "8", "3", "1")
    """Epsilons of the targets of a sweep; inf is not private, clip is clipped without noise."""
    units: tuple[Literal["example", "person"], ...] = ("example",)
    """Units of privacy (example, person) of a sweep's targets, each in turn."""
    seeds: int = 3
    """Targets of each kind in a sweep, with a seed each."""
    private_lr: float = 2.0
    """Learning rate of a sweep's private targets."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "seeds")
        if not self.sweep:
            return
        if not self.epsilons or not self.units:
            raise ConfigError("a sweep needs at least one of --epsilons and one of --units.")
        for text in self.epsilons:
            if text not in ("inf", "clip") and not _is_positive(text):
                raise ConfigError(f'--epsilons "{text}": numbers above 0, inf, or clip.')


@dataclass(frozen=True, kw_only=True, init=False)
class Invert(WithTraining):
    """What does a model think that a class looks like? Images back from its answers.

    Settings of training are the target's, if it is trained here (--mode non-private, or --epsilon).
    --data are the private images it is trained on: for judges and scores, not for the attack.
    """

    WITHDRAWN: ClassVar = {
        **ONLY_TRAIN,
        "force": Withdrawn("a judge that knows the target's images is never taken", False),
    }

    stage: Literal["all", "target", "judge", "select", "prior", "latent", "score"] = "all"
    """Stage to stop after (also as the first word: sfumato invert select ...)."""
    target: str | None = None
    """Model to attack, in place of training one: a run of sfumato train, or module:function with
    --weights."""
    target_pixels: tuple[float, float] | None = None
    """Pixel values of black and white for a target of your own, such as 0 1; usually -1 and 1 when
    left out."""
    n: int = 1000
    """Public images that are selected for each class, by the target's confidence."""
    method: Method = "plg"
    """Attack: plg (top-n pseudo labels), or a baseline: gmi (no labels), ked (soft labels), pixels
    (no generator)."""
    loss: Literal["margin", "cross-entropy", "poincare", "logit"] = "margin"
    """Inversion loss: what of the target's answers is made small."""
    own_unit: bool = True
    """Scale the target's logits by their usual margin on public images, so that losses compare."""
    train: Training = Training(data="digits@0-4")
    attacker: PublicImages = PublicImages()
    jury: Judges = Judges()
    views: Views = Views()
    gan: GanSettings = GanSettings()
    search: Search = Search()
    sweeping: Sweep = Sweep()

    @classmethod
    def first_words(cls) -> Mapping[str, tuple[str, ...]]:
        """A stage, or sweep."""
        return {**super().first_words(), "sweep": ("--sweep",)}

    def __post_init__(self) -> None:
        check_counts_above_0(self, "n")
        privacy = self.train.privacy
        if self.target is None and not self.sweeping.sweep:
            privacy.check_guarantee()
        elif privacy.epsilon is not None or privacy.noise_multiplier is not None:
            what = "a sweep chooses it" if self.sweeping.sweep else "the target has its own"
            raise ConfigError(f"--epsilon and --noise-multiplier: {what}. Leave them out.")
        self.train.check_extender()
        self.train.extension.check_images()
        if self.target_pixels is not None:
            self._check_pixels(*self.target_pixels)
        if self.sweeping.sweep and (self.target is not None or self.stage != "all"):
            word = "--target" if self.target is not None else "--stage"
            raise ConfigError(f"a sweep trains and attacks its own targets: leave {word} out.")

    def _check_pixels(self, black: float, white: float) -> None:
        if self.target is None:
            raise ConfigError("--target-pixels are for a --target of your own: leave them out.")
        if not -math.inf < black < white < math.inf:
            raise ConfigError(
                f"--target-pixels {black:g} {white:g}: two numbers, black below white, such as 0 1."
            )


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


DIGITS = Views(mirror=False, degrees=8.0)
TINY = GanSettings(
    iterations=500,
    gan_batch=32,
    d_steps=2,
    alpha=0.3,
    gan_lr=2e-3,
    gan_width=8,
    latent=64,
    look_every=50,
    patience=0,
)


def digits_cpu() -> Invert:
    """Digits 0 to 4 of 16 pixels, from 5 to 9: 0.64 to 0.94 by both judges; a minute on 2 cores."""
    return Invert(
        image_size=16,
        model="group-cnn-small",
        mode="non-private",
        batch_size=64,
        epochs=20,
        optimizer="adam",
        lr=3e-3,
        crop=1,
        judges=("group-cnn", "vgg-tiny"),
        judge_epochs=12,
        n=300,
        views=DIGITS,
        gan=TINY,
        search=Search(restarts=10, z_steps=60),
    )


def small(data: str, public: str, reached: str = "", **others: Any) -> Callable[[], Invert]:
    """A protocol on small images: half of the private images for the target, half for judges."""

    def preset() -> Invert:
        base = Invert(
            data=data,
            public=public,
            image_size=32,
            model="mcnn",
            mode="non-private",
            batch_size=256,
            epochs=5,
            optimizer="adam",
            lr=1e-3,
            views=DIGITS,
            gan=GanSettings(gan_width=32),
            search=Search(restarts=100),
        )
        return replace(base, **others)

    preset.__doc__ = f"{data}, from {public}{reached}."
    return preset


def faces(model: str) -> Callable[[], Invert]:
    """Faces of 64 pixels, as published: private and public people in folders that you bring."""

    def preset() -> Invert:
        return Invert(
            data="private_faces",
            public="public_faces",
            centre_crop=108,
            image_size=64,
            model=model,
            norm="keep",
            mode="non-private",
            batch_size=64,
            epochs=50,
            lr=0.01,
            momentum=0.9,
            weight_decay=1e-4,
            flip=True,
            judge_epochs=30,
            n=30,
            judges=("vgg16-face" if model.startswith("ir") else "ir-50", "resnet18-small"),
            gan=GanSettings(iterations=30_000),
            search=Search(restarts=5, z_steps=600),
        )

    preset.__doc__ = f"Faces at 64 pixels with {model}: folders private_faces and public_faces."
    return preset


NEAR = "cat,deer,truck,ship,bird", "dog,horse,automobile,airplane,frog"
SPLITS = ("0,2,4,6,8", "1,3,5,7,9", "0,1,5,8,9", "2,3,4,6,7", "0,3,6,7,9", "1,2,4,5,8")
"""Halves of the ten digits, each with its other half: the six of protocol M2."""
M2_REACHED = (0.75, 0.72, 0.79, 0.85, 0.47, 0.82)
"""What part of the guesses both judges name as they were meant."""
CLOTHES: dict[str, Any] = {"model": "resnet18-small", "judges": ("scnn", "mcnn"), "views": Views()}
OLIVETTI = GanSettings(gan_width=16, gan_batch=32)


def halves() -> dict[str, Callable[[], Invert]]:
    """Protocol M2: five digits against the other five, six times."""
    found = {}
    for number, private in enumerate(SPLITS, 1):
        public = ",".join(digit for digit in "0123456789" if digit not in private)
        reached = f": {M2_REACHED[number - 1]}, floor about 0.01"
        found[f"m2-{number}"] = small(f"mnist@{private}", f"mnist@{public}", reached)
    return found


PRESETS: dict[str, Callable[[], Invert]] = {
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

SETTINGS = Invert
