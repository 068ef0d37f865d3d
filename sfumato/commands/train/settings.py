"""What `sfumato train` can be asked for, and presets with the score that each reached."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato.commands.image_source import ImageSource
from sfumato.errors import ConfigError

Mode = Literal["ghost_mixed", "ghost", "non-ghost", "non-private"]
Extender = Literal["none", "dope", "mirror", "weight-multiplicity"]


FEWEST_CANARIES = 20
NO_PROMISE = ("epsilon", math.inf)


@dataclass(frozen=True, kw_only=True)
class Config(ImageSource):
    """Private (or plain) training of any vision model."""

    MAY_CHANGE: ClassVar = ("physical_batch_size", "compile", "device")
    """Settings that say how, not what: a run may go on with others."""

    ONE_OF: ClassVar = (("epsilon", "noise_multiplier"), ("epochs", "steps"))
    """Settings of which one is given: it takes the place of what a preset has of the other."""

    model: str = "tanh-cnn"
    """tanh-cnn, wrn-16-4, any timm name, torchvision:NAME, or module:function."""
    pretrained: bool = False
    """Start from the library's public weights."""
    weights: Path | None = None
    """Start from a state dict in a file."""
    norm: Literal["group", "frozen", "keep"] | None = None
    """BatchNorm: group replaces, frozen keeps public statistics. As in the weights' run, or frozen.
    """
    train_only: Literal["all", "head", "bias"] = "all"
    """Which parameters learn."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that do not, such as "blocks.0.*"."""
    unit: Literal["example", "person"] = "example"
    """Whose presence is hidden: one image, or one person with all of theirs."""
    people: str | None = None
    """Who is on which image: folder (class/PERSON/image) or FILE.csv[:COLUMN]; .npz has arrays."""
    images_per_person: int = 4
    """With people: how many images of one are taken at a time, as one example."""
    epsilon: float | None = None
    """The promise. Give this or a noise multiplier."""
    delta: float | None = None
    """Chance of failure; chosen by the data's size when left out."""
    noise_multiplier: float | None = None
    """Noise deviation over norm bound, instead of epsilon."""
    relation: Literal["add-or-remove", "replace"] = "add-or-remove"
    """Which data sets are neighbours."""
    mode: Mode = "ghost_mixed"
    """How norms are found; all private modes give the same numbers."""
    batch_size: float = 400
    """Expected (logical) batch, of images or people."""
    physical_batch_size: int | Literal["auto"] = 256
    """Examples that are in memory at once; auto takes the largest number that fits."""
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
    max_grad_norm: float = 1.0
    """Norm bound of one example's gradient."""
    noise_decay: float = 1.0
    """Schedule: what the noise multiplier has been multiplied by at the end."""
    clip_decay: float = 1.0
    """Schedule: what the norm bound has been multiplied by at the end."""
    clip: Literal["vanilla", "automatic", "auto-v", "global"] = "vanilla"
    """Clip function."""
    per_layer: bool = False
    """Clip every layer on its own."""
    augmult: int = 1
    """Augmented views of each example; they count as one example."""
    crop: int = 0
    """Random crops with this much reflect padding."""
    flip: bool = False
    """Random mirror images."""
    sharpness: float = 0.0
    """Take steps this far uphill, for flat minima: DP-SAT's rho; in plain training SAM's."""
    extender: Extender = "none"
    """What public images add to a private step; costs no privacy."""
    extender_images: str | None = None
    """For an extender: public images of the same classes; a name, file or folder as for data."""
    public_batch_size: int = 64
    """Public images that an extender looks at at a time."""
    public_rho: float = 0.05
    """How far weight-multiplicity moves the weights for each view."""
    ema: float = 0.0
    """Decay of the average of weights; 0 for none."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of activations; sums and noise are always float32."""
    compile: bool = False
    """Compile the step: a minute once, then faster."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    secure: bool = False
    """Noise from a cryptographic stream."""
    seed: int = 0
    """Seed of initial weights; batches, views and noise are secret."""
    canaries: int = 0
    """For an audit: so many examples are in the data or not by a coin; 0 for none."""
    canary_kind: Literal["gradient", "mislabelled", "natural"] = "gradient"
    """What they are: made-up worst cases (the tightest audit), or images, given a wrong class."""
    explain: bool = False
    """Print how each layer's norms are found and what that costs, and stop."""
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

    @property
    def training(self) -> "Config":
        """The settings of training alone: verbs of several stages have more."""
        given = {item.name: getattr(self, item.name) for item in fields(Config)}
        return Config(**{**given, **self._own_training})

    @property
    def _own_training(self) -> dict[str, Any]:
        """What a verb says otherwise to training than it was told."""
        return {}

    def __post_init__(self) -> None:
        self._check_promise()
        self._check_extender()
        self._check_canaries()
        for name in ("physical_batch_size", "augmult", "images_per_person", "public_batch_size"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        self._check_numbers_of_steps()
        if self.people is not None and self.unit == "example":
            raise ConfigError("--people says who is on each image: add --unit person.")

    def _check_numbers_of_steps(self) -> None:
        """Said before images are read, which may take minutes."""
        for name in ("epsilon", "batch_size", "epochs", "steps", "lr", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf and (name, value) != NO_PROMISE:
                raise ConfigError(f"{name}={value:g} must be above 0 and finite.")
        if self.noise_multiplier is not None:
            from sfumato.privacy.budget import check_noise

            check_noise(self.noise_multiplier)

    def _check_extender(self) -> None:
        for name in ("sharpness", "public_rho"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name):g} must be at least 0, and finite.")
        self._check_extender_images()
        if self.extender == "none":
            return
        if self.mode == "non-private":
            raise ConfigError(f"--extender {self.extender} is for private steps: leave it out.")
        if self.explain:
            raise ConfigError("--explain is about the model: leave --extender out.")
        if self.extender == "dope" and self.per_layer:
            raise ConfigError("--extender dope shifts all layers as one: leave --per-layer out.")

    def _check_extender_images(self) -> None:
        if self.extender != "none" and self.extender_images is None:
            raise ConfigError(
                f"--extender {self.extender} looks at public images: add --extender-images."
            )
        if self.extender == "none" and self.extender_images is not None:
            raise ConfigError(
                "--extender-images are for an extender: add --extender dope, say, or leave them "
                "out."
            )

    def _check_canaries(self) -> None:
        if self.canaries < 0 or 0 < self.canaries < FEWEST_CANARIES:
            raise ConfigError(
                f"canaries={self.canaries} must be 0 (none), or {FEWEST_CANARIES} and more: fewer "
                "prove nothing. 1000 is a good number."
            )
        if not self.canaries:
            return
        if self.unit == "person":
            raise ConfigError("--canaries are examples of their own: leave --unit person out.")
        if self.relation == "replace":
            raise ConfigError("a canary is there or not: use --relation add-or-remove with it.")
        if self.canary_kind != "gradient":
            return
        if self.mode == "non-private":
            raise ConfigError(
                "gradient canaries look at the noise of private steps: use --canary-kind "
                "mislabelled with --mode non-private."
            )
        if self.clip == "global" or self.per_layer:
            raise ConfigError(
                "a gradient canary is as long as the norm bound lets it be; --clip global drops it "
                "and --per-layer shortens it. Leave them out, or use --canary-kind mislabelled."
            )
        if self.extender != "none":
            raise ConfigError("gradient canaries change the losses, as --extender does: use one.")

    def _refuse_canaries(self) -> None:
        """For verbs of several stages."""
        if self.canaries:
            raise ConfigError("--canaries are for sfumato train: leave them out.")

    def _check_promise(self) -> None:
        given = [value for value in (self.epsilon, self.noise_multiplier) if value is not None]
        if self.mode == "non-private" and given:
            raise ConfigError(
                "mode non-private keeps no promise: leave --epsilon out (after a preset: --epsilon "
                "None)."
            )
        if self.mode != "non-private" and not self.explain and len(given) != 1:
            what, hint = ("both", " (after a preset: --epsilon None)") if given else ("neither", "")
            raise ConfigError(
                f"{what} of --epsilon and --noise-multiplier: give one of them{hint}, or --mode "
                "non-private."
            )


def digits_cpu() -> Config:
    """Epsilon 3 on 4,000 digits in half a minute on 2 cores: 0.93 to 0.94."""
    return Config(epsilon=3.0, batch_size=500, epochs=25, lr=1.0, physical_batch_size=500)


def mnist_eps1() -> Config:
    """Epsilon 1 on MNIST: 0.974, 0.975, 0.973 (three seeds), half a minute on a GPU."""
    return Config(
        data="mnist", epsilon=1.0, batch_size=4096, epochs=40, lr=2.0, clip="automatic",
        physical_batch_size="auto",
    )  # fmt: skip


def fashion_eps2() -> Config:
    """Epsilon 2 on Fashion-MNIST: a linear model on scattering coefficients, 0.888."""
    return Config(
        data="fashion_mnist", model="scatter-linear", epsilon=2.0, batch_size=4096, epochs=30,
        lr=6.0, ema=0.98, physical_batch_size="auto",
    )  # fmt: skip


def cifar10_scratch_eps8() -> Config:
    """Epsilon 8 on CIFAR-10 from scratch: 0.776 (one seed), a quarter of an hour on an H200.

    De et al. 2022 reach 0.795 with 2,500 steps of 16 views: five times the work.
    """
    return Config(
        data="cifar10", model="wrn-16-4", epsilon=8.0, delta=1e-5, batch_size=4096, steps=1000,
        lr=3.0, augmult=8, crop=4, flip=True, ema=0.995, physical_batch_size=600,
        precision="bf16", compile=True,
    )  # fmt: skip


def cifar10_finetune_eps1() -> Config:
    """Epsilon 1 on CIFAR-10 from ImageNet weights (give --pretrained, or --weights FILE).

    Biases and head of EfficientNet-lite0 at 224 pixels: 0.887 (one seed), 75 s on an H200.
    """
    return Config(
        data="cifar10", model="tf_efficientnet_lite0", image_size=224, train_only="bias",
        epsilon=1.0, delta=1e-5, batch_size=5000, epochs=12, optimizer="adam", lr=2e-3,
        schedule="cosine", clip="automatic", physical_batch_size="auto", precision="bf16",
    )  # fmt: skip


PRESETS: dict[str, Callable[[], Config]] = {
    "digits-cpu": digits_cpu,
    "mnist-eps1": mnist_eps1,
    "fashion-eps2": fashion_eps2,
    "cifar10-scratch-eps8": cifar10_scratch_eps8,
    "cifar10-finetune-eps1": cifar10_finetune_eps1,
}
