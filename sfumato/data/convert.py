"""What a person has at hand, a file, a picture or pixels, as images of the kind a network was
trained on.

Files and pictures are framed as those of a folder are, pixels as a set in memory is: whichever way
a network's images came, the same arithmetic is here.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sfumato.data.decode import decode_file, decode_picture
from sfumato.data.framing import Framing
from sfumato.data.images import Images
from sfumato.data.overlap import to_grey
from sfumato.errors import DataError

One = str | Path | Image.Image | Tensor | Images
AtHand = One | Iterable[One]
"""A path, a Pillow image, pixels (uint8, c h w or n c h w), a set of images; or several."""


@dataclass(frozen=True, kw_only=True)
class ImageKind:
    """What images of a network are: of one shape, in classes, and framed in one way."""

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    centre_crop: int | None = None

    @property
    def framing(self) -> Framing:
        """How others become so: the middle is cut out as it was, and resized to a square."""
        _, height, width = self.shape
        return Framing(centre_crop=self.centre_crop, image_size=height if height == width else None)

    def gather(self, given: AtHand) -> Images:
        """All that is given as one set of images, in its order; their labels mean nothing.

        Pixels that have the size of this kind are framed already, and are left as they are. Grey
        becomes colour, and colour its grey. Raises `DataError` for what has no such image.
        """
        if not isinstance(given, Iterable) and not isinstance(given, One):
            raise _no_image(given)
        several = [given] if isinstance(given, One) else list(given)
        if not several:
            raise DataError("no images were given.")
        with ThreadPoolExecutor() as pool:
            parts = list(pool.map(self._fit, several))
        if not sum(map(len, parts)):
            raise DataError("no images were given.")
        return self._images(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _fit(self, one: One) -> Tensor:
        images = self._images(self._pixels(one))
        if images.shape[0] != self.shape[0]:
            images = in_colour(images) if self.shape[0] == 3 else to_grey(images)
        if images.shape != self.shape:
            raise DataError(
                f"an image has {_told(images.shape)}, and the network takes {_told(self.shape)} "
                "(channels, height, width)."
            )
        return images.pixels

    def _pixels(self, one: One) -> Tensor:
        """Pixels, framed: n c h w."""
        if isinstance(one, str | Path):
            return _from_array(decode_file(Path(expanduser(one)), self.framing))
        if isinstance(one, Image.Image):
            return _from_array(decode_picture(one, self.framing))
        pixels = one.pixels if isinstance(one, Images) else one
        if (
            not isinstance(pixels, Tensor)
            or pixels.dtype != torch.uint8
            or pixels.ndim not in (3, 4)
            or 0 in pixels.shape[-3:]
        ):
            raise _no_image(pixels)
        pixels = pixels[None] if pixels.ndim == 3 else pixels
        framed = pixels.shape[2:] == self.shape[1:]
        return pixels if framed else self.framing.images(self._images(pixels), tell=False).pixels

    def _images(self, pixels: Tensor) -> Images:
        labels = torch.zeros(len(pixels), dtype=torch.int64)
        return Images(
            pixels=pixels, labels=labels, classes=self.classes, name="what was given", private=True
        )


def in_colour(images: Images) -> Images:
    """Grey images with three channels alike; others as they are."""
    if images.shape[0] != 1:
        return images
    return replace(images, pixels=images.pixels.expand(-1, 3, -1, -1))


def _from_array(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy()).permute(2, 0, 1)[None]


def _no_image(given: object) -> DataError:
    return DataError(
        "an image is a path, a Pillow image, or a tensor of uint8 (c h w, or n c h w), and "
        f"this is {_name(given)}."
    )


def _told(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _name(given: object) -> str:
    if isinstance(given, Tensor):
        return f"one of {str(given.dtype).removeprefix('torch.')}, {_told(given.shape)}"
    return f"a {type(given).__name__}"
