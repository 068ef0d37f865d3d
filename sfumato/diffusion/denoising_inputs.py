"""Private images on their way into a denoiser: the reading of a private generator.

Each image of a batch is seen under several draws of noise, and its loss is their mean: one draw
says little about an image, and to clip the mean of K costs no more privacy than to clip one
(Dockhorn et al. 2023, "DPDM"). Everything else is what `Inputs` does for a classifier, so the
private step, the test on noise, people and their ledger are the same.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.denoise import LOG_SIGMA, denoising_losses, draw_sigma
from sfumato.privacy.sampling import Chunk
from sfumato.training.inputs import Inputs

NOISE = 1
"""The stream of dice that noise comes from; augmentations have the first."""


@dataclass(frozen=True)
class NoisingInputs(Inputs):
    """Images between -1 and 1 (mean and deviation of 0.5), with noise for each of their rows.

    `views` is the number of draws of noise for each image.
    """

    def tensors(self, chunk: Chunk, step: int) -> tuple[Tensor, ...]:
        """Rows of images, their noise and its deviation, and the labels of the images.

        Guarantee: what is drawn for a unit depends on the seed, the step and the unit.
        """
        images, labels = super().tensors(chunk, step)
        drawn = self.rng(self.places(chunk, step), step, NOISE).normal(1 + images[0].numel())
        mean, deviation = LOG_SIGMA
        sigma = (mean + deviation * drawn[0]).exp()
        return images, drawn[1:].t().reshape(images.shape), sigma, labels

    def _losses(self, model: Any, *inputs: Tensor) -> Tensor:
        """How badly the noise is taken away, for each unit the mean over its rows."""
        images, noise, sigma, labels = inputs
        lower = self.precision != torch.float32
        with torch.autocast(self.device.type, self.precision) if lower else nullcontext():
            each = denoising_losses(
                model, images, labels.repeat_interleave(self.views), sigma=sigma, noise=noise
            )
        return each.unflatten(0, (-1, self.rows)).mean(dim=1)

    def trial(self, units: int = 3) -> tuple[Tensor, ...]:
        """Noise for images, and noise for noise."""
        images, labels = super().trial(units)
        rng = torch.Generator().manual_seed(1)
        noise = torch.randn(images.shape, generator=rng).to(images)
        return images, noise, draw_sigma(len(images), rng).to(self.device), labels
