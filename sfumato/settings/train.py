"""What `sfumato train` can be asked for, and presets with the score that each reached."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato.config import Withdrawn
from sfumato.errors import ConfigError
from sfumato.groups import Settings, flat, leaves
from sfumato.privacy.releases import check_noise

Mode = Literal["ghost_mixed", "ghost", "non-ghost", "non-private"]
FEWEST_CANARIES = 20


def check_counts_above_0(group: Any, *names: str) -> None:
    """Refuse numbers below 1; None and words are for those that are left out."""
    for name in names:
        value = getattr(group, name)
        if isinstance(value, int | float) and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")


def check_above_0(group: Any, *names: str) -> None:
    """Refuse numbers that are not above 0 and finite; None is for those that are left out."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value:g} must be above 0 and finite.")


def check_not_negative(group: Any, *names: str) -> None:
    """Refuse numbers that are below 0 or infinite; None is for those that are left out."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value:g} must be at least 0, and finite.")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Images, and how they are framed."""

    data: str = "digits"
    """Images: a name, an .npz file, or a folder with a folder per class; NAME@CLASSES for some."""
    data_root: Path = Path("data")
    """Folder of the named data sets."""
    download: bool = False
    """Let torchvision fetch a named data set that is not there."""
    centre_crop: int | None = None
    """Cut this many pixels a side out of the middle of each image, before any resizing."""
    image_size: int | None = None
    """Resize images to this many pixels a side."""
    grey: bool = False
    """Make colour images grey."""

    @property
    def loading(self) -> dict[str, Any]:
        """What `load_images` and `load_splits` want to know besides the name."""
        return {
            "image_size": self.image_size,
            "data_root": self.data_root,
            "download": self.download,
            "grey": self.grey,
            "centre_crop": self.centre_crop,
        }


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network, where its weights begin, and which of them are trained."""

    model: str = "tanh-cnn"
    """Network: tanh-cnn, wrn-16-4, any timm name, torchvision:NAME, or module:function."""
    pretrained: bool = False
    """Start from the library's public weights."""
    weights: Path | None = None
    """Start from a state dict in a file."""
    norm: Literal["group", "frozen", "keep"] | None = None
    """BatchNorm: group replaces, frozen keeps public statistics. As in the weights' run, or frozen.
    """
    train_only: Literal["all", "head", "bias"] = "all"
    """Which parameters are trained."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained, such as "blocks.0.*"."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The guarantee, and how gradients are clipped and noised for it."""

    epsilon: float | None = None
    """The guarantee: epsilon of everything. Give this or a noise multiplier."""
    delta: float | None = None
    """Chance that the guarantee fails; chosen by the data's size when left out."""
    noise_multiplier: float | None = None
    """Noise deviation over norm bound, instead of epsilon."""
    relation: Literal["add-or-remove", "replace"] = "add-or-remove"
    """Which data sets are neighbours."""
    unit: Literal["example", "person"] = "example"
    """Whose presence is hidden: one image, or one person with all of theirs."""
    people: str | None = None
    """Who is on which image: folder (class/PERSON/image) or FILE.csv[:COLUMN]; .npz has arrays."""
    images_per_person: int = 4
    """With people: how many images of one are taken at a time, as one example."""
    mode: Mode = "ghost_mixed"
    """How norms are found; all private modes give the same numbers. non-private: no guarantee."""
    max_grad_norm: float = 1.0
    """Norm bound of one example's gradient."""
    clip: Literal["vanilla", "automatic", "auto-v", "global"] = "vanilla"
    """Clip function."""
    per_layer: bool = False
    """Clip every layer on its own."""
    noise_decay: float = 1.0
    """Schedule: what the noise multiplier has been multiplied by at the end."""
    clip_decay: float = 1.0
    """Schedule: what the norm bound has been multiplied by at the end."""
    secure: bool = False
    """Noise from a cryptographic stream."""
    noise_seed: int | None = None
    """Repeat batches and noise exactly: the result is marked not for release."""

    @property
    def without_noise(self) -> str:
        """The flag that takes the noise out of private training; empty if none does."""
        if self.mode == "non-private":
            return ""
        if self.noise_multiplier == 0:
            return "--noise-multiplier 0"
        return "--epsilon inf" if self.epsilon == math.inf else ""

    def __post_init__(self) -> None:
        """Said before images are read, which may take minutes."""
        if self.epsilon != math.inf:
            check_above_0(self, "epsilon")
        check_above_0(self, "max_grad_norm")
        check_counts_above_0(self, "images_per_person")
        if self.noise_multiplier is not None:
            check_noise(self.noise_multiplier)
        if self.people is not None and self.unit == "example":
            raise ConfigError("--people says who is on each image: add --unit person.")

    def check_guarantee(self) -> None:
        """Refuse a training that says nothing of noise, and one that says two things."""
        given = [value for value in (self.epsilon, self.noise_multiplier) if value is not None]
        if self.mode == "non-private" and given:
            raise ConfigError(
                "mode non-private keeps no promise: leave --epsilon out (after a preset: --epsilon "
                "None)."
            )
        if self.mode != "non-private" and len(given) != 1:
            what, hint = ("both", " (after a preset: --epsilon None)") if given else ("neither", "")
            raise ConfigError(
                f"{what} of --epsilon and --noise-multiplier: give one of them{hint}, or --mode "
                "non-private."
            )


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Steps, and what is made of each gradient."""

    batch_size: float = 400
    """Expected (logical) batch, of images or people."""
    epochs: float | None = None
    """Passes over the data (5 when neither this nor steps is given)."""
    steps: int | None = None
    """Steps, instead of epochs."""
    lr: float = 0.5
    """Learning rate."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    schedule: Literal["constant", "cosine", "stairs"] = "constant"
    """Learning rate over time."""
    sharpness: float = 0.0
    """Take steps this far uphill, for flat minima: DP-SAT's rho; in plain training SAM's."""
    ema: float = 0.0
    """Decay of the average of weights; 0 for none."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of activations; sums and noise are always float32."""

    def __post_init__(self) -> None:
        check_above_0(self, "batch_size", "epochs", "steps", "lr")
        check_not_negative(self, "sharpness")


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How images are changed before the network sees them."""

    augmult: int = 1
    """Augmented views of each example; they count as one example."""
    crop: int = 0
    """Random crops with this much reflect padding."""
    flip: bool = False
    """Random mirror images."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "augmult")


@dataclass(frozen=True, kw_only=True)
class Extender:
    """Public images that help each private step."""

    extender: Literal["none", "dope", "mirror", "weight-multiplicity"] = "none"
    """What public images add to a private step; costs no privacy."""
    extender_images: str | None = None
    """For an extender: public images of the same classes; a name, file or folder as for data."""
    public_batch_size: int = 64
    """Public images per step of an extender."""
    public_rho: float = 0.05
    """How far weight-multiplicity moves the weights for each view."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "public_batch_size")
        check_not_negative(self, "public_rho")

    def check_images(self) -> None:
        """Refuse an extender without images, and images without one."""
        if self.extender != "none" and self.extender_images is None:
            raise ConfigError(
                f"--extender {self.extender} looks at public images: add --extender-images."
            )
        if self.extender == "none" and self.extender_images is not None:
            raise ConfigError(
                "--extender-images are for an extender: add --extender dope, say, or leave them "
                "out."
            )


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Examples planted for an audit."""

    canaries: int = 0
    """For an audit: this many examples are in the data or not, by a coin each; 0 for none."""
    canary_kind: Literal["gradient", "mislabelled", "natural"] = "gradient"
    """Canaries: made-up worst cases (the tightest audit), or images, given a wrong class or not."""

    def __post_init__(self) -> None:
        if self.canaries < 0 or 0 < self.canaries < FEWEST_CANARIES:
            raise ConfigError(
                f"canaries={self.canaries} must be 0 (none), or {FEWEST_CANARIES} and more: fewer "
                "prove nothing. 1000 is a good number."
            )


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How to compute, not what: a run may go on with other values."""

    physical_batch_size: int | Literal["auto"] = 256
    """Examples that are in memory at once; auto takes the largest number that fits."""
    compile: bool = False
    """Compile the step: a minute once, then faster."""
    device: str = "auto"
    """Where to compute: cpu, cuda, or auto."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "physical_batch_size")


ONLY_TRAIN: Mapping[str, Withdrawn] = {
    "canaries": Withdrawn("canaries are for sfumato train", 0),
    "canary_kind": Withdrawn("canaries are for sfumato train"),
    "explain": Withdrawn("sfumato train --explain explains a model", False),
}
"""Settings that other commands had in earlier versions."""


@dataclass(frozen=True, kw_only=True, init=False)
class Training(Settings):
    """Training of a network, as several commands do it. They say when it is sound: `check`."""

    MAY_CHANGE: ClassVar = tuple(leaves(Compute))
    """Settings that say how, not what: a run may go on with others."""

    ONE_OF: ClassVar = (("epsilon", "noise_multiplier"), ("epochs", "steps"))
    """Settings of which one is given: it takes the place of what a preset has of the other."""

    source: Data = Data()
    network: Model = Model()
    privacy: Privacy = Privacy()
    optim: Optim = Optim()
    augment: Augment = Augment()
    extension: Extender = Extender()
    compute: Compute = Compute()
    seed: int = 0
    """Seed of initial weights; batches, views and noise are secret."""

    @property
    def loading(self) -> dict[str, Any]:
        """What `load_images` and `load_splits` want to know besides the name."""
        return self.source.loading

    @property
    def without_noise(self) -> str:
        """The flag that takes the noise out of private training; empty if none does."""
        return self.privacy.without_noise

    @property
    def alone(self) -> "Train":
        """The same as settings of sfumato train, checked as such."""
        return Train(**flat(self))

    def check_extender(self) -> None:
        """Refuse what an extender cannot do."""
        name = self.extension.extender
        if name != "none" and self.privacy.mode == "non-private":
            raise ConfigError(f"--extender {name} is for private steps: leave it out.")
        if name == "dope" and self.privacy.per_layer:
            raise ConfigError("--extender dope shifts all layers as one: leave --per-layer out.")


@dataclass(frozen=True, kw_only=True, init=False)
class WithTraining(Settings):
    """Settings of a command that trains a network on private images, besides other things."""

    ONE_OF: ClassVar = Training.ONE_OF

    train: Training = Training()

    @property
    def without_noise(self) -> str:
        """The flag that takes the noise out of private training; empty if none does."""
        return self.train.without_noise


@dataclass(frozen=True, kw_only=True, init=False)
class Train(Training):
    """Private (or plain) training of any vision model."""

    canary: Canaries = Canaries()
    explain: bool = False
    """Print how each layer's norms are found and what that costs, and stop."""

    def __post_init__(self) -> None:
        # An explanation needs no epsilon.
        if not self.explain or self.privacy.mode == "non-private":
            self.privacy.check_guarantee()
        self.extension.check_images()
        self.check_extender()
        if self.explain and self.extension.extender != "none":
            raise ConfigError("--explain is about the model: leave --extender out.")
        if self.canary.canaries:
            self.check_canaries()

    def check_canaries(self) -> None:
        """Refuse what would drop, shorten or change canaries."""
        if self.privacy.unit == "person":
            raise ConfigError("--canaries are examples of their own: leave --unit person out.")
        if self.privacy.relation == "replace":
            raise ConfigError("a canary is there or not: use --relation add-or-remove with it.")
        if self.canary.canary_kind != "gradient":
            return
        if self.privacy.mode == "non-private":
            raise ConfigError(
                "gradient canaries look at the noise of private steps: use --canary-kind "
                "mislabelled with --mode non-private."
            )
        if self.privacy.clip == "global" or self.privacy.per_layer:
            raise ConfigError(
                "a gradient canary is as long as the norm bound lets it be; --clip global drops it "
                "and --per-layer shortens it. Leave them out, or use --canary-kind mislabelled."
            )
        if self.extension.extender != "none":
            raise ConfigError("gradient canaries change the losses, as --extender does: use one.")


def digits_cpu() -> Train:
    """Epsilon 3 on 4,000 digits in half a minute on 2 cores: 0.93 to 0.94."""
    return Train(epsilon=3.0, batch_size=500, epochs=25, lr=1.0, physical_batch_size=500)


def mnist_eps1() -> Train:
    """Epsilon 1 on MNIST: 0.974, 0.975, 0.973 (three seeds), half a minute on a GPU."""
    return Train(
        data="mnist",
        epsilon=1.0,
        batch_size=4096,
        epochs=40,
        lr=2.0,
        clip="automatic",
        physical_batch_size="auto",
    )


def fashion_eps2() -> Train:
    """Epsilon 2 on Fashion-MNIST: a linear model on scattering coefficients, 0.888."""
    return Train(
        data="fashion_mnist",
        model="scatter-linear",
        epsilon=2.0,
        batch_size=4096,
        epochs=30,
        lr=6.0,
        ema=0.98,
        physical_batch_size="auto",
    )


def cifar10_scratch_eps8() -> Train:
    """Epsilon 8 on CIFAR-10 from scratch: 0.776 (one seed), a quarter of an hour on an H200.

    De et al. 2022 reach 0.795 with 2,500 steps of 16 views: five times the work.
    """
    return Train(
        data="cifar10",
        model="wrn-16-4",
        epsilon=8.0,
        delta=1e-5,
        batch_size=4096,
        steps=1000,
        lr=3.0,
        augmult=8,
        crop=4,
        flip=True,
        ema=0.995,
        physical_batch_size=600,
        precision="bf16",
        compile=True,
    )


def cifar10_finetune_eps1() -> Train:
    """Epsilon 1 on CIFAR-10 from ImageNet weights (give --pretrained, or --weights FILE).

    Biases and head of EfficientNet-lite0 at 224 pixels: 0.887 (one seed), 75 s on an H200.
    """
    return Train(
        data="cifar10",
        model="tf_efficientnet_lite0",
        image_size=224,
        train_only="bias",
        epsilon=1.0,
        delta=1e-5,
        batch_size=5000,
        epochs=12,
        optimizer="adam",
        lr=2e-3,
        schedule="cosine",
        clip="automatic",
        physical_batch_size="auto",
        precision="bf16",
    )


PRESETS: dict[str, Callable[[], Train]] = {
    "digits-cpu": digits_cpu,
    "mnist-eps1": mnist_eps1,
    "fashion-eps2": fashion_eps2,
    "cifar10-scratch-eps8": cifar10_scratch_eps8,
    "cifar10-finetune-eps1": cifar10_finetune_eps1,
}

SETTINGS = Train
