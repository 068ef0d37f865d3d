"""The images that a generator learns, and those that are held out to see how far it is.

Held-out images are denoised better and better while a model learns what images have in common, and
worse once it learns the others by heart. No private image and no test image is asked.

By heart it can learn without that being seen in held-out images: few images may resemble them well
enough. So copies count for more than the loss: whatever copies is worse than whatever does not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int, UInt8
from torch import Tensor, nn

from sfumato.data.images import Images
from sfumato.diffusion.copies import ENOUGH, MARGIN, find_copies
from sfumato.diffusion.denoise import Denoiser, denoising_losses, draw_sigma
from sfumato.diffusion.sampler import draw_images
from sfumato.errors import DataError

SHOWN = 8
"""Samples of each class in a picture."""


@dataclass(frozen=True)
class GeneratorData:
    """Public images on the device: those to learn from, and those held out.

    Nothing that looks at an data adds noise: private images are a `PrivacyError`.
    """

    trained_on: Images
    unseen: Images
    device: torch.device

    def __post_init__(self) -> None:
        for images in (self.trained_on, self.unseen):
            images.require_public("training a generator")
            if not len(images):
                raise DataError(f'"{images.name}" is empty: an data has images of both kinds.')
        if (self.trained_on.shape, self.trained_on.classes) != (
            self.unseen.shape,
            self.unseen.classes,
        ):
            raise DataError(
                f'"{self.trained_on.name}" and "{self.unseen.name}" differ in size or classes: '
                "images that are held out must be like those that are trained on."
            )

    @cached_property
    def pixels(self) -> UInt8[Tensor, "n c h w"]:
        """What is trained on."""
        return self.trained_on.pixels.to(self.device)

    @cached_property
    def labels(self) -> Int[Tensor, " n"]:
        """Its labels."""
        return self.trained_on.labels.to(self.device)

    @cached_property
    def held_out(self) -> UInt8[Tensor, "m c h w"]:
        """What is not."""
        return self.unseen.pixels.to(self.device)

    @cached_property
    def held_out_labels(self) -> Int[Tensor, " m"]:
        """Its labels."""
        return self.unseen.labels.to(self.device)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.trained_on.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.trained_on.shape

    @cached_property
    def held_out_copies(self) -> float:
        """The share of copies among images that were not trained on: those are so by chance."""
        return find_copies(self.held_out.cpu(), self.pixels.cpu()).share


def copies_too_much(found: Mapping[str, float]) -> bool:
    """Whether a look found more copies than held-out images and chance explain."""
    return found["copies"] > found["held_out_copies"] + MARGIN


def score_of(found: Mapping[str, float]) -> tuple[bool, float]:
    """What a look is worth, more being better: by the loss, or where it copies by how rarely.

    Any look without too many copies is worth more than any with them.
    """
    if copies_too_much(found):
        return False, -found["copies"]
    return True, -found["held_out_loss"]


@torch.no_grad()
def evaluate_denoiser(
    denoiser: nn.Module, data: GeneratorData, precision: torch.dtype
) -> tuple[dict[str, float], UInt8[Tensor, "k c h w"]]:
    """How well held-out images are denoised, how many samples are copies, and some samples.

    Copies are counted among `ENOUGH` samples or more, as many of each class; `SHOWN` of each class
    come back.
    """
    denoiser = denoiser.eval()
    assert isinstance(denoiser, Denoiser)
    each = max(SHOWN, math.ceil(ENOUGH / data.classes))
    labels = torch.arange(data.classes).repeat_interleave(each)
    samples = draw_images(
        denoiser,
        labels,
        torch.arange(len(labels)),
        data.shape,
        solver="dpm",
        steps=12,
        precision=precision,
    )
    numbers = {
        "held_out_loss": held_out_loss(denoiser, data, precision),
        "copies": find_copies(samples, data.pixels.cpu()).share,
        "held_out_copies": data.held_out_copies,
    }
    return numbers, samples.unflatten(0, (data.classes, each))[:, :SHOWN].flatten(0, 1)


def held_out_loss(denoiser: Denoiser, data: GeneratorData, precision: torch.dtype) -> float:
    """The mean loss of held-out images, under noise that is the same at every look."""
    device = data.pixels.device
    rng = torch.Generator(device).manual_seed(0)
    total = torch.zeros((), device=device)
    for pixels, labels in zip(
        data.held_out.split(256), data.held_out_labels.split(256), strict=True
    ):
        images = pixels.float() / 127.5 - 1
        sigma = draw_sigma(len(images), rng, device)
        noise = torch.randn(images.shape, generator=rng, device=device)
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            found = denoising_losses(denoiser, images, labels, sigma=sigma, noise=noise)
        total += found.sum()
    return float(total) / len(data.held_out)
