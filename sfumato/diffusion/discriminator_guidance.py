"""Discriminator guidance: a second network says where made images are unlike real ones.

d(x, sigma) learns to tell real images from made ones, both under noise of sigma. At its best
log(d / (1 - d)) is the log ratio of their densities there, and its gradient is what the denoiser's
score lacks (Kim et al. 2023). It learns from public images and from made ones, nothing else: no
network that was trained elsewhere brings in further data.

The paper goes through the variables of another process, since its classifier came from one. There
an image is only scaled by a number that sigma determines, and the ratio is that of the same two
images; so the discriminator lives in x and sigma, as the denoiser does.
"""

from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.data.example_rng import seed_of
from sfumato.data.images import Images
from sfumato.diffusion.denoise import draw_sigma
from sfumato.diffusion.sampler import from_pixels
from sfumato.errors import ConfigError, DataError
from sfumato.models.observe import in_evaluation_mode
from sfumato.privacy.sampling import Batch
from sfumato.training.hooks import Step

CLIP = 1e-5
"""d stays in [1e-5, 1 - 1e-5]: where it is surer it has left what it knows, and is not followed."""


@dataclass(frozen=True)
class DiscriminatorGuide:
    """A discriminator as the guide of `draw_images`: silent but for sigmas it has learned well.

    Below the lowest it would tell bytes from smooth numbers, above the highest there is nothing to
    tell: 1 in 100 of the sigmas it was trained on was larger.
    """

    discriminator: nn.Module
    lowest: float = 0.045
    highest: float = 5.0
    precision: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.highest:
            raise ConfigError(
                f"a guide from sigma {self.lowest:g} to {self.highest:g} never speaks: the first "
                "must be above 0 and below the second."
            )

    def __call__(
        self, x: Float[Tensor, "n c h w"], sigma: float, labels: Int[Tensor, " n"] | None
    ) -> Float[Tensor, "n c h w"] | None:
        """The gradient of the log density ratio, or None outside of its sigmas."""
        if not self.lowest <= sigma <= self.highest:
            return None
        with torch.autocast(x.device.type, self.precision, self.precision != torch.float32):
            return density_ratio_gradient(
                self.discriminator, x, x.new_full((len(x),), sigma), labels
            )


def density_ratio_gradient(
    discriminator: nn.Module,
    x: Float[Tensor, "n c h w"],
    sigma: Float[Tensor, " n"],
    labels: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "n c h w"]:
    """The gradient, by each image, of log(d / (1 - d)) with d clipped; zero where it is clipped.

    The discriminator is in evaluation mode meanwhile, and nothing is left on its parameters. Works
    inside `no_grad`.
    """
    limit = log((1 - CLIP) / CLIP)
    with in_evaluation_mode(discriminator), torch.enable_grad():
        x = x.detach().requires_grad_(True)
        # log(d / (1 - d)) is the logit itself: a sigmoid on the way would only round it.
        ratios = discriminator(x, sigma, labels).float().clamp(-limit, limit)
        return torch.autograd.grad(ratios.sum(), x)[0]


def discriminator_step(
    discriminator: nn.Module,
    real: Images,
    made: Images,
    device: torch.device,
    *,
    seed: int = 0,
    precision: torch.dtype = torch.float32,
) -> Step:
    """A step for `train_plainly` that leaves the gradient of the loss of telling real from made.

    A batch is of made images; as many real ones are drawn beside it, so that 2 000 of the one and
    50 000 of the other still make d = 1/2 where there is nothing to tell. Everything drawn is a
    function of the seed and the step. Private real images are a `PrivacyError`.
    """
    real = real.require_public("training a discriminator").to(device)
    made = made.to(device)
    if real.shape != made.shape or real.classes != made.classes:
        raise DataError(
            f'"{real.name}" has images of {real.shape} in {len(real.classes)} classes and '
            f'"{made.name}" of {made.shape} in {len(made.classes)}: a discriminator compares '
            "images of one size and the same classes."
        )
    generator = torch.Generator(device)
    real_labels, made_labels = real.labels.to(device), made.labels.to(device)

    def step(batch: Batch) -> dict[str, float]:
        generator.manual_seed(seed_of(seed, batch.step))
        torch.manual_seed(seed_of(seed, batch.step))  # for dropout
        (chunk,) = batch.chunks
        places = chunk.indices.to(device)
        beside = torch.randint(len(real), places.shape, generator=generator, device=device)
        both = from_pixels(
            torch.cat(
                [
                    real.pixels[beside.to(real.pixels.device)].to(device),
                    made.pixels[places.to(made.pixels.device)].to(device),
                ]
            )
        )
        labels = torch.cat([real_labels[beside], made_labels[places]])
        discriminator.zero_grad(set_to_none=True)
        with torch.autocast(device.type, precision, precision != torch.float32):
            loss = telling_loss(discriminator, both, labels, len(places), generator)
        loss.backward()
        return {"loss": float(loss.detach()), "clipped": 0.0, "batch": float(len(both))}

    return step


def telling_loss(
    discriminator: nn.Module,
    images: Float[Tensor, "n c h w"],
    labels: Int[Tensor, " n"],
    real: int,
    generator: torch.Generator,
) -> Float[Tensor, ""]:
    """Binary cross-entropy with noise on all images, of which the first `real` are real."""
    n, device = len(images), images.device
    sigma = draw_sigma(n, generator, device)
    noise = torch.randn(images.shape, generator=generator, device=device)
    logits = discriminator(images + sigma[:, None, None, None] * noise, sigma, labels).float()
    wanted = (torch.arange(n, device=device) < real).float()
    return F.binary_cross_entropy_with_logits(logits, wanted)
