"""A linear model on scattering coefficients: features that cost no budget, since none is trained.

Wavelets turn and stretch, their moduli are averaged, twice over (Bruna and Mallat 2013). For small
data or small epsilon such fixed features beat trained ones (Tramer and Boneh 2021).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ANGLES = 8


class Scattering(nn.Module):
    """Coefficients of order 0, 1 and 2 on two scales: 81 for each channel and patch of 4 x 4."""

    fine: Tensor
    coarse: Tensor
    blur: Tensor

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(27 * channels, 81 * channels, affine=False)
        self.register_buffer("fine", wavelets(0, 7), persistent=False)
        self.register_buffer("coarse", wavelets(1, 11), persistent=False)
        self.register_buffer("blur", gaussian(1.6, 11)[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """n c h w -> n 81c h/4 w/4, each example normalised by itself in groups of channels."""
        n = x.shape[0]
        height, width = x.shape[2:]
        extra = (-width % 4, -height % 4)
        x = F.pad(x, (0, extra[0], 0, extra[1]), mode="replicate").flatten(0, 1)[:, None]
        first, second = moduli(x, self.fine, 1), moduli(x, self.coarse, 2)
        both = moduli(first.flatten(0, 1)[:, None], self.coarse, 2)
        both = both.unflatten(0, (-1, ANGLES)).flatten(1, 2)
        orders = [self._average(x, 4), self._average(first, 4), self._average(second, 2)]
        found = torch.cat([*orders, self._average(both, 2)], dim=1)
        return self.norm(found.reshape(n, -1, *found.shape[2:]))

    def _average(self, maps: Tensor, stride: int) -> Tensor:
        """Each map blurred and thinned out; maps thinned by 2 already are blurred half as far."""
        kernel = self.blur if stride == 4 else self.blur[:, :, 1::2, 1::2] * 4
        rows = F.pad(maps.flatten(0, 1)[:, None], [kernel.shape[-1] // 2] * 4, mode="replicate")
        return F.conv2d(rows, kernel, stride=stride).unflatten(0, maps.shape[:2])[:, :, 0]


def moduli(x: Tensor, kernels: Tensor, stride: int) -> Tensor:
    """|x * psi| for complex wavelets whose real and imaginary parts are stacked."""
    padded = F.pad(x, [kernels.shape[-1] // 2] * 4, mode="replicate")
    real, imaginary = F.conv2d(padded, kernels, stride=stride).chunk(2, dim=1)
    return torch.hypot(real, imaginary)


def wavelets(scale: int, size: int) -> Tensor:
    """Morlet wavelets of one scale at eight angles: 16 1 size size, real parts first."""
    deviation, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    rows, columns = _grid(size)
    parts: list[Tensor] = []
    for turn in range(ANGLES):
        angle = math.pi * turn / ANGLES
        along = columns * math.cos(angle) + rows * math.sin(angle)
        across = rows * math.cos(angle) - columns * math.sin(angle)
        hull = torch.exp(-(along**2 + (4 / ANGLES * across) ** 2) / (2 * deviation**2))
        wave = torch.exp(1j * frequency * along)
        # Minus as much of the hull as makes the mean vanish.
        parts.append(hull * (wave - (hull * wave).sum() / hull.sum()) / hull.sum())
    stacked = torch.stack(parts)
    return torch.cat([stacked.real, stacked.imag])[:, None].float()


def gaussian(deviation: float, size: int) -> Tensor:
    """A blur whose values add up to one."""
    rows, columns = _grid(size)
    kernel = torch.exp(-(rows**2 + columns**2) / (2 * deviation**2))
    return (kernel / kernel.sum()).float()


def _grid(size: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(size, dtype=torch.float64) - size // 2
    return places[:, None], places[None, :]


def scatter_linear(classes: int, channels: int = 1) -> nn.Module:
    """Scattering coefficients and one linear layer, which alone learns."""
    return nn.Sequential(Scattering(channels), nn.Flatten(), nn.LazyLinear(classes))
