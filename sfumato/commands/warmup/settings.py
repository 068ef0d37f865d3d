"""What `sfumato warmup` can be asked for, and presets with the score that each reached."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato.commands.image_source import ImageSource
from sfumato.commands.train import settings as train_settings
from sfumato.commands.warmup.checks import check_nothing_drawn, check_private, check_samples
from sfumato.config import Withdrawn
from sfumato.diffusion.diffusion import Diffusion
from sfumato.errors import ConfigError, PrivacyError

STAGES = ("split", "generator", "guide", "sample", "warmup", "train", "evaluate")
PRIVATE_STAGES = ("generator", "sample", "warmup", "evaluate")
OF_DRAWING = ("generator", "guide", "sample")
"""Stages that are not there where nothing is drawn."""
OF_A_GENERATOR = ("generator", "guide")
"""Nor these, where samples are brought."""


@dataclass(frozen=True, kw_only=True)
class Config(train_settings.Config):
    """A little public data, a diffusion model of it, a warm start, and then DP training.

    All settings of `sfumato train` are here too: they are those of the last stage. Epsilon is its
    promise, for the images that are not public.
    """

    MAY_CHANGE: ClassVar = (
        *train_settings.Config.MAY_CHANGE, "stage", "controls", "extractor", "extractor_weights",
    )  # fmt: skip
    """Settings that say how, not what: a run may go on with others."""
    WITHDRAWN: ClassVar = {
        "control_widths": Withdrawn("make a run for each --gen-width and compare their scores"),
    }
    READ_FIRST: ClassVar = {
        "split": (
            *(item.name for item in fields(ImageSource)), "people", "public_share",
            "public_images", "private", "seed",
        ),
        "generator": ("diffusion", "denoiser"),
        "guide": ("guide_weight", "guide_epochs"),
        "sample": ("number", "samples", "vary", "solver", "sample_steps"),
        "warmup": (
            "model", "pretrained", "weights", "norm", "crop", "flip", "warm_epochs", "warm_batch",
            "warm_lr", "warm_rho", "warm_cutout", "warm_colour", "warm_affine", "warm_repeats",
        ),
        "train": (),
    }  # fmt: skip
    """Stages, and the settings that each is the first to read; those of training besides."""
    PASSING: ClassVar = {"stage": "all"}
    """Settings of one command, which a run does not remember."""

    stage: Literal[
        "all", "split", "generator", "guide", "sample", "warmup", "train", "evaluate"
    ] = "all"
    """Stop after this stage (also as the first word: sfumato warmup generator ...)."""
    model: str = "wrn-16-4"
    """The classifier: wrn-16-4, any timm name, torchvision:NAME, or module:function."""
    public_share: float | None = None
    """The share of every class that is declared public, 0.04 as published: a decision about
    people, for nothing is promised about them. So it has no default."""
    public_images: str | None = None
    """Instead: public images of your own, of the same classes; a name, file or folder as for data.
    All of the data is private then."""
    private: bool = False
    """The generator learns all images, privately; none is public. Settings of training are its own,
    and --augmult says how many draws of noise each image is seen under."""
    diffusion: Diffusion = field(default_factory=Diffusion)
    """The generator, which learns the public share alone. (With --private its network is meant:
    it is trained by the settings of training.)"""
    denoiser: str | None = None
    """Another network: module:function, called with the classes, makes a diffusers UNet2DModel."""

    run: Path | None = None
    """With sample: draw from the generator of this run, into the file that --out names."""
    number: int = 50_000
    """Images to draw; 0 for no generator: the warm-up has the public images alone."""
    samples: Path | None = None
    """Labelled images made elsewhere, instead of drawn ones: an .npz file; all of it is taken."""
    vary: float = 0.0
    """Draw from public images under noise of this deviation (1 is as strong as an image): helps
    where a generator is too weak to draw from noise alone; 0 for noise alone."""
    solver: Literal["heun", "dpm"] = "heun"
    """How: Heun's method, or DPM-Solver++ (2M)."""
    sample_steps: int = 18
    """Steps of it."""
    guide_weight: float = 0.0
    """Weight of a discriminator that tells samples from public images; 0 for none."""
    guide_epochs: float = 30.0
    """Epochs of its training, over the public images."""

    warm_epochs: float = 40.0
    """Epochs of the warm-up, over drawn and public images (of few public ones alone, hundreds)."""
    warm_batch: int = 512
    """Images in a step of it."""
    warm_lr: float = 0.1
    """Its learning rate at its height."""
    warm_rho: float = 0.1
    """How far its steps look for a sharp rise (SAM); 0 for plain steps."""
    warm_cutout: int = 16
    """Side of a square that is covered, half of the time."""
    warm_colour: float = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    warm_affine: float = 0.0
    """Largest turn in units of 90 degrees, shift in sides and scaling."""
    warm_repeats: int = 1
    """How often an epoch shows each public image: of weakly drawn images many are worth few."""
    controls: bool = False
    """Score also: the same recipe on public images alone (as many steps), and DP from scratch."""
    extractor: str = "scattering"
    """Features to compare images in: fixed wavelets, or those of a pretrained model, by name."""
    extractor_weights: Path | None = None
    """A file of weights for it."""

    @property
    def _own_training(self) -> dict[str, Any]:
        """Here an extender looks at the drawn images, and without a promise nothing is private."""
        found = {} if self.extender == "none" else {"extender_images": "drawn"}
        return found if self.promises else {**found, "mode": "non-private"}

    @property
    def promises(self) -> bool:
        """Whether a private stage may be reached: whoever wants a generator needs no epsilon."""
        late = self.stage in ("all", "train", "evaluate")
        return self.private or late or self.epsilon is not None

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that are taken: after a private generator there is nothing left to learn from."""
        if self.private:
            return PRIVATE_STAGES
        absent = () if self.number else OF_DRAWING
        if self.samples is not None:
            absent = OF_A_GENERATOR
        return tuple(name for name in STAGES if name not in absent)

    @property
    def reached(self) -> tuple[str, ...]:
        """Those up to the one that was asked for."""
        last = self.stages[-1] if self.stage == "all" else self.stage
        return self.stages[: self.stages.index(last) + 1]

    @property
    def read_first(self) -> dict[str, tuple[str, ...]]:
        """Stages, and the settings that each is the first to read: until then these may change."""
        listed = {name for names in self.READ_FIRST.values() for name in names}
        rest = [item.name for item in fields(train_settings.Config) if item.name not in listed]
        train_state = "generator" if self.private else "train"
        return {**self.READ_FIRST, train_state: (*self.READ_FIRST[train_state], *rest)}

    def _check_promise(self) -> None:
        if self.promises:
            super()._check_promise()

    def __post_init__(self) -> None:
        if self.run is not None and self.stage != "sample":
            raise ConfigError(
                "--run draws from a generator that is there: sfumato warmup sample --run RUN "
                "--out FILE.npz. Other stages go on by --out RUN."
            )
        super().__post_init__()
        self._refuse_canaries()
        if self.private:
            check_private(self)
        self._check_decision()
        self._check_numbers()

    def _check_extender_images(self) -> None:
        if self.extender_images is not None:
            raise ConfigError(
                "an extender looks at the drawn images here: leave --extender-images out."
            )

    def _check_decision(self) -> None:
        """Nobody becomes public by a default."""
        ways = {
            "--public-share": self.public_share is not None, "--private": self.private,
            "--public-images": self.public_images is not None,
        }  # fmt: skip
        given = [flag for flag, found in ways.items() if found]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are two answers to one question, which images are public: "
                "leave one of them out (after a preset: --public-share None)."
            )
        if not (given or self.explain or self.run is not None):
            raise PrivacyError(
                "which images are public? That is a decision about people, and nothing is promised "
                "about those on them. Give --public-share SHARE (0.04: that much of every class), "
                "--public-images SOURCE (your own; all others are private), or --private if no "
                "image is public."
            )
        if self.public_share is not None and not 0 < self.public_share < 1:
            raise ConfigError(f"public_share={self.public_share:g} must lie between 0 and 1.")

    def _check_numbers(self) -> None:
        if self.vary and not 0.01 <= self.vary <= 80:
            raise ConfigError(f"vary={self.vary:g} must be 0, or between 0.01 and 80.")
        least = {"number": 0, "sample_steps": 2, "warm_batch": 1, "warm_repeats": 1}
        for name in least:
            if getattr(self, name) < least[name]:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least[name]}.")
        for name in ("warm_epochs", "warm_lr", "guide_epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name):g} must be above 0 and finite.")
        most = {"warm_rho": math.inf, "guide_weight": math.inf, "warm_colour": 1, "warm_affine": 1}
        for name in most:
            if not 0 <= getattr(self, name) <= most[name] or math.isinf(getattr(self, name)):
                words = "between 0 and 1" if most[name] == 1 else "0 or more, finite"
                raise ConfigError(f"{name}={getattr(self, name):g} must be {words}.")
        if self.samples is not None:
            check_samples(self)
        if not self.number:
            check_nothing_drawn(self)


def digits_cpu() -> Config:
    """A miniature on digits of 8 pixels: 0.86 after the warm-up, 0.90 at epsilon 3; 2 minutes."""
    return Config(
        image_size=8, model="group-cnn-small", public_share=0.1, epsilon=3.0, batch_size=500,
        epochs=20, lr=0.5, physical_batch_size=500, number=4000, solver="dpm", sample_steps=10,
        warm_epochs=6.67, warm_repeats=5, warm_batch=64, warm_lr=0.05, warm_rho=0.05, warm_cutout=0,
        diffusion=Diffusion(
            gen_width=8, gen_multipliers=(2,), gen_blocks=1, gen_dropout=0.05, gen_images=50_000,
            gen_batch=32, gen_lr=4e-3, gen_ramp=2000, gen_half_life=3000, gen_moves=0.05,
            gen_mirror=False, gen_looks=2, gen_patience=0,
        ),
    )  # fmt: skip


def digits_private() -> Config:
    """No image is public: a private generator of digits of 8 pixels, epsilon 10: 0.82; a minute."""
    return Config(
        image_size=8, model="group-cnn-small", private=True, epsilon=10.0, delta=1e-5,
        denoiser="sfumato.models.shallow:grey_of_8_pixels", batch_size=1000, steps=400, augmult=16,
        optimizer="adam", lr=0.01, schedule="cosine", ema=0.98, max_grad_norm=0.3, number=4000,
        solver="dpm", sample_steps=12, warm_epochs=10.0, warm_batch=64, warm_lr=0.05, warm_rho=0.05,
        warm_cutout=0, diffusion=Diffusion(gen_looks=2),
    )  # fmt: skip


def cifar10_eps2() -> Config:
    """CIFAR-10 at epsilon 2, 2,000 public images (published: 80.76 -> 85.48).

    With a generator of 4 minutes and 8 views: 67.7 -> 73.4 (one seed, results/warmup.md).
    """
    return Config(
        data="cifar10", model="wrn-16-4", public_share=0.04, epsilon=2.0, delta=1e-5,
        batch_size=4000, epochs=30, lr=0.5, augmult=16, crop=4, flip=True, ema=0.99,
        physical_batch_size="auto", precision="bf16", compile=True,
    )  # fmt: skip


def cifar10_eps2_public() -> Config:
    """The same without a generator, in as many steps, its images changed more: 75.8 -> 82.4."""
    return replace(
        cifar10_eps2(), number=0, warm_epochs=1040.0, augmult=8, lr=1.0, warm_colour=0.5,
        warm_affine=0.2,
    )  # fmt: skip


def fashion_eps2() -> Config:
    """Fashion-MNIST at epsilon 2 with 2,400 public images: 86.2 after a short warm-up."""
    return Config(
        data="fashion_mnist", model="wrn-16-4", public_share=0.04, epsilon=2.0, delta=1e-5,
        batch_size=4000, epochs=20, lr=0.5, augmult=8, crop=3, flip=True, ema=0.99,
        physical_batch_size="auto", precision="bf16", compile=True, warm_cutout=8,
        diffusion=Diffusion(gen_multipliers=(1, 2, 2), gen_blocks=2),
    )  # fmt: skip


PRESETS: dict[str, Callable[[], Config]] = {
    "digits-cpu": digits_cpu,
    "digits-private": digits_private,
    "cifar10-eps2": cifar10_eps2,
    "cifar10-eps2-public": cifar10_eps2_public,
    "fashion-eps2": fashion_eps2,
}
