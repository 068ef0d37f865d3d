"""How pictures are framed: the middle is cut out, and what is left is resized to a square.

Faces are published with much around them: the usual crop of CelebA is the middle 108 of 178 x 218
pixels, that of FFHQ's thumbnails the middle 88 of 128. Files are framed one by one as they are
read, so that they may differ in size; sets in memory all at once. Both cut the same pixels.
"""

from dataclasses import dataclass, replace

import torch
from PIL import Image, ImageOps

from sfumato.data.images import Images
from sfumato.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Framing:
    """What is kept of a picture, in pixels a side; None leaves it as it is."""

    centre_crop: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("centre_crop", "image_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")

    def picture(self, picture: Image.Image, name: str) -> Image.Image:
        """One picture, framed; `name` is what an error calls it."""
        if self.centre_crop is not None:
            left, top = self._corner(picture.width, picture.height, name)
            box = (left, top, left + self.centre_crop, top + self.centre_crop)
            picture = picture.crop(box)
        if self.image_size is None or picture.size == (self.image_size, self.image_size):
            return picture
        # ImageOps.fit cuts to the target's shape and antialiases while it resizes.
        size = (self.image_size, self.image_size)
        return ImageOps.fit(picture, size, Image.Resampling.BICUBIC)

    def images(self, images: Images) -> Images:
        """A set in memory, framed."""
        if self.centre_crop is not None:
            _, height, width = images.shape
            left, top = self._corner(width, height, f'"{images.name}"')
            side = slice(top, top + self.centre_crop), slice(left, left + self.centre_crop)
            images = replace(images, pixels=images.pixels[:, :, *side].contiguous())
        return images if self.image_size is None else resize(images, self.image_size)

    def _corner(self, width: int, height: int, name: str) -> tuple[int, int]:
        assert self.centre_crop is not None
        if self.centre_crop > min(width, height):
            raise DataError(
                f"{name} is {width}x{height}: there are no {self.centre_crop} pixels a side to cut "
                "out of its middle. Give a smaller --centre-crop, or none."
            )
        return (width - self.centre_crop) // 2, (height - self.centre_crop) // 2


def resize(images: Images, image_size: int) -> Images:
    """The same images, square with sides of `image_size` pixels, antialiased."""
    if images.shape[1:] == (image_size, image_size):
        return images
    from torchvision.transforms.v2.functional import center_crop, resize

    # In pieces, so that the float copy stays small beside the images.
    pieces = [
        center_crop(resize(piece, [image_size], antialias=True), [image_size])
        for piece in images.pixels.split(4096)
    ]
    return replace(images, pixels=torch.cat(pieces))
