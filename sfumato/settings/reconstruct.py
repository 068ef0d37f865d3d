"""What `sfumato reconstruct` can be asked for, and presets with the score that each reached."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from sfumato.config import Withdrawn
from sfumato.errors import ConfigError
from sfumato.setting_groups import WithStages
from sfumato.settings.checks import check_counts_above_0, check_share
from sfumato.settings.heads import HeadRecipe
from sfumato.settings.train import Data

FRESH = "heads are made when they are needed, and none are kept on disk; leave it out"


@dataclass(frozen=True, kw_only=True, init=False)
class Reconstruct(WithStages):
    """Training images back from the weights of a head, and how sure one can be of them."""

    MAY_CHANGE: ClassVar = ("stage", "device", "compile", "target")
    NOT_REMEMBERED: ClassVar = ("stage", "target")
    WITHDRAWN: ClassVar = {
        "save": Withdrawn(FRESH, 0),
        "shards": Withdrawn(FRESH),
        "shard": Withdrawn(FRESH),
    }

    stage: Literal["all", "base", "features", "shadow", "stats", "train", "evaluate"] = "all"
    """Stage to stop after (also as the first word: sfumato reconstruct features ...)."""
    source: Data = Data()
    """Images: test images train the heads under attack, train images are the attacker's own."""
    base: str = "vgg-tiny"
    """Public network whose features heads are trained on: any model name of sfumato train."""
    pretrained: bool = False
    """Start the base from the model library's public weights."""
    weights: Path | None = None
    """Start the base from a state dict in this file."""
    base_data: str | None = None
    """Public images to train the base on; left out, turned and mirrored images of a part of
    train."""
    base_share: float = 0.4
    """Share of the train images that the base is trained on; the attacker trains heads on the
    rest."""
    base_epochs: float = 4.0
    """Epochs of the base's training."""
    base_lr: float = 2e-3
    """Learning rate of the base's training."""
    base_tries: int = 1
    """Bases to train at most; the first whose heads reach --gate is taken."""
    gate: float = 0.0
    """Accuracy that heads on the base's features must reach on average."""
    feature_size: int | None = None
    """Resize images to this many pixels for the base (224 for networks of ImageNet)."""
    feature_norm: float | None = None
    """Scale each image's features to this length; left out, they stay as they are."""

    head: HeadRecipe = HeadRecipe()
    """How the heads are trained; the attacker knows it."""
    images: int | None = None
    """Number of images that a head is trained on in all, in place of --class-size."""
    bound: float | None = None
    """Choose the noise so that no attack's TPR exceeds this at 1 % FPR, in place of
    --noise-multiplier."""
    stats_heads: int = 20_480
    """Heads whose mean and deviation standardise the weights that the decoder reads."""

    decoder: Literal["rows", "published"] = "rows"
    """The attacker's network: rows (encodes each row of the weights), or the published one."""
    conditional: bool = True
    """Ask the decoder for an image of a given class; otherwise for any image of the head."""
    width: int = 64
    """Width (channels) of the decoder."""
    steps: int = 5_000
    """Steps of the decoder's training."""
    batch_heads: int = 64
    """Heads per step of the decoder's training; an image of each class is asked of each."""
    decoder_lr: float = 1e-3
    """Highest learning rate of the decoder, after a warm-up and before a cosine."""
    ema: float = 0.999
    """Decay of the moving average of the decoder's weights; 0 for none."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of the decoder's activations."""
    compile: bool = False
    """Compile the decoder's training step."""

    trials: int = 2_000
    """Heads that are attacked in the evaluation."""
    null: Literal["exchange", "both"] = "exchange"
    """What guesses are compared with for the false positives: images of other heads, or also
    Gaussian fake heads as published (both)."""
    level: float = 0.95
    """Confidence of intervals and bounds."""
    target: Path | None = None
    """Head to attack in the evaluation: a run of sfumato train, or a .safetensors file with weight
    and bias."""
    vary: str | None = None
    """Repeat the attack for each value of one setting: class_size=1,2,4 or epochs=, init_std=,
    optimizer=, noise_multiplier=."""
    device: str = "auto"
    """Where to compute: cpu, cuda, or auto."""
    seed: int = 0
    """Seed of all random choices."""

    def __post_init__(self) -> None:
        self._check_noise()
        check_share(self, "base_share")
        if self.decoder == "rows" and (self.head.hidden or not self.conditional):
            raise ConfigError(
                "the decoder of rows reads a linear head and is asked for a class. Use --decoder "
                "published with --hidden or --no-conditional."
            )
        check_counts_above_0(self, "steps", "batch_heads", "stats_heads", "trials", "base_tries")
        if self.base_data is not None and (self.pretrained or self.weights is not None):
            raise ConfigError("the base has weights already: leave --base-data out.")
        if self.vary is not None:
            self.variations()

    def _check_noise(self) -> None:
        if self.bound is not None and self.head.noise_multiplier:
            raise ConfigError("--bound chooses the noise: leave --noise-multiplier out.")
        if self.bound is not None and self.head.max_norm is None:
            raise ConfigError("--bound needs clipped gradients: give --max-norm, such as 4.")
        if self.bound is not None and not 0.01 < self.bound < 1:
            raise ConfigError(f"bound={self.bound:g} must lie between 0.01, the FPR, and 1.")

    def variations(self) -> dict[str, HeadRecipe]:
        """The recipe for each value of what is varied, by the value."""
        name, values = self.varied
        kinds = {"class_size": int, "epochs": int, "init_std": float, "noise_multiplier": float}
        if self.stage != "all" or self.target is not None:
            raise ConfigError("a study is whole: leave stages and --target out of it.")
        if name == "noise_multiplier" and self.bound is not None:
            raise ConfigError("--vary noise_multiplier and --bound both choose the noise.")
        if name == "class_size" and self.images is not None:
            raise ConfigError("--vary class_size and --images both choose the size of a head.")
        found = {}
        for value in values:
            try:
                read = kinds.get(name, str)(value)
            except ValueError as problem:
                raise ConfigError(f'--vary {name}: "{value}" is not a number.') from problem
            found[value] = replace(self.head, **{name: read})
        return found

    @property
    def varied(self) -> tuple[str, list[str]]:
        """What is varied, and its values."""
        name, equals, values = (self.vary or "").partition("=")
        if name not in VARIED or not equals or not values:
            raise ConfigError(
                f'--vary "{self.vary}" must be one of {", ".join(VARIED)} with values, such as '
                "class_size=1,2,4."
            )
        return name, values.split(",")


VARIED = ("class_size", "epochs", "init_std", "optimizer", "noise_multiplier")


def digits_cpu() -> Reconstruct:
    """Heads of 10 digits each: AUC 0.94, TPR 0.25 at 1 % FPR; half a minute on 2 cores."""
    return Reconstruct(
        head=HeadRecipe(lr=0.1),
        feature_norm=10.0,
        steps=300,
        batch_heads=32,
        width=16,
        ema=0.99,
        decoder_lr=2e-3,
        stats_heads=4096,
        trials=1000,
    )


def digits_private() -> Reconstruct:
    """The same heads without and with noise that leaves any attack a TPR of 0.1 at 1 % FPR."""
    base = digits_cpu()
    head = replace(base.head, rate=0.5, max_norm=4.0)
    return replace(base, head=head, vary="noise_multiplier=0,7.65")


def mnist() -> Reconstruct:
    """MNIST, heads of 10 images: AUC 0.993, TPR 0.83 at 1 % FPR; ten minutes on one CPU core.

    The base knows turned and mirrored digits, of images that no head is trained on.
    """
    return Reconstruct(
        data="mnist",
        image_size=32,
        base_share=0.5,
        base_epochs=3,
        gate=0.5,
        base_tries=3,
        head=HeadRecipe(lr=0.1),
        feature_norm=10.0,
        width=24,
        steps=1500,
        decoder_lr=2e-3,
        ema=0.998,
        trials=5000,
    )


def cifar10() -> Reconstruct:
    """CIFAR-10, heads of 10 images: AUC 0.927, TPR 0.41 at 1 % FPR; 136 s of an H200.

    The base is EfficientNet-lite0: give --weights or --pretrained.
    """
    return Reconstruct(
        data="cifar10",
        base="tf_efficientnet_lite0",
        feature_size=224,
        head=HeadRecipe(
            lr=0.01, weight_decay=1e-4, init_std=2e-4, epochs_base=38, epochs_per_image=10
        ),
        stats_heads=51_200,
        width=128,
        steps=12_000,
        batch_heads=64,
        precision="bf16",
        trials=5_000,
    )


PRESETS: dict[str, Callable[[], Reconstruct]] = {
    "digits-cpu": digits_cpu,
    "digits-private": digits_private,
    "mnist": mnist,
    "cifar10": cifar10,
}

SETTINGS = Reconstruct
