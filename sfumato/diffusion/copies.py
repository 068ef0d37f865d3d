"""A watch on learning by heart: how many made images are copies of training images.

An image is called a copy of its nearest training image if that is less than a third as far away as
the second nearest (Yoon et al. 2023): a new image lies about as far from both. Distances are
Euclidean, in pixels, so a copy that was mirrored or moved is not found.

Some real images are near doubles of others. So the same is measured for public images that were
held out, and what counts is how far the one share is above the other.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sfumato.data.images import Images
from sfumato.errors import DataError

THRESHOLD = 1 / 3
"""Copies have a ratio below it."""

MARGIN = 0.1
"""A generator copies too much when the share of copies among its samples is so far above that among
held-out images. If 5 % of both pass for copies by chance, `ENOUGH` samples exceed this less than
once in 10,000 looks; if 20 % of the samples do, and no held-out image, they stay within it once in
175."""
ENOUGH = 100
"""Samples among which copies are counted, at least."""

Pixels = UInt8[Tensor, "n c h w"]


@dataclass(frozen=True)
class NearestImages:
    """For each image, how near its nearest training image is, and which one it is."""

    ratios: Float[Tensor, " n"]
    """Distance to the nearest over distance to the second nearest, between 0 and 1."""
    nearest: Int[Tensor, " n"]
    """The place of the nearest, the first of those that are equal."""

    @property
    def places(self) -> Int[Tensor, " copies"]:
        """Where the copies are, closest first."""
        order = self.ratios.argsort(stable=True)
        return order[self.ratios[order] < THRESHOLD]

    @property
    def share(self) -> float:
        """The share of the images that are copies; 0 of no images."""
        return len(self.places) / max(1, len(self.ratios))


def copy_rates(made: Images, trained_on: Images, held_out: Images) -> dict[str, float]:
    """The share of copies among made images, and among images that no model was trained on.

    Adds no noise: `trained_on` and `held_out` must be public, or it is a `PrivacyError`.
    """
    purpose = "counting copies"
    known = trained_on.require_public(purpose).pixels
    unseen = held_out.require_public(purpose).pixels
    return {
        "copies": find_copies(made.pixels, known).share,
        "copies_among_held_out": find_copies(unseen, known).share,
    }


def find_copies(
    made: Pixels, trained_on: UInt8[Tensor, "trained _ _ _"], piece: int = 2048
) -> NearestImages:
    """The two nearest training images of each made image, on the device of the training images.

    Guarantee: distances are exact, since whole numbers are added up in float64, and so they do not
    depend on `piece`, the rows of either set that are compared at a time. Learnt images that equal
    each other count once: a copy of a double is a copy.
    """
    if made.shape[1:] != trained_on.shape[1:]:
        raise DataError(
            f"made images are {tuple(made.shape[1:])} and training images "
            f"{tuple(trained_on.shape[1:])} (channels, height, width): they can only be "
            "compared if they are alike."
        )
    distinct, places = _distinct(trained_on.flatten(1))
    if len(distinct) < 2:
        raise DataError(
            f"{len(trained_on)} training images, {len(distinct)} of them different: to tell "
            "copies takes a nearest and a second nearest. Give at least 2 different images."
        )
    found = [
        _two_nearest(rows.to(trained_on.device), distinct, piece) for rows in _pieces(made, piece)
    ]
    squares = torch.cat([torch.empty(0, 2, dtype=torch.float64), *(s.cpu() for s, _ in found)])
    nearest = torch.cat([torch.empty(0, dtype=torch.int64), *(w.cpu() for _, w in found)])
    # Distinct images are not both at distance 0, so the second is never 0.
    return NearestImages((squares[:, 0] / squares[:, 1]).sqrt().float(), places.cpu()[nearest])


def _pieces(images: Pixels, piece: int) -> tuple[UInt8[Tensor, "rows d"], ...]:
    return images.flatten(1).split(piece) if len(images) else ()


def _two_nearest(
    rows: UInt8[Tensor, "rows d"], trained_on: UInt8[Tensor, "trained d"], piece: int
) -> tuple[Float[Tensor, "rows 2"], Int[Tensor, " rows"]]:
    """Squared distances to the two nearest, and the place of the nearest, piece by piece."""
    x = rows.double()
    own = x.square().sum(dim=1, keepdim=True)
    squares = x.new_full((len(x), 2), torch.inf)
    place = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
    for number, part in enumerate(trained_on.split(piece)):
        y = part.double()
        # |x - y|^2 = |x|^2 + |y|^2 - 2 x.y, whole numbers below 2^53 throughout.
        gaps = own + y.square().sum(dim=1) - 2 * x @ y.T
        # Those found so far stand first, and of equal ones the first is taken: the same in pieces.
        gaps = torch.cat([squares, gaps], dim=1)
        first, where = gaps.min(dim=1, keepdim=True)
        second = gaps.scatter(1, where, torch.inf).amin(dim=1, keepdim=True)
        squares = torch.cat([first, second], dim=1)
        place = torch.where(where == 0, place, number * piece + where - 2)
    return squares, place[:, 0]


def _distinct(
    rows: UInt8[Tensor, "n d"],
) -> tuple[UInt8[Tensor, "distinct d"], Int[Tensor, " distinct"]]:
    """Each row once, in the order of their first places, and these places."""
    _, which = rows.unique(dim=0, return_inverse=True)
    count = int(which.max()) + 1 if len(which) else 0
    every = torch.arange(len(rows), device=rows.device)
    first = torch.full_like(every[:count], len(rows)).scatter_reduce(0, which, every, "amin")
    places = first.sort().values
    return rows[places], places
