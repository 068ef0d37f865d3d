"""How images that were made compare with real ones, in the features of a network with a name.

For commands that make images. The measures are those of `metrics/quality.py`; here are the networks
whose features they are taken in. Every figure is kept beside the name of its network and beside the
counts, and none is called FID: that is another network, and one way to resize.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.data.images import Images
from sfumato.errors import ConfigError
from sfumato.files import sha256
from sfumato.metrics.features import extract, without_head
from sfumato.metrics.quality import compare
from sfumato.models.scatter import Scattering
from sfumato.models.zoo import MODELS, build_model, wanted_size

FIXED = "scattering"
"""The features that need no weights: the same on every machine and in every year."""
MOST = 5_000
"""Images of a set that are compared with others: distances of all pairs are taken."""
NUMBERS = 4_000_000
"""Numbers in a table of features: of wide features fewer images are compared."""
FEWEST = 6
"""Images below which a set cannot be compared: a ball reaches to the fifth neighbour."""


@dataclass(frozen=True)
class Extractor:
    """A frozen network that turns images into features, and what it is called."""

    network: nn.Module
    name: str
    size: int | None = None
    """Pixels a side that it is shown, in three channels; None for images as they are."""

    def features(self, images: Images, device: torch.device) -> Tensor:
        """One row an image, on the device."""
        if self.size is not None and images.shape[0] == 1:
            images = replace(images, pixels=images.pixels.expand(-1, 3, -1, -1))
        found = extract(self.network.to(device), images.to(device), device, size=self.size)
        return found.values.to(device)


def compare_sets(
    extractor: Extractor,
    real: Images,
    sets: Mapping[str, Images],
    device: torch.device,
    most: int = MOST,
) -> dict[str, Any]:
    """The name of the features, and for each set how it compares with the real images.

    At most `most` images of a set are taken, spread evenly. Distances drift with the number of
    images: a caller who wants to compare two sets gives as many of each.
    """

    def table(images: Images) -> Tensor:
        rows = extractor.features(thin_images(images, most), device)
        return rows[evenly_spread(len(rows), max(FEWEST, NUMBERS // rows.shape[1]))]

    rows = table(real)
    found = {name: asdict(compare(rows, table(some))) for name, some in sets.items()}
    return {"features": extractor.name, **found}


def thin_images(images: Images, most: int = MOST) -> Images:
    """At most this many of them, spread evenly."""
    return images if len(images) <= most else images.select(evenly_spread(len(images), most))


def evenly_spread(count: int, most: int) -> Tensor:
    """At most this many of the numbers below `count`, spread evenly."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


def named_extractor(name: str, weights: Path | None, shape: tuple[int, int, int]) -> Extractor:
    """The extractor that `--extractor NAME` asks for, for images of this shape.

    A model of timm or torchvision comes with its published weights, or with those of a file; one of
    ours (a model that `sfumato train` left, say) with those of a file. All of a network is taken
    but its last layer.
    """
    if name == FIXED:
        if weights is not None:
            raise ConfigError(
                f"{FIXED} coefficients have no weights: leave --extractor-weights out, or name the "
                "network they are for with --extractor."
            )
        return Extractor(_scattering(), f"{FIXED} coefficients, averaged over quarters of an image")

    if name in MODELS and weights is None:
        raise ConfigError(
            f"--extractor {name} is one of ours, which start at random: a distance between its "
            "features would mean nothing. Give --extractor-weights FILE, or another network."
        )
    size = wanted_size(name)
    if size is not None and shape[0] not in (1, 3):
        raise ConfigError(
            f"--extractor {name} is for images of three channels (or one, shown three times), and "
            f"these have {shape[0]}. Leave it out: {FIXED} coefficients are for any."
        )
    shown = shape if size is None else (3, size, size)
    published = weights is None and size is not None
    try:
        made = build_model(name, classes=2, shape=shown, pretrained=published, weights=weights)
    except ConfigError as problem:
        raise ConfigError(
            f"--extractor {name}: {str(problem).replace('--weights', '--extractor-weights')}"
        ) from problem
    network = without_head(made).requires_grad_(False)
    return Extractor(network, f"last layer but one of {name}{_origin(made, weights, size)}", size)


def _origin(model: nn.Module, weights: Path | None, size: int | None) -> str:
    """Which weights a network has and what it is shown: its name would not be enough."""
    found = ""
    if weights is not None:
        found = f", weights of {weights.name} (sha256 {sha256(weights)[:12]})"
    elif size is not None:
        tag = (getattr(model, "pretrained_cfg", None) or {}).get("tag")
        found = f", published weights{f' ({tag})' if tag else ''}"
    return found if size is None else f"{found}, images of {size} pixels"


def _scattering() -> nn.Module:
    """Fixed wavelets: 81 numbers for each channel and quarter of an image."""
    return nn.Sequential(Scattering(), nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()
