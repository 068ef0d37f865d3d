"""What `sfumato release` can be asked for, and presets with the score that each reached."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato.config import Withdrawn
from sfumato.errors import ConfigError
from sfumato.setting_groups import Settings, Subcommand
from sfumato.settings.checks import check_above_0, check_counts_above_0, check_not_negative
from sfumato.settings.train import ONLY_TRAIN, Training, WithTraining


@dataclass(frozen=True, kw_only=True)
class Matching:
    """How public images are moved until they match the released statistics."""

    k: int = 10
    """Steps that each public image is moved; 0 leaves images as they are."""
    match_lr: float = 0.1
    """Learning rate of the images' pixels in the matching, in units of a normalised input."""
    match_batch: int = 250
    """Images whose statistics are matched together."""
    statistics_weight: float = 10.0
    """Weight of the feature statistics in the matching's loss."""
    class_weight: float = 1.0
    """Weight of the teacher's cross-entropy in the matching's loss."""
    tv_weight: float = 2.5e-5
    """Weight of the images' roughness (total variation) in the matching's loss."""
    l2_weight: float = 3e-8
    """Weight of the pixels' squared size in the matching's loss."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "match_batch")
        check_above_0(self, "match_lr")
        check_not_negative(self, "k", "statistics_weight", "class_weight", "tv_weight", "l2_weight")


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The feature statistics of private images, which are released with noise."""

    moments_share: float | Literal["auto"] = "auto"
    """Share of the budget that the feature statistics get; auto balances their error against the
    teacher's."""
    moments_noise: float | None = None
    """Noise multiplier of the feature statistics, in place of --moments-share."""
    moments_slack: float = 1.5
    """Norm bound of one image's statistics, in units of what is usual in public images."""
    per_class: bool = False
    """Release and match the statistics of each class."""

    def __post_init__(self) -> None:
        check_above_0(self, "moments_slack")
        check_not_negative(self, "moments_noise")
        share = self.moments_share
        if share != "auto" and not 0 < share < 1:
            raise ConfigError(f"moments_share={share:g} must lie between 0 and 1, or be auto.")
        if self.moments_noise is not None and share != "auto":
            raise ConfigError(
                "--moments-noise and --moments-share both choose the noise: give one."
            )


@dataclass(frozen=True, kw_only=True)
class Student:
    """The network that is trained on released images alone."""

    student: str | None = None
    """Network of the student; the teacher's model when left out."""
    student_epochs: float = 20
    """Epochs of the student's training."""
    student_lr: float = 4e-3
    """Highest learning rate of the student."""
    student_batch: int = 256
    """Images per step of the student's training."""
    temperature: float = 100.0
    """Temperature of the teacher's answers that the student is trained on."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "student_batch")
        check_above_0(self, "student_epochs", "student_lr", "temperature")


@dataclass(frozen=True, kw_only=True, init=False)
class ReleaseSettings(WithTraining):
    """Images to share: public ones, moved so that they carry a private task.

    Settings of training are the teacher's. Epsilon is the guarantee for everything together.
    """

    MAY_CHANGE: ClassVar = (*WithTraining.MAY_CHANGE, "controls")
    WITHDRAWN: ClassVar = {
        **ONLY_TRAIN,
        "soft_labels": Withdrawn("a student learns the answers that are released", "cached"),
        "extractor": Withdrawn("images are compared in the teacher's features; leave it out"),
        "card_scores": Withdrawn("scores stay in private/scores.json, which the owner may quote"),
        "student_shift": Withdrawn("a student sees released images as they are", 0),
        "verify": Withdrawn("sfumato release verify BUNDLE checks a bundle", None),
        "repeats": Withdrawn("repeat the command with another --seed and another --out"),
    }

    stage: Literal["all", "teacher", "moments", "match", "student", "evaluate"] = "all"
    """Stage to stop after (also as the first word: sfumato release moments ...)."""
    teacher: Path | None = None
    """Finished run of sfumato train that is the teacher, in place of training one."""
    public: str = "patches"
    """Public images that are moved and released: a name, an .npz file, or a folder."""
    public_images: int | None = None
    """How many public images to take, the same share of each class; all when left out."""
    format: Literal["npz", "png"] = "npz"
    """Form of the bundle's images: one .npz file, or a folder of PNGs with labels.csv."""
    controls: bool = False
    """Train and score controls too: images that are not moved (k = 0), public labels alone, and a
    student of the private images."""
    train: Training = Training(model="group-cnn")
    moments: Moments = Moments()
    matching: Matching = Matching()
    distil: Student = Student()

    def __post_init__(self) -> None:
        check_counts_above_0(self, "public_images")
        self._check_guarantee()
        self.train.check_extender()
        self.train.extension.check_images()
        self._check_moments()
        if self.moments.per_class and self.train.privacy.unit == "person":
            raise ConfigError(
                "statistics of each class are for images: a person may be in several. Leave "
                "--per-class out, or --unit person."
            )

    def _check_moments(self) -> None:
        privacy, moments = self.train.privacy, self.moments
        no_budget = privacy.epsilon in (None, math.inf)
        if moments.moments_share != "auto" and (self.teacher is not None or no_budget):
            raise ConfigError(
                "--moments-share divides --epsilon between a teacher to be trained and the "
                "statistics. After --teacher these get all that is left; without a budget, give "
                "--moments-noise."
            )
        exact = privacy.mode == "non-private" or privacy.epsilon == math.inf
        if moments.moments_noise and exact:
            raise ConfigError(
                "with no guarantee the statistics are exact: leave --moments-noise out, or give "
                "--epsilon or --noise-multiplier."
            )

    def _check_guarantee(self) -> None:
        privacy = self.train.privacy
        if self.teacher is None:
            privacy.check_guarantee()
        elif privacy.mode == "non-private":
            # Whatever --epsilon says, the statistics would be exact.
            raise ConfigError(
                "--mode says how a teacher is trained, and --teacher is there already: leave "
                "--mode out."
            )
        elif privacy.noise_multiplier is not None:
            raise ConfigError(
                "--teacher brings its own noise: leave --noise-multiplier out. For the statistics "
                "there is --moments-noise, or --epsilon for all together."
            )
        elif privacy.epsilon is None and self.moments.moments_noise is None and self.matching.k > 0:
            raise ConfigError(
                "what may the statistics cost? Give --epsilon for teacher and statistics "
                "together, or --moments-noise."
            )


@dataclass(frozen=True, kw_only=True, init=False)
class Verify(Settings):
    """Check a bundle that was given to you: its files, its ledger and its card agree."""

    WORD: ClassVar = "verify"

    verify: Path | None = None
    """Bundle to check: a folder (also: sfumato release verify BUNDLE)."""

    def __post_init__(self) -> None:
        if self.verify is None:
            raise ConfigError("--verify what? Give sfumato release verify BUNDLE.")


SUBCOMMANDS = {"verify": Subcommand(kind=Verify, former=("--verify",))}


def digits_cpu() -> ReleaseSettings:
    """Epsilon 3 on 4,000 digits, from pieces of two photographs: 0.87, 43 s on 2 cores."""
    return ReleaseSettings(
        public="patches",
        grey=True,
        image_size=28,
        model="group-cnn-small",
        epsilon=3.0,
        batch_size=500,
        epochs=20,
        lr=2.0,
        clip="automatic",
        physical_batch_size=500,
        student_epochs=25,
        student_lr=1e-2,
        student_batch=64,
        matching=Matching(k=5),
    )


def small_grey(data: str, public: str, epsilon: float, **others: Any) -> ReleaseSettings:
    """A modern teacher for 60,000 small grey images: a small network, large batches."""
    base = ReleaseSettings(
        data=data,
        public=public,
        grey=True,
        image_size=28,
        epsilon=epsilon,
        delta=1e-5,
        batch_size=4096,
        epochs=30,
        lr=4.0,
        clip="automatic",
        physical_batch_size=2048,
        matching=Matching(match_batch=1000),
        student="resnet18-small",
        student_epochs=12,
        student_batch=512,
    )
    return replace(base, **others)


FAR = Matching(k=30, match_batch=1000)
"""Where public images look nothing like the private ones, they have a longer way."""


def fashion_eps1() -> ReleaseSettings:
    """Fashion-MNIST, epsilon 1, from MNIST, which looks nothing like it: 0.813 (k=0: 0.65)."""
    return small_grey("fashion_mnist", "mnist", 1.0, matching=FAR)


def fashion_eps10() -> ReleaseSettings:
    """Fashion-MNIST, epsilon 10, from MNIST: 0.823."""
    return small_grey("fashion_mnist", "mnist", 10.0, epochs=40, matching=FAR)


def mnist_eps1() -> ReleaseSettings:
    """MNIST, epsilon 1, from Fashion-MNIST: 0.953; about two minutes on an H200, as all these."""
    return small_grey("mnist", "fashion_mnist", 1.0)


def mnist_eps10() -> ReleaseSettings:
    """MNIST, epsilon 10, from Fashion-MNIST: 0.965."""
    return small_grey("mnist", "fashion_mnist", 10.0, epochs=40)


def fashion_cifar_eps1() -> ReleaseSettings:
    """Fashion-MNIST, epsilon 1, from grey CIFAR-10: 0.818."""
    return small_grey("fashion_mnist", "cifar10", 1.0)


def published(
    data: str, epsilon: float, epochs: int, batch: int, lr: float, bound: float, **others: Any
) -> Callable[[], ReleaseSettings]:
    """A teacher as in Soufleri et al. 2024, Table 1, with noise for an epsilon that is true."""

    def preset() -> ReleaseSettings:
        base = ReleaseSettings(
            data=data,
            image_size=32,
            model="resnet18-small",
            epsilon=epsilon,
            delta=1e-5,
            batch_size=batch,
            epochs=epochs,
            lr=lr,
            max_grad_norm=bound,
            momentum=0.9,
            weight_decay=5e-4,
            schedule="stairs",
            physical_batch_size="auto",
            student_epochs=200,
        )
        return replace(base, **others)

    preset.__doc__ = f"{data}, epsilon {epsilon:g}, with the published settings of the teacher."
    return preset


ONE_STEP = {"image_size": 64, "matching": Matching(k=1)}
"""Rows that were published with one step, from sets (LSUN, Places) that you bring: --public."""
HAIR = "celeba:Black_Hair+Blond_Hair+Brown_Hair"

PRESETS: dict[str, Callable[[], ReleaseSettings]] = {
    "digits-cpu": digits_cpu,
    "mnist-eps1": mnist_eps1,
    "mnist-eps10": mnist_eps10,
    "fashion-eps1": fashion_eps1,
    "fashion-eps10": fashion_eps10,
    "fashion-cifar-eps1": fashion_cifar_eps1,
    "published-mnist-eps1": published("mnist", 1, 4, 128, 0.01, 1.0, public="fashion_mnist"),
    "published-mnist-eps10": published("mnist", 10, 14, 128, 0.01, 1.0, public="fashion_mnist"),
    "published-fashion-eps1": published("fashion_mnist", 1, 30, 50, 0.01, 1.2, public="mnist"),
    "published-fashion-eps10": published("fashion_mnist", 10, 20, 128, 0.01, 1.2, public="mnist"),
    "published-hair-eps1": published(HAIR, 1, 18, 128, 1e-3, 1.0, **ONE_STEP),
    "published-hair-eps10": published(HAIR, 10, 22, 128, 1e-3, 1.0, **ONE_STEP),
    "published-gender-eps1": published("celeba:Male", 1, 18, 128, 1e-3, 1.0, **ONE_STEP),
    "published-gender-eps10": published("celeba:Male", 10, 22, 128, 1e-3, 1.0, **ONE_STEP),
    "published-cifar10-eps10": published("cifar10", 10, 12, 128, 1e-3, 1.0, crop=4, flip=True),
    "published-imagenette-eps105": published("imagenette", 105, 57, 8, 1e-3, 1.0, **ONE_STEP),
}

SETTINGS = ReleaseSettings
