"""A network as a denoiser, and the loss it learns by (Karras et al. 2022, "EDM").

A noisy image is x = y + sigma * noise, with pixels between -1 and 1. Around a network F stands

    D(x; sigma) = c_skip x + c_out F(c_in x; c_noise),

where the four numbers are such that F gets input of variance 1, is asked for output of variance 1,
and its mistakes weigh least in D. Any network will do that takes (x, noise level, labels,
conditions) and gives back the shape of x: `UNet`, or one from diffusers in a `Diffusers`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.errors import ConfigError

Pixels = Float[Tensor, "n c h w"]
Each = Float[Tensor, " n"]
Labels = Int[Tensor, " n"]
Conditions = Float[Tensor, "n conditions"]

LOG_SIGMA = (-1.2, 1.2)
"""Mean and deviation of ln sigma in training: where there is something to learn."""
LEAST_SIGMA = 1e-12
"""Noise below this is told to the network as this much; a logarithm of zero would not be finite."""


class Denoiser(nn.Module):
    """The expected image behind a noisy one, as far as the network knows.

    Guarantee: without noise it is the identity, whatever the network; and what surrounds the
    network is computed in float32 (float64 for float64 images), whatever autocast says.

    `sigma_data` is the deviation of pixels. The network says by its `channels`, `size`, `classes`
    and `conditions` what it is for; what it does not say is not checked.
    """

    def __init__(self, network: nn.Module, sigma_data: float = 0.5) -> None:
        super().__init__()
        if not sigma_data > 0:
            raise ConfigError(f"sigma_data={sigma_data:g} must be above 0; 0.5 is usual.")
        self.network = network
        self.sigma_data = sigma_data

    def forward(
        self,
        x: Pixels,
        sigma: Each,
        labels: Labels | None = None,
        conditions: Conditions | None = None,
    ) -> Pixels:
        """Images without noise, from images with noise of deviation `sigma`, one number each."""
        self._check(tuple(x.shape[1:]), labels, conditions)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        skip, out, inside, level = preconditioning(sigma.to(x.dtype), self.sigma_data)
        found = self.network(_by_image(inside) * x, level, labels, conditions)
        return _by_image(skip) * x + _by_image(out) * found.to(x.dtype)

    def _check(
        self, shape: tuple[int, ...], labels: Labels | None, conditions: Conditions | None
    ) -> None:
        """By shapes alone: to look at numbers would wait for the GPU."""
        _check_shape(self.network, shape)
        classes = getattr(self.network, "classes", None)
        if labels is None and classes:
            raise ConfigError(
                f"this denoiser knows {classes} classes, and was given no labels: it cannot tell "
                "which class to draw. Give a label with each image."
            )
        if conditions is not None and getattr(self.network, "conditions", None) == 0:
            raise ConfigError(
                f"{type(self.network).__name__} takes no conditions, so it cannot be told how an "
                "image was augmented, and its own images would be augmented too. Turn the "
                "geometric augmentation off, or use a U-Net with conditions."
            )


class Diffusers(nn.Module):
    """A `UNet2DModel` of diffusers, or what is called like one, as the network of a `Denoiser`.

    It gets ln(sigma) / 4 as its time step, as the EDM schedulers of diffusers do it, so a network
    that was trained with them fits. It takes no conditions.
    """

    conditions = 0

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        config: Any = getattr(network, "config", None)
        if not hasattr(config, "in_channels"):
            raise ConfigError(
                f"{type(network).__name__} does not say in a config what images it is for, as a "
                "UNet2DModel of diffusers does (in_channels, out_channels, sample_size, "
                "num_class_embeds). Give one of those."
            )
        self.channels: int = config.in_channels
        if config.out_channels != config.in_channels:
            raise ConfigError(
                f"{type(network).__name__} makes {config.out_channels} channels of "
                f"{config.in_channels}: a denoiser gives back what it takes. Make one with "
                "out_channels=in_channels."
            )
        for name, fitting in (("time_embedding_type", "positional"), ("class_embed_type", None)):
            value = getattr(config, name, fitting)
            if value != fitting:
                raise ConfigError(
                    f'{type(network).__name__} has {name}="{value}", which cannot be told a noise '
                    f"level or a class as EDM has them. Make one with {name}={fitting!r}."
                )
        side = config.sample_size
        self.size: int | None = side if side is None or isinstance(side, int) else side[0]
        self.classes: int | None = config.num_class_embeds
        self.network = network

    def forward(
        self,
        x: Pixels,
        noise_level: Each,
        labels: Labels | None = None,
        conditions: Conditions | None = None,
    ) -> Pixels:
        """In the precision of `x`. Without classes labels are ignored."""
        assert conditions is None
        kind = next(self.network.parameters()).dtype
        told = None if self.classes is None else labels
        return self.network(x.to(kind), noise_level.to(kind), class_labels=told).sample.to(x.dtype)

    def try_out(self, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` unless images of this shape go through: a config does not say that.

        A network that halves 28 pixels three times, for one, cannot double them back.
        """
        learning = self.training
        device = next(self.parameters()).device
        blank = torch.zeros(1, *shape, device=device)
        try:
            with torch.no_grad():
                self.eval()(blank, blank[:, 0, 0, 0], torch.zeros_like(blank[:, 0, 0, 0]).long())
        except (RuntimeError, ValueError) as problem:
            given = " x ".join(map(str, shape))
            raise ConfigError(
                f"{type(self.network).__name__} fails on images of {given} ({problem}). Make one "
                "with fewer levels, or give --image-size."
            ) from problem
        finally:
            self.train(learning)


def denoising_losses(
    denoiser: Denoiser,
    images: Pixels,
    labels: Labels | None = None,
    conditions: Conditions | None = None,
    *,
    sigma: Each,
    noise: Pixels,
) -> Each:
    """How far each image is from what the denoiser makes of it under `sigma * noise`.

    The mean square over pixels, weighted so that an untrained network has about 1 at every sigma.
    Each loss depends on its own image alone: the private engine can clip its gradient.
    """
    found = denoiser(images + _by_image(sigma) * noise, sigma, labels, conditions)
    known = denoiser.sigma_data
    weight = (sigma.square() + known**2) / (sigma * known).square()  # 1 / c_out^2
    return weight * (found - images).square().flatten(1).mean(dim=1)


def draw_sigma(
    n: int, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Each:
    """Noise levels to train on, log-normal."""
    mean, deviation = LOG_SIGMA
    return (torch.randn(n, generator=generator, device=device) * deviation + mean).exp()


def preconditioning(sigma: Each, sigma_data: float) -> tuple[Each, Each, Each, Each]:
    """c_skip, c_out, c_in and c_noise (Karras et al. 2022, table 1)."""
    total = (sigma.square() + sigma_data**2).sqrt()
    level = sigma.clamp(min=LEAST_SIGMA).log() / 4
    return (sigma_data / total).square(), sigma * sigma_data / total, 1 / total, level


def require_fit(denoiser: Denoiser, shape: tuple[int, int, int], classes: int | None) -> None:
    """Raise `ConfigError` unless the denoiser is for such images and this many classes."""
    network: Any = denoiser.network
    _check_shape(network, shape)
    known = getattr(network, "classes", classes)
    if known != classes:
        raise ConfigError(
            f"this denoiser knows {known or 'no'} classes, and the images have "
            f"{classes or 'none'}: labels would mean something else to it. Train one on images of "
            "these classes."
        )
    if isinstance(network, Diffusers):
        network.try_out(shape)


def _check_shape(network: Any, shape: tuple[int, ...]) -> None:
    """What the network does not say is as the images have it."""
    channels = getattr(network, "channels", None) or shape[0]
    size = getattr(network, "size", None)
    known = (channels, *(shape[1:] if size is None else (size, size)))
    if shape != known:
        given, made_for = (" x ".join(str(side) for side in sides) for sides in (shape, known))
        raise ConfigError(
            f"this denoiser is for images of {made_for}, and was given images of {given}. Use "
            "images of its size and channels (--image-size), or train another."
        )


def _by_image(number: Each) -> Float[Tensor, "n 1 1 1"]:
    return number[:, None, None, None]
