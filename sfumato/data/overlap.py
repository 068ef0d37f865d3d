"""Two sets that are to stand side by side: of one size and colour, and with no image in common.

A command that moves public images towards private ones releases the public ones, changed. That is
safe only if no private image hides among them, so each image is known by a hash of its pixels and
looked up in the other set.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from sfumato.data.images import Images
from sfumato.errors import DataError, PrivacyError

RED, GREEN, BLUE = 299, 587, 114
"""Thousandths of each channel in the luma of ITU-R BT.601."""
SHOWN = 5


def to_grey(images: Images) -> Images:
    """The same images with one channel, their ITU-R 601 luma to the nearest whole number.

    Grey images come back as they are, and grey images stored in colour as the grey they are.
    Raises `DataError` for images with neither one channel nor three.
    """
    channels = images.shape[0]
    if channels == 1:
        return images
    if channels != 3:
        raise DataError(
            f'"{images.name}" has {channels} channels: only red, green and blue can be turned into '
            "grey. Give images with 1 or 3 channels."
        )
    # In pieces, so that the wider copy stays small beside the images.
    return replace(images, pixels=torch.cat([_luma(piece) for piece in images.pixels.split(4096)]))


def overlap(a: Images, b: Images) -> Int[Tensor, " places"]:
    """The places in `a`, in order, of images that are also in `b`, pixel for pixel.

    Every copy in `a` counts. An image that was flipped, resized or saved again with loss is another
    image, and is not found. Raises `DataError` if the images differ in size or channels, since then
    no two could ever be equal.
    """
    _require_one_shape(a, b)
    known = set(_digests(b.pixels))
    places = [place for place, digest in enumerate(_digests(a.pixels)) if digest in known]
    return torch.tensor(places, dtype=torch.int64)


def require_alike(private: Images, public: Images) -> None:
    """Nothing, if the sets agree in size and channels and no private image is also public.

    Otherwise a `DataError` for the shapes or a `PrivacyError` for the images in both.
    """
    places = overlap(private, public)
    if len(places):
        shown = ", ".join(str(place) for place in places[:SHOWN].tolist())
        more = ", …" if len(places) > SHOWN else ""
        are = "image is" if len(places) == 1 else "images are"
        raise PrivacyError(
            f'{len(places)} {are} both in "{private.name}", which is private (at {shown}{more}), '
            f'and in "{public.name}", which is public: such images would be used without noise, as '
            "if they were public. Leave them out of one of the sets."
        )


def _require_one_shape(a: Images, b: Images) -> None:
    if a.shape == b.shape:
        return
    remedies = []
    if a.shape[1:] != b.shape[1:]:
        remedies.append("--image-size N")
    if a.shape[0] != b.shape[0]:
        remedies.append("--grey")
    raise DataError(
        f'"{a.name}" has images of {a.shape} (channels, height, width) and "{b.name}" of '
        f"{b.shape}: they must be alike. Give {' and '.join(remedies)}."
    )


def _digests(pixels: UInt8[Tensor, "n c h w"]) -> Iterator[bytes]:
    # Contiguous, so that the bytes are the pixels in one order, however they lie in memory.
    for image in pixels.cpu().contiguous().numpy():
        yield blake2b(image, digest_size=16).digest()


def _luma(pixels: UInt8[Tensor, "n 3 h w"]) -> UInt8[Tensor, "n 1 h w"]:
    # Whole numbers: torchvision's weights add up to 0.9999 and are cut off, so that white gets 254
    # and a grey image in colour would not be known again.
    red, green, blue = pixels.to(torch.int32).split(1, dim=1)
    return ((RED * red + GREEN * green + BLUE * blue + 500) // 1000).to(torch.uint8)
