"""What `sfumato train` can be asked for, and presets with the score that each reached."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato.config import Withdrawn
from sfumato.errors import ConfigError
from sfumato.privacy.releases import check_noise
from sfumato.setting_groups import Settings, WithStages, flatten, leaves
from sfumato.settings.checks import check_above_0, check_counts_above_0, check_not_negative

Mode = Literal["ghost_mixed", "ghost", "non-ghost", "non-private"]
FEWEST_CANARIES = 20


@dataclass(frozen=True, kw_only=True)
class Data:
    """Images, and how they are framed."""

    data: str = "digits"
    """Images: a name, an .npz file, or a folder with a folder per class; NAME@CLASSES for some."""
    data_root: Path = Path("data")
    """Folder that the named data sets are in."""
    download: bool = False
    """Let torchvision fetch a named data set that is not there."""
    centre_crop: int | None = None
    """Cut a square of this many pixels a side out of the middle of each image, before resizing."""
    image_size: int | None = None
    """Resize images to this many pixels a side; left out, they keep their size."""
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
    """Start the network from the model library's public weights."""
    weights: Path | None = None
    """Start the network from a state dict in this file."""
    norm: Literal["group", "frozen", "keep"] | None = None
    """What happens to BatchNorm: group puts GroupNorm in its place, frozen keeps its public
    statistics, keep is for plain training. Left out: as in the run that --weights are from, or
    frozen."""
    train_only: Literal["all", "head", "bias"] = "all"
    """Which parameters are trained: all, those of the last layer (head), or biases."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as "blocks.0.*"."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The guarantee, and how gradients are clipped and noised for it."""

    epsilon: float | None = None
    """Epsilon of the guarantee for everything that is released. Give this or --noise-multiplier."""
    delta: float | None = None
    """Delta of the guarantee, the chance that it fails; chosen by the size of the data when left
    out."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise in units of the norm bound, in place of --epsilon."""
    relation: Literal["add-or-remove", "replace"] = "add-or-remove"
    """Which data sets count as neighbours: one example more or less, or one replaced."""
    unit: Literal["example", "person"] = "example"
    """Whose presence is hidden: that of one image, or of one person with all of their images."""
    people: str | None = None
    """Which person each image shows: folder (class/PERSON/image) or FILE.csv[:COLUMN]; .npz files
    have it inside."""
    images_per_person: int = 4
    """With --unit person: how many images of a person make one example in a step."""
    mode: Mode = "ghost_mixed"
    """How gradient norms are computed: all private modes give the same numbers. non-private is
    plain training without a guarantee."""
    max_grad_norm: float = 1.0
    """Norm to which each example's gradient is clipped."""
    clip: Literal["vanilla", "automatic", "auto-v", "global"] = "vanilla"
    """Clip function: vanilla (only longer gradients are scaled), automatic or auto-v (all are
    scaled), global (longer ones are dropped)."""
    per_layer: bool = False
    """Clip the gradient of each layer on its own."""
    noise_decay: float = 1.0
    """Factor by which the noise multiplier has changed at the end of training; 1 for constant
    noise."""
    clip_decay: float = 1.0
    """Factor by which the norm bound has changed at the end of training; 1 for a constant bound."""
    secure: bool = False
    """Draw noise from a cryptographic stream, and round it so that floating point gives nothing
    away."""
    noise_seed: int | None = None
    """Seed that makes batches and noise repeat exactly; the result is marked as not for release."""

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
                "mode non-private keeps no guarantee: leave --epsilon out (after a preset: "
                "--epsilon None)."
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
    """Expected (logical) batch size, in images or people."""
    epochs: float | None = None
    """Passes over the training data; 5 when neither this nor --steps is given."""
    steps: int | None = None
    """Optimizer steps, in place of --epochs."""
    lr: float = 0.5
    """Learning rate of the optimizer."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer that takes the steps."""
    momentum: float = 0.0
    """Momentum of the sgd optimizer."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    schedule: Literal["constant", "cosine", "stairs"] = "constant"
    """How the learning rate changes over time."""
    sharpness: float = 0.0
    """How far each step looks uphill for flat minima: rho of DP-SAT, or of SAM in plain training; 0
    for ordinary steps."""
    ema: float = 0.0
    """Decay of the moving average of the weights; 0 for none."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of activations; sums and noise are always float32."""

    def __post_init__(self) -> None:
        check_above_0(self, "batch_size", "epochs", "steps", "lr")
        check_not_negative(self, "sharpness")


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How images are changed before the network sees them."""

    augmult: int = 1
    """Augmented views of each example per step; together they count as one example."""
    crop: int = 0
    """Crop images at random after this many pixels of reflect padding; 0 for none."""
    flip: bool = False
    """Mirror images at random, half of them."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "augmult")


@dataclass(frozen=True, kw_only=True)
class Extender:
    """Public images that help each private step."""

    extender: Literal["none", "dope", "mirror", "weight-multiplicity"] = "none"
    """What public images add to each private step (DOPE-SGD, mirror descent, weight multiplicity);
    costs no privacy."""
    extender_images: str | None = None
    """Public images for the --extender, of the same classes: a name, file or folder as for
    --data."""
    public_batch_size: int = 64
    """Public images per step of the --extender."""
    public_rho: float = 0.05
    """How far the weight-multiplicity extender moves the weights for each view."""

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
    """Number of examples that are planted for an audit, each in the data or not by the toss of a
    coin; 0 for none."""
    canary_kind: Literal["gradient", "mislabelled", "natural"] = "gradient"
    """What canaries are: made-up worst-case gradients (the tightest audit), mislabelled images, or
    natural images."""

    def __post_init__(self) -> None:
        if self.canaries < 0 or 0 < self.canaries < FEWEST_CANARIES:
            raise ConfigError(
                f"canaries={self.canaries} must be 0 (none), or {FEWEST_CANARIES} and more: fewer "
                "prove nothing. 1000 is a good number."
            )


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How to compute, not what: a run may be resumed with other values."""

    physical_batch_size: int | Literal["auto"] = 256
    """Examples that are in memory at once; auto takes the largest number that fits."""
    compile: bool = False
    """Compile the training step: takes a minute once, then steps are faster."""
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
    """Training of a network."""

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
    """Seed of the initial weights and of public choices; batches, views and noise are secret."""

    @property
    def without_noise(self) -> str:
        """The flag that takes the noise out of private training; empty if none does."""
        return self.privacy.without_noise

    @property
    def alone(self) -> "Train":
        """The same as settings of sfumato train, checked as such."""
        return Train(**flatten(self))

    def check_extender(self) -> None:
        """Refuse what an extender cannot do."""
        name = self.extension.extender
        if name != "none" and self.privacy.mode == "non-private":
            raise ConfigError(f"--extender {name} is for private steps: leave it out.")
        if name == "dope" and self.privacy.per_layer:
            raise ConfigError("--extender dope shifts all layers as one: leave --per-layer out.")


@dataclass(frozen=True, kw_only=True, init=False)
class WithTraining(WithStages):
    """Settings of a command that trains a network on private images, in stages."""

    MAY_CHANGE: ClassVar = (*Training.MAY_CHANGE, *WithStages.MAY_CHANGE)
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
    """Print how the gradient norm of each layer is computed and what that costs, and stop."""

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
