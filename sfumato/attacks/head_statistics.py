"""Mean and deviation of every weight over a shadow_heads, in one pass, and heads in those units.

Batches are merged by the rule of Chan et al. (1979), in float64: no large sums of squares are
subtracted from each other, so a weight of mean 1 and deviation 1e-6 comes out right.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from sfumato.attacks.heads import HeadRecipe, parameter_name
from sfumato.attacks.shadow_heads import Heads
from sfumato.errors import DataError, RunError
from sfumato.files import atomic

CONSTANT = 2.0**-22
"""A weight whose deviation is below this share of its mean varies by float32's rounding alone."""


@dataclass(frozen=True, eq=False)
class WeightStatistics:
    """What each weight is like in heads of one kind. All tensors are float64."""

    mean: Float[Tensor, " p"] = field(repr=False)
    std: Float[Tensor, " p"] = field(repr=False)
    """Of the heads counted, divided by their number, as numpy's `std` is."""
    count: int
    kind: str
    """The `ShadowHeads.kind` of the heads."""
    correlation: Float[Tensor, "p p"] | None = field(default=None, repr=False)
    """Zero in rows and columns of weights that do not vary, except for ones on the diagonal."""

    @property
    def keep(self) -> Bool[Tensor, " p"]:
        """The weights that vary: others say nothing, and cannot be divided by their deviation."""
        return self.std > CONSTANT * self.mean.abs()

    def dropped(self, recipe: HeadRecipe, d: int) -> list[str]:
        """The names of the weights that do not vary."""
        places = (~self.keep).nonzero().flatten().tolist()
        return [parameter_name(place, recipe, d) for place in places]

    def standardise(self, heads: Heads) -> Float[Tensor, "m p"]:
        """Weights less their mean, in deviations; 0 for those that do not vary.

        Guarantee: heads of another kind, by recipe or by the body of the features, are refused.
        Subtraction is done in float64, since the deviations are what says something.
        """
        if heads.kind != self.kind:
            raise RunError(
                f"statistics from other shadow heads: of kind {self.kind[:12]}, and the heads of "
                f"kind {heads.kind[:12]}. Find statistics of heads of the same recipe and features."
            )
        device = heads.weights.device
        mean, inverse = self.mean.to(device), self._inverse.to(device)
        return ((heads.weights - mean) * inverse).to(heads.weights.dtype)

    @property
    def _inverse(self) -> Float[Tensor, " p"]:
        return torch.where(self.keep, 1 / self.std, 0.0)

    def fake(self, count: int, seed: int) -> Float[Tensor, "count p"]:
        """Standardised weights that are Gaussian noise with the correlation of real ones.

        This is the published null. No data set has such weights: they have full rank, and heads
        have a rank below the number of classes.
        """
        if self.correlation is None:
            raise RunError("the statistics have no correlation: find them again with it.")
        generator = torch.Generator().manual_seed(seed)
        jitter = 1e-5 * torch.eye(len(self.mean), dtype=torch.float64)
        factor = torch.linalg.cholesky(self.correlation.cpu() + jitter).float()
        noise = torch.randn(count, len(self.mean), generator=generator) @ factor.T
        return noise * self.keep.cpu()

    def save(self, path: Path) -> None:
        """Keep them in a file."""
        tensors = {"mean": self.mean, "std": self.std, "correlation": self.correlation}
        found = {name: t.cpu().contiguous() for name, t in tensors.items() if t is not None}
        with atomic(path) as file:
            file.write(save(found, metadata={"count": str(self.count), "kind": self.kind}))

    @staticmethod
    def load(path: Path) -> "WeightStatistics":
        """Statistics from a file."""
        with safe_open(path, framework="pt") as file:
            notes = file.metadata()
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return WeightStatistics(count=int(notes["count"]), kind=notes["kind"], **found)


def weight_statistics(batches: Iterable[Heads], *, correlation: bool = False) -> WeightStatistics:
    """Statistics of all heads in `batches`, each looked at once.

    Guarantee: mean and deviation are those of all heads together, to float64's precision, however
    they are cut into batches. `correlation` takes P x P numbers and a product as large a batch.
    """
    total: _Sums | None = None
    kind = None
    for heads in batches:
        if kind not in (None, heads.kind):
            raise RunError(
                f"heads of kind {heads.kind[:12]} came after heads of kind {kind[:12]}: statistics "
                "are of one recipe and one body's features. Take the batches of one shadow_heads."
            )
        kind = heads.kind
        if len(heads):
            found = _sums(heads.weights, correlation)
            total = found if total is None else _merged(total, found)
    if total is None or kind is None:
        raise DataError("there are no heads to find statistics of. Give at least one batch.")
    return _statistics(total, kind)


@dataclass(frozen=True)
class _Sums:
    """Number, mean, and sums of squares or products of what is left without the mean."""

    count: int
    mean: Tensor
    squares: Tensor
    products: Tensor | None


def _sums(weights: Float[Tensor, "m p"], correlation: bool) -> _Sums:
    values = weights.double()
    mean = values.mean(0)
    values = values - mean
    products = values.T @ values if correlation else None
    return _Sums(len(values), mean, values.square().sum(0), products)


def _merged(one: _Sums, other: _Sums) -> _Sums:
    count = one.count + other.count
    shift = other.mean - one.mean
    weight = one.count * other.count / count
    products = None
    if one.products is not None and other.products is not None:
        products = one.products + other.products
        products.addr_(shift, shift, alpha=weight)
    return _Sums(
        count,
        one.mean + shift * (other.count / count),
        one.squares + other.squares + weight * shift.square(),
        products,
    )


def _statistics(total: _Sums, kind: str) -> WeightStatistics:
    std = (total.squares / total.count).sqrt()
    found = WeightStatistics(total.mean, std, total.count, kind)
    if total.products is None:
        return found
    inverse = found._inverse
    correlation = total.products / total.count * inverse[:, None] * inverse
    correlation.fill_diagonal_(1.0)
    return WeightStatistics(total.mean, std, total.count, kind, correlation)
