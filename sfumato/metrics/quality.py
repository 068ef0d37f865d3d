"""How much made images resemble real ones, as a feature space sees them.

All numbers compare two tables of features, one row an image, computed elsewhere. They mean
something only beside the name of the network that computed them, and beside numbers from as many
rows: nothing here is called FID or KID, which belong to one network and one way to resize.

Distances of distributions (`frechet_distance`, `kernel_distance`) are one figure for everything
that may be wrong. Shares of points in balls (`precision_recall`, `density_coverage`) tell images
unlike any real one from kinds of real image that are never made. `nearest_distances` shows copies.

Everything is done in float64, on the device of the first table. Where the real images are private,
so is every number: no mechanism stands in between.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.errors import ConfigError, DataError

Features = Float[Tensor, "_ _"]
"""One row an image. Tables to compare must be equally wide; others are refused in a sentence."""
BLOCK = 1000
"""Rows whose distances to all other rows are held at once: 80 MB for each 10,000 of those."""
ROUNDING = 1e-12
"""What a squared distance may be off by, as a share of the two squared norms it is made from."""


@dataclass(frozen=True)
class Quality:
    """What `compare` measures. Keep the name of the feature space beside it."""

    real_count: int
    made_count: int
    """Rows of both tables: most numbers drift with them, so compare at equal counts."""
    frechet: float
    kernel: float
    kernel_error: float
    """0 is best for both distances; the second may fall below it by chance, see its error."""
    precision: float
    recall: float
    """Shares of made images that lie among real ones, and of real ones among made ones."""
    density: float
    """About 1 for images from the same source; more where they crowd around few real ones."""
    coverage: float
    """The share of real images with a made one close by."""
    nearest: float
    nearest_usual: float
    """Median distance from a made image to the nearest real one, and from a real one to the nearest
    other: if the first is much smaller, images were copied."""


def compare(real: Features, made: Features) -> Quality:
    """All measures of this file, with their usual settings. Both tables need 6 rows or more."""
    return Quality(
        len(real),
        len(made),
        frechet_distance(real, made),
        *kernel_distance(real, made),
        *precision_recall(real, made),
        *density_coverage(real, made),
        float(nearest_distances(made, real).median()),
        float(nearest_distances(real, real, itself=True).median()),
    )


def frechet_distance(a: Features, b: Features) -> float:
    """The squared Frechet distance of the Gaussians with the means and covariances of both tables.

    Guarantee: never negative, and right for singular covariances too, so also with fewer rows than
    features. Tables of one source are apart by chance, about in proportion to 1 / rows.
    """
    a, b = _tables(2, "a covariance", a=a, b=b)
    mean, other = a.mean(0), b.mean(0)
    first, second = ((t - t.mean(0)) / math.sqrt(len(t) - 1) for t in (a, b))  # S = first' first
    if a.shape[1] <= min(len(a), len(b)):  # the triangles of QR have the same S, and are smaller
        first, second = (torch.linalg.qr(table, mode="r").R for table in (first, second))
    # tr (S1 S2)^(1/2) is the sum of the singular values of first second'.
    shared = torch.linalg.svdvals(first @ second.T).sum()
    gap = (mean - other).square().sum()
    return max(0.0, float(gap + first.square().sum() + second.square().sum() - 2 * shared))


def kernel_distance(
    a: Features, b: Features, *, subset: int = 1000, subsets: int = 20, seed: int = 0
) -> tuple[float, float]:
    """The squared maximum mean discrepancy for the kernel (x.y / d + 1)^3, and its standard error.

    A mean over random subsets (Binkowski et al. 2018), at most half as large as the smaller table.
    Guarantee: no bias, whatever the number of rows, so 0 on average for tables of one source. The
    error counts the chance in the tables and not in the subsets alone: these overlap, and their
    spread would claim too much. It is too large where sources are alike or sizes differ.
    """
    a, b = _tables(4, "a choice of subsets", a=a, b=b)
    if subset < 2 or subsets < 2:
        raise ConfigError(
            f"subset={subset} and subsets={subsets} must both be 2 or more: the estimate needs "
            "pairs of rows, and its error several estimates."
        )
    rows, generator = min(len(a), len(b)), torch.Generator().manual_seed(seed)
    size = min(subset, rows // 2)

    def draw(table: Tensor) -> Tensor:
        return table[torch.randperm(len(table), generator=generator)[:size].to(table.device)]

    found = torch.stack([_discrepancy(draw(a), draw(b)) for _ in range(subsets)])
    # Shao and Wu 1989: an estimate from all rows has size / (rows - size) times the variance seen
    # among estimates from `size` of them; 1 / subsets is for drawing finitely many.
    variance = found.var() * (1 / subsets + size / (rows - size))
    return float(found.mean()), float(variance.sqrt())


def precision_recall(real: Features, made: Features, k: int = 3) -> tuple[float, float]:
    """Shares of made rows among real ones, and of real rows among made ones.

    Kynkaanniemi et al. 2019: a row is among others if it lies in a ball around one of them that
    reaches to that one's k-th neighbour. Balls are closed, and a row is not its own neighbour, so
    a table against itself has 1 and 1.
    """
    real, made = _tables(1, "a share", real=real, made=made)
    precise, _ = _memberships(made, real, _radii(real, k))
    recalled, _ = _memberships(real, made, _radii(made, k))
    return float((precise > 0).double().mean()), float((recalled > 0).double().mean())


def density_coverage(real: Features, made: Features, k: int = 5) -> tuple[float, float]:
    """How thickly made rows lie around real ones, and the share of real rows with one around.

    Naeem et al. 2020, with the balls of `precision_recall` around real rows: how many of them hold
    a made row, on average, over k; and the share of balls that hold one. Tables of one source have
    a density of about 1, a table against itself at least 1 + 1/k: a row is in its own ball too.
    """
    real, made = _tables(1, "a share", real=real, made=made)
    balls, held = _memberships(made, real, _radii(real, k))
    return float(balls.double().mean()) / k, float((held > 0).double().mean())


def nearest_distances(
    of: Features, among: Features, *, itself: bool = False, block: int = BLOCK
) -> Float[Tensor, " rows"]:
    """For each row of `of`, the distance to the nearest row of `among`, in float64.

    The distance is the root mean square over coordinates, so it reads in units of one pixel or
    feature, and is taken from the difference of the two rows: a copy is at exactly 0. With
    `itself`, both tables are the same and a row is not its own neighbour, though its double is.
    """
    of, among = _tables(2 if itself else 1, "a nearest row", of=of, among=among)
    if itself and len(of) != len(among):
        raise ConfigError(
            f"itself=True says that of and among are the same rows, but there are {len(of)} and "
            f"{len(among)}: give one table twice, or leave itself out."
        )
    gaps = _squared_gaps(of, among, itself=itself, block=block)
    places = torch.cat([piece.argmin(dim=1) for piece in gaps]).split(block)
    pairs = zip(of.split(block), places, strict=True)
    return torch.cat([(rows - among[near]).square().mean(1).sqrt() for rows, near in pairs])


def _discrepancy(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Without bias, since no row is paired with itself."""
    n, d = x.shape
    xx, yy, xy = ((rows @ others.T / d + 1) ** 3 for rows, others in ((x, x), (y, y), (x, y)))
    within = xx.sum() - xx.trace() + yy.sum() - yy.trace()
    return within / (n * (n - 1)) - 2 * xy.mean()


def _radii(rows: Float[Tensor, "n d"], k: int) -> Float[Tensor, " n"]:
    """The squared distance from each row to the k-th nearest other one."""
    if not 0 < k < len(rows):
        raise ConfigError(
            f"k={k} must lie between 1 and {len(rows) - 1}: a ball reaches to the k-th other row, "
            f"and a table has {len(rows)} rows in all. Give more images or another k."
        )
    gaps = _squared_gaps(rows, rows, itself=True)
    return torch.cat([piece.topk(k, largest=False).values[:, -1] for piece in gaps])


def _memberships(
    points: Float[Tensor, "n d"], centres: Float[Tensor, "m d"], radii: Float[Tensor, " m"]
) -> tuple[Int[Tensor, " n"], Int[Tensor, " m"]]:
    """In how many balls each point lies, and how many points each ball holds."""
    inside = (piece <= radii for piece in _squared_gaps(points, centres, less=ROUNDING))
    balls, held = zip(*((piece.sum(dim=1), piece.sum(dim=0)) for piece in inside), strict=True)
    return torch.cat(balls), torch.stack(held).sum(dim=0)


def _squared_gaps(
    some: Tensor, others: Tensor, *, itself: bool = False, less: float = 0.0, block: int = BLOCK
) -> Iterator[Float[Tensor, "rows m"]]:
    """Squared distances to all `others`, for one block of `some` after another.

    `less` lowers each by that share of the squared norms it is made from, so that no point on the
    edge of a ball is lost to rounding. With `itself`, a row is infinitely far from itself.
    """
    middle = others.mean(dim=0)  # norms about the middle are small, and so is rounding
    others = others - middle
    norms = others.square().sum(dim=1)
    for number, rows in enumerate(some.split(block)):
        rows = rows - middle
        gaps = (1 - less) * (rows.square().sum(dim=1)[:, None] + norms)
        gaps.addmm_(rows, others.T, alpha=-2)
        if itself:
            gaps.diagonal(number * block).fill_(torch.inf)
        yield gaps


def _tables(fewest: int, purpose: str, **tables: Tensor) -> list[Tensor]:
    """The tables in float64 on one device, or a sentence that says why they cannot be compared."""
    sizes = ", ".join(f"{name} is {len(t)} x {t.shape[1]}" for name, t in tables.items())
    if len({table.shape[1] for table in tables.values()}) > 1:
        raise ConfigError(f"{sizes}: give features of the same network, so that widths agree.")
    if min(map(len, tables.values())) < fewest:
        raise ConfigError(f"{sizes}: {purpose} needs {fewest} rows or more. Give more images.")
    if not all(bool(table.isfinite().all()) for table in tables.values()):
        raise DataError(f"{sizes}, and some features are not finite: leave out those rows.")
    device = next(iter(tables.values())).device
    return [table.detach().to(device, torch.float64) for table in tables.values()]
