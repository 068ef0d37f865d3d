"""How pictures are framed: the middle is cut out, and what is left is resized to a square.

Faces are published with much around them: the usual crop of CelebA is the middle 108 of 178 x 218
pixels, that of FFHQ's thumbnails the middle 88 of 128. Files are framed one by one as they are
read, so that they may differ in size; sets in memory all at once. Both cut the same pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from warnings import warn

from PIL import Image, ImageOps

from sfumato.data.images import Images
from sfumato.data.memory_guard import require_memory
from sfumato.errors import ConfigError, DataError, SfumatoWarning

PIECE = 2**28
"""Bytes of floats that a set in memory is resized by."""


@dataclass(frozen=True, kw_only=True)
class Framing:
    """What is kept of a picture, in pixels a side; None leaves it as it is."""

    centre_crop: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("centre_crop", "image_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")

    def require_room(self, count: int, channels: int, size: tuple[int, int]) -> None:
        """Refuse images that would not fit; `size` (height, width) is theirs as they are.

        Asked before any of them is decoded or enlarged.
        """
        side = self.image_size or self.centre_crop
        height, width = size if side is None else (side, side)
        remedy = f"Give {'a smaller' if self.image_size else 'an'} --image-size, or fewer images."
        require_memory(
            count * channels * height * width, f"{count} images of {width} x {height}", remedy
        )

    def require_crop(self, size: tuple[int, int], name: str) -> None:
        """Refuse a crop that is larger than an image of this size (height, width)."""
        if self.centre_crop is not None:
            height, width = size
            self._corner(width, height, name)

    def tell_cut(self, sizes: Sequence[tuple[int, int]], name: str) -> None:
        """Say how much of images of these sizes is cut off, where a square is made of others."""
        if self.image_size is None or self.centre_crop is not None:
            return
        lost = [1 - min(size) / max(size) for size in sizes]
        cut = [share for share in lost if share >= 0.005]
        if cut:
            warn(
                f'{len(cut)} of {len(sizes)} images of "{name}" are not square: --image-size keeps '
                f"their middle, and up to {max(cut):.0%} of an image is cut off.",
                SfumatoWarning,
                stacklevel=2,
            )

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

    def images(self, images: Images, *, tell: bool = True) -> Images:
        """A set in memory, framed; with `tell`, it is said what is cut off."""
        if self.centre_crop is not None:
            _, height, width = images.shape
            left, top = self._corner(width, height, f'"{images.name}"')
            side = slice(top, top + self.centre_crop), slice(left, left + self.centre_crop)
            images = replace(images, pixels=images.pixels[:, :, *side].contiguous())
        if self.image_size is None or images.shape[1:] == (self.image_size, self.image_size):
            return images
        if tell:
            self.tell_cut([images.shape[1:]] * len(images), images.name)
        return resize(images, self.image_size)

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
    # Here: torchvision takes as long as torch, and few runs need it.
    from torchvision.transforms.v2.functional import center_crop, resize

    Framing(image_size=image_size).require_room(len(images), images.shape[0], images.shape[1:])
    channels, height, width = images.shape
    # In pieces, so that the float copy stays small beside the images.
    at_once = max(1, PIECE // (4 * channels * max(height * width, image_size**2)))
    pixels = images.pixels.new_empty(len(images), channels, image_size, image_size)
    for old, new in zip(images.pixels.split(at_once), pixels.split(at_once), strict=True):
        new.copy_(center_crop(resize(old, [image_size], antialias=True), [image_size]))
    return replace(images, pixels=pixels)
