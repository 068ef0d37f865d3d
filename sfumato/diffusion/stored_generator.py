"""A generator as a run leaves it: weights, and the few lines that say what they are weights of.

Whoever draws from a generator needs its network, image size and class names, and none of the
images it was trained on. `generator.json` beside the weights has all of that, and says whether a
ledger speaks for what is drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sfumato.config import read_finished
from sfumato.diffusion.denoise import Denoiser, Diffusers, require_fit
from sfumato.diffusion.discriminator_guidance import DiscriminatorGuide
from sfumato.diffusion.generator import new_denoiser
from sfumato.errors import ConfigError, RunError
from sfumato.files import read_json
from sfumato.models.noisy_discriminator import NoisyDiscriminator
from sfumato.models.zoo import own_function, read_state
from sfumato.runs import Run
from sfumato.settings.diffusion import Diffusion
from sfumato.training.setup import move_to_device
from sfumato.trusted_code import require_trust

NAME = "generator.json"


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a generator is built from."""

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    diffusion: Diffusion
    brought: str | None = None
    """Another network than ours: module:function."""
    told: bool = True
    """Whether ours can be told how an image was moved."""
    ledger: bool = False
    """Whether it was trained on private images, and its folder has the ledger that speaks of
    them."""

    def new_denoiser(self) -> Denoiser:
        """Untrained: our network, or the one that was brought. One that does not fit is refused."""
        classes = len(self.classes)
        if self.brought is None:
            made = new_denoiser(self.diffusion, self.shape, classes, told=self.told)
        else:
            module, _, function = self.brought.partition(":")
            if not function:
                raise ConfigError(f'--denoiser "{self.brought}": give it as module:function.')
            made = Denoiser(Diffusers(own_function(module, function, classes)))
        require_fit(made, self.shape, classes)
        return made

    def new_discriminator(self) -> NoisyDiscriminator:
        """The guide's network, untrained."""
        return NoisyDiscriminator(
            channels=self.shape[0],
            size=self.shape[1],
            classes=len(self.classes),
            width=self.diffusion.gen_width,
        )

    def keep(self, stage: Run) -> None:
        """Write it into the folder of the weights; a ledger that is there is spoken of."""
        there = (stage.path / "ledger.jsonl").exists()
        stage.write_json(NAME, replace(self, ledger=there))


@dataclass(frozen=True)
class StoredGenerator:
    """A trained generator, and its guide's weights if one was trained."""

    blueprint: Blueprint
    weights: Mapping[str, Tensor]
    guide_weights: Mapping[str, Tensor] | None

    def denoiser(self, device: torch.device) -> Denoiser:
        """The generator on a device, to be asked and not trained."""
        made = self.blueprint.new_denoiser()
        made.load_state_dict(self.weights)
        return move_to_device(made, device).eval().requires_grad_(False)

    def guide(self, device: torch.device, precision: torch.dtype) -> DiscriminatorGuide:
        """What bends samples towards the images that it was trained on."""
        if self.guide_weights is None:
            raise RunError("this generator has no guide: one is trained by --guide-weight 1.")
        made = self.blueprint.new_discriminator()
        made.load_state_dict(self.guide_weights)
        return DiscriminatorGuide(made.to(device).eval(), precision=precision)


def read_stored(
    folder: Path, guide_folder: Path | None = None, *, known: str | None = None
) -> StoredGenerator:
    """The generator in a folder, with the guide of another, or why there is none.

    `known` is the network's code if the user has named it; other code needs trust (`trust`).
    """
    if not (folder / NAME).exists():
        raise RunError(
            f"{folder / NAME} is not there, so nobody knows what the weights beside it are of. "
            "Train the generator again, with another --out."
        )
    blueprint = read_finished(Blueprint, read_json(folder / NAME))
    if blueprint.brought not in (None, known):
        require_trust(blueprint.brought, folder / NAME)
    weights = read_state(folder / "model.safetensors")
    bend = None if guide_folder is None else guide_folder / "model.safetensors"
    found = None if bend is None or not bend.exists() else read_state(bend)
    return StoredGenerator(blueprint, weights, found)
