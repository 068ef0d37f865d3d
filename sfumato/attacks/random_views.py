"""Random views of images that gradients flow through: place, size, angle, brightness.

A guess that fools the target by pixels falls apart when it is looked at a little differently. All
movements are one affine map, sampled once; brightness and contrast are another.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sfumato.settings.invert import Views


def random_view(
    views: Views, images: Float[Tensor, "n c h w"], generator: torch.Generator
) -> Float[Tensor, "n c h w"]:
    """One view of each image; pixels are from 0 to 1, in views as in images."""
    n, device = len(images), images.device
    draw = torch.rand(7, n, generator=generator, device=generator.device).to(device)
    side = (views.least_area + (1 - views.least_area) * draw[0]).sqrt()
    angle = math.radians(views.degrees) * (2 * draw[1] - 1)
    flip = torch.where(draw[2] < 0.5, -1.0, 1.0) if views.mirror else torch.ones_like(side)
    # In the grid's units the image is 2 wide: a crop's middle may move by what it leaves out.
    right, down = (1 - side) * (2 * draw[3] - 1), (1 - side) * (2 * draw[4] - 1)
    cos, sin = side * angle.cos(), side * angle.sin()
    rows = [
        torch.stack([flip * cos, -sin, right], 1),
        torch.stack([flip * sin, cos, down], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    moved = F.grid_sample(
        images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    gain = 1 + views.jitter * (2 * draw[5] - 1)[:, None, None, None]
    shift = views.jitter * (2 * draw[6] - 1)[:, None, None, None]
    middle = moved.mean(dim=(1, 2, 3), keepdim=True)
    return (gain * (moved - middle) + middle * (1 + shift)).clamp(0, 1)
