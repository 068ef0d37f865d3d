"""What `sfumato warmup` can be asked for, and presets with the score that each reached."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from sfumato.config import Withdrawn
from sfumato.errors import ConfigError, PrivacyError
from sfumato.setting_groups import Settings, Subcommand, defaults, flatten, leaves
from sfumato.settings.checks import (
    check_0_to_1,
    check_above_0,
    check_counts_above_0,
    check_not_negative,
    check_share,
)
from sfumato.settings.diffusion import Diffusion
from sfumato.settings.train import ONLY_TRAIN, Data, Train, Training, WithTraining

PRIVATE_STAGES = ("generator", "sample", "warmup", "evaluate")
OF_DRAWING = ("generator", "guide", "sample")
"""Stages that are not there where nothing is drawn."""
OF_A_GENERATOR = ("generator", "guide")
"""Nor these, where samples are brought."""
OF_THE_NETWORK = ("gen_looks", "gen_width", "gen_multipliers", "gen_blocks", "gen_dropout")
"""Settings of a generator that a private one has too: the others are about its training."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which images are public. It is a decision about people: nothing is guaranteed for those
    images."""

    public_share: float | None = None
    """Share of each class that is declared public (published: 0.04). Nothing is guaranteed for the
    people on those images, so there is no default."""
    public_images: str | None = None
    """Public images of the same classes from another source, in place of a share: a name, file or
    folder as for --data. All images of --data are private then."""
    private: bool = False
    """No image is public: the generator itself is trained privately on all images, by the settings
    of training; --augmult says how many noise levels each image is seen under per step."""

    def __post_init__(self) -> None:
        ways = {
            "--public-share": self.public_share is not None,
            "--private": self.private,
            "--public-images": self.public_images is not None,
        }
        given = [flag for flag, found in ways.items() if found]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are two answers to one question, which images are public: "
                "leave one of them out (after a preset: --public-share None)."
            )
        check_share(self, "public_share")

    def check_decision(self) -> None:
        """Nobody becomes public by a default."""
        if self == Split():
            raise PrivacyError(
                "which images are public? That is a decision about people, and nothing is "
                "guaranteed about those on them. Give --public-share SHARE (0.04: that much of "
                "every class), --public-images SOURCE (your own; all others are private), or "
                "--private if no image is public."
            )


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A discriminator that guides the generator."""

    guide_weight: float = 0.0
    """Weight of a discriminator that guides the generator towards the public images; 0 for none."""
    guide_epochs: float = 30.0
    """Epochs of the guiding discriminator's training, over the public images."""

    def __post_init__(self) -> None:
        check_above_0(self, "guide_epochs")
        check_not_negative(self, "guide_weight")


@dataclass(frozen=True, kw_only=True)
class Solver:
    """How a generator draws an image."""

    solver: Literal["heun", "dpm"] = "heun"
    """Solver that draws images: Heun's method, or DPM-Solver++ (2M)."""
    sample_steps: int = 18
    """Steps of the solver that draws an image."""

    def __post_init__(self) -> None:
        if self.sample_steps < 2:
            raise ConfigError(f"sample_steps={self.sample_steps} must be at least 2.")


@dataclass(frozen=True, kw_only=True)
class Sample(Solver):
    """How images are drawn."""

    number: int = 50_000
    """Images to draw from the generator; 0 for no generator: the warm-up has the public images
    alone."""
    samples: Path | None = None
    """Labelled images made elsewhere (an .npz file), all of which are used in place of drawn
    ones."""
    vary: float = 0.0
    """Draw images from public ones under noise of this standard deviation (1 is as strong as an
    image), where a generator is too weak to draw from noise alone; 0 for noise alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vary and not 0.01 <= self.vary <= 80:
            raise ConfigError(f"vary={self.vary:g} must be 0, or between 0.01 and 80.")
        check_not_negative(self, "number")


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Plain training of the classifier on drawn and public images."""

    warm_epochs: float = 40.0
    """Epochs of the warm-up, over drawn and public images; over few public images alone,
    hundreds."""
    warm_batch: int = 512
    """Images per step of the warm-up."""
    warm_lr: float = 0.1
    """Highest learning rate of the warm-up."""
    warm_rho: float = 0.1
    """How far each step of the warm-up looks uphill for flat minima (rho of SAM); 0 for ordinary
    steps."""
    warm_cutout: int = 16
    """Side in pixels of a square that is covered in every second image of the warm-up."""
    warm_colour: float = 0.0
    """Largest relative change of brightness, contrast and saturation in the warm-up."""
    warm_affine: float = 0.0
    """Largest turn (in units of 90 degrees), shift (in sides) and scaling in the warm-up."""
    warm_repeats: int = 1
    """How often an epoch of the warm-up shows each public image beside the drawn ones."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "warm_batch", "warm_repeats")
        check_above_0(self, "warm_epochs", "warm_lr")
        check_not_negative(self, "warm_rho")
        check_0_to_1(self, "warm_colour", "warm_affine")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured at the end; a finished run may be evaluated again with other settings."""

    controls: bool = False
    """Train and score controls too: the same recipe on public images alone, and DP training from
    scratch."""
    extractor: str = "scattering"
    """Network whose features images are compared in: scattering (fixed wavelets), or a pretrained
    model by name."""
    extractor_weights: Path | None = None
    """File of weights for the --extractor."""


@dataclass(frozen=True, kw_only=True, init=False)
class Warmup(WithTraining):
    """A little public data, a diffusion model of it, a warm start, and then DP training.

    Settings of training are those of the last stage. Epsilon is its guarantee, for the images that
    are not public.
    """

    MAY_CHANGE: ClassVar = (*WithTraining.MAY_CHANGE, *leaves(Evaluation))
    WITHDRAWN: ClassVar = {
        **ONLY_TRAIN,
        "run": Withdrawn("sfumato warmup draw RUN --out FILE.npz draws from a run", None),
        "control_widths": Withdrawn("make a run for each --gen-width and compare their scores"),
    }
    READ_FIRST: ClassVar = {
        "split": (*leaves(Data), "people", *leaves(Split), "seed"),
        "generator": (*leaves(Diffusion), "denoiser"),
        "guide": tuple(leaves(Guide)),
        "sample": tuple(leaves(Sample)),
        "warmup": (
            "model",
            "pretrained",
            "weights",
            "norm",
            "crop",
            "flip",
            *leaves(WarmUp),
        ),
        "train": (),
    }
    """Stages, and the settings that each is the first to read; those of training besides."""

    stage: Literal[
        "all", "split", "generator", "guide", "sample", "warmup", "train", "evaluate"
    ] = "all"
    """Stage to stop after (also as the first word: sfumato warmup generator ...)."""
    denoiser: str | None = None
    """Network of your own for the generator: module:function, called with the classes, that makes a
    diffusers UNet2DModel."""
    split: Split = Split()
    diffusion: Diffusion = Diffusion()
    """The generator, which is trained on the public share alone. (With --private its network is
    meant: it is trained by the settings of training.)"""
    guide: Guide = Guide()
    sample: Sample = Sample()
    warm: WarmUp = WarmUp()
    train: Training = Training(model="wrn-16-4")
    evaluation: Evaluation = Evaluation()

    @property
    def training(self) -> Train:
        """Here an extender takes the drawn images; without a guarantee nothing is private."""
        own = {} if self.train.extension.extender == "none" else {"extender_images": "drawn"}
        return replace(
            self.train, **own if self.guarantees else {**own, "mode": "non-private"}
        ).alone

    @property
    def guarantees(self) -> bool:
        """Whether a private stage may be reached: a generator alone needs no epsilon."""
        late = self.stage in ("all", "train", "evaluate")
        return self.split.private or late or self.train.privacy.epsilon is not None

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that are taken: after a private generator there is nothing left to learn from."""
        if self.split.private:
            return PRIVATE_STAGES
        absent = () if self.sample.number else OF_DRAWING
        if self.sample.samples is not None:
            absent = OF_A_GENERATOR
        return tuple(name for name in self.stage_names() if name not in absent)

    @property
    def read_first(self) -> dict[str, tuple[str, ...]]:
        """Stages, and the settings that each is the first to read: until then these may change."""
        listed = {name for names in self.READ_FIRST.values() for name in names}
        rest = [name for name in leaves(Training) if name not in listed]
        train_state = "generator" if self.split.private else "train"
        return {**self.READ_FIRST, train_state: (*self.READ_FIRST[train_state], *rest)}

    def __post_init__(self) -> None:
        self.split.check_decision()
        if self.guarantees:
            self.train.privacy.check_guarantee()
        self.train.check_extender()
        if self.train.extension.extender_images is not None:
            raise ConfigError(
                "an extender looks at the drawn images here: leave --extender-images out."
            )
        if self.split.private and self.train.privacy.mode == "non-private":
            raise ConfigError(
                "--private keeps a guarantee, and --mode non-private none: leave one."
            )
        if self.stage not in ("all", *self.stages):
            raise ConfigError(
                f"there is no stage {self.stage} here. There are: {', '.join(self.stages)}."
            )
        self._check_meaning()

    def _check_meaning(self) -> None:
        """Refuse settings that have no meaning beside others; a preset may have set them."""
        trained = {*leaves(Diffusion)} - {*OF_THE_NETWORK}
        # A network that is not told how images were changed would draw them changed.
        trained |= {"train_only", "freeze", "crop", "flip", "extender"}
        trained |= {"guide_weight", "vary", "warm_repeats", "controls"}
        drawing = {"private", "guide_weight", "denoiser", "vary"}
        rules = (
            (self.split.private, trained, "beside --private: training settings make its generator"),
            (self.sample.samples is not None, drawing, "beside --samples, which are there already"),
            (
                not self.sample.number,
                {*drawing, "samples", "extender", "warm_repeats"},
                "with --number 0, which draws no image",
            ),
        )
        given, usual = flatten(self), defaults(Warmup)
        for applies, names, why in rules:
            flags = [
                f"--{name.replace('_', '-')}"
                for name in given
                if name in names and given[name] != usual[name]
            ]
            if applies and flags:
                raise ConfigError(
                    f"{', '.join(flags)}: without meaning {why}. Leave it out, and a --preset that "
                    "sets it (or give --crop 0, --no-flip, --warm-repeats 1)."
                )


@dataclass(frozen=True, kw_only=True, init=False)
class Draw(Settings):
    """Draw images from the generator of a run of sfumato warmup, into the file that --out names."""

    WORD: ClassVar = "run"

    run: Path | None = None
    """Run of sfumato warmup to draw from (also: sfumato warmup draw RUN)."""
    number: int = 50_000
    """Images to draw; a tenth as many more are drawn to test on."""
    sampling: Solver = Solver()
    guide_weight: float = 0.0
    """Weight of the run's discriminator that guides the generator; 0 for none."""
    seed: int = 0
    """Seed of the drawn images."""
    compile: bool = False
    """Compile the generator: takes a minute once, then drawing is faster."""
    device: str = "auto"
    """Where to compute: cpu, cuda, or auto."""

    def __post_init__(self) -> None:
        check_counts_above_0(self, "number")
        check_not_negative(self, "guide_weight")
        if self.run is None:
            raise ConfigError("draw from what? Give sfumato warmup draw RUN --out FILE.npz.")


SUBCOMMANDS = {"draw": Subcommand(kind=Draw, former=("--run", "sample"))}


def digits_cpu() -> Warmup:
    """A miniature on digits of 8 pixels: 0.86 after the warm-up, 0.90 at epsilon 3; 2 minutes."""
    return Warmup(
        image_size=8,
        model="group-cnn-small",
        public_share=0.1,
        epsilon=3.0,
        batch_size=500,
        epochs=20,
        lr=0.5,
        physical_batch_size=500,
        number=4000,
        solver="dpm",
        sample_steps=10,
        warm_epochs=6.67,
        warm_repeats=5,
        warm_batch=64,
        warm_lr=0.05,
        warm_rho=0.05,
        warm_cutout=0,
        diffusion=Diffusion(
            gen_width=8,
            gen_multipliers=(2,),
            gen_blocks=1,
            gen_dropout=0.05,
            gen_images=50_000,
            gen_batch=32,
            gen_lr=4e-3,
            gen_ramp=2000,
            gen_half_life=3000,
            gen_moves=0.05,
            gen_mirror=False,
            gen_looks=2,
            gen_patience=0,
        ),
    )


def digits_private() -> Warmup:
    """No image is public: a private generator of digits of 8 pixels, epsilon 10: 0.82; a minute."""
    return Warmup(
        image_size=8,
        model="group-cnn-small",
        private=True,
        epsilon=10.0,
        delta=1e-5,
        denoiser="sfumato.models.shallow:grey_of_8_pixels",
        batch_size=1000,
        steps=400,
        augmult=16,
        optimizer="adam",
        lr=0.01,
        schedule="cosine",
        ema=0.98,
        max_grad_norm=0.3,
        number=4000,
        solver="dpm",
        sample_steps=12,
        warm_epochs=10.0,
        warm_batch=64,
        warm_lr=0.05,
        warm_rho=0.05,
        warm_cutout=0,
        diffusion=Diffusion(gen_looks=2),
    )


def cifar10_eps2() -> Warmup:
    """CIFAR-10 at epsilon 2, 2,000 public images (published: 80.76 -> 85.48).

    With a generator of 4 minutes and 8 views: 67.7 -> 73.4 (one seed, results/warmup.md).
    """
    return Warmup(
        data="cifar10",
        model="wrn-16-4",
        public_share=0.04,
        epsilon=2.0,
        delta=1e-5,
        batch_size=4000,
        epochs=30,
        lr=0.5,
        augmult=16,
        crop=4,
        flip=True,
        ema=0.99,
        physical_batch_size="auto",
        precision="bf16",
        compile=True,
    )


def cifar10_eps2_public() -> Warmup:
    """The same without a generator, in as many steps, its images changed more: 75.8 -> 82.4."""
    return replace(
        cifar10_eps2(),
        number=0,
        warm_epochs=1040.0,
        augmult=8,
        lr=1.0,
        warm_colour=0.5,
        warm_affine=0.2,
    )


def fashion_eps2() -> Warmup:
    """Fashion-MNIST at epsilon 2, 2,400 public images: 86.8 -> 88.6.

    With a generator of 0.6 million images, lr 1 and 4 views (one seed, results/warmup.md).
    """
    return Warmup(
        data="fashion_mnist",
        model="wrn-16-4",
        public_share=0.04,
        epsilon=2.0,
        delta=1e-5,
        batch_size=4000,
        epochs=20,
        lr=0.5,
        augmult=8,
        crop=3,
        flip=True,
        ema=0.99,
        physical_batch_size="auto",
        precision="bf16",
        compile=True,
        warm_cutout=8,
        diffusion=Diffusion(gen_multipliers=(1, 2, 2), gen_blocks=2),
    )


PRESETS: dict[str, Callable[[], Warmup]] = {
    "digits-cpu": digits_cpu,
    "digits-private": digits_private,
    "cifar10-eps2": cifar10_eps2,
    "cifar10-eps2-public": cifar10_eps2_public,
    "fashion-eps2": fashion_eps2,
}

SETTINGS = Warmup
