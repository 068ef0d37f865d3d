"""What a teacher sees in private images, as averages that may be released.

Of every image: the mean and mean square of each channel at each normalisation layer, as one vector.
Blocks of it are measured in units that public images fix, so that all weigh alike; the vector is
clipped as a whole, and its sum over the images is one Gaussian release, by `privatize`. So nothing
depends on batches, and one image can change the sum by the norm bound and no more.

DP-ImgSyn (Soufleri et al. 2024) matches images to such statistics. Batches of public images are
summarised here by the very same function as private ones, clipping included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.models.observe import in_evaluation_mode, normalisation_layers, observed
from sfumato.privacy.moments import sum_by_group, weighted_means, with_counter
from sfumato.privacy.sampling import Chunk
from sfumato.training.inputs import Inputs

LEAST_VARIANCE = 0.01
"""A released variance is at least this part of the public one: noise may bring it below zero."""


@dataclass(frozen=True)
class MomentScale:
    """How moments are measured; known from public images and the teacher alone."""

    channels: tuple[int, ...]
    """Of each layer."""
    units: Float[Tensor, " blocks"]
    """The usual norm of each block, means and mean squares of each layer in turn."""
    max_norm: float
    """What a whole vector is clipped to, its counter included."""
    variances: Float[Tensor, " channels"]
    """Of each channel in public images, layer after layer."""

    @property
    def weight(self) -> float:
        """The counter: small beside the bound, and far above its noise."""
        return self.max_norm / 4

    @property
    def blocks(self) -> list[int]:
        """Lengths of the blocks."""
        return [count for count in self.channels for _ in range(2)]

    def vectors(self, found: Sequence[Float[Tensor, "2 n _"]]) -> Float[Tensor, "n d"]:
        """One vector an image, of what was observed in a forward pass."""
        blocks = [block for pair in found for block in pair]
        return torch.cat([b / u for b, u in zip(blocks, self.units, strict=True)], dim=1)

    def mean(self, vectors: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
        """The mean as a release has it: weighted by what clipping leaves of each vector.

        Gradients flow through vectors, not through their weights.
        """
        counted = with_counter(vectors, self.weight)
        factors = (self.max_norm / counted.detach().norm(dim=1)).clamp(max=1.0)
        return weighted_means((factors @ counted)[None], self.weight, least=1e-6)[0]

    def statistics(self, mean: Float[Tensor, " d"]) -> list[Float[Tensor, " _"]]:
        """Mean and variance of every channel, from mean moments; in units of their blocks."""
        found, start = [], 0
        pieces = mean.split(self.blocks)
        for layer, count in enumerate(self.channels):
            (a, b), (m, q) = self.units[2 * layer : 2 * layer + 2], pieces[2 * layer :][:2]
            least = LEAST_VARIANCE * self.variances[start : start + count]
            found += [m, torch.maximum(b * q - (a * m).square(), least) / b]
            start += count
        return found

    def state(self) -> dict[str, Tensor]:
        """As tensors for a file."""
        # The bound in full: rounded to float32 it may be less than what vectors were clipped to.
        max_norm = torch.tensor(self.max_norm, dtype=torch.float64)
        return {
            "channels": torch.tensor(self.channels),
            "units": self.units,
            "max_norm": max_norm,
            "variances": self.variances,
        }

    @staticmethod
    def load(state: dict[str, Tensor], device: torch.device) -> "MomentScale":
        """Back from a file."""
        channels = tuple(int(c) for c in state["channels"])
        units, variances = state["units"].to(device), state["variances"].to(device)
        return MomentScale(channels, units, float(state["max_norm"]), variances)


@torch.no_grad()
def make_gauge(model: nn.Module, public: Inputs, slack: float) -> MomentScale:
    """Units and norm bound, from public images: the bound is `slack` times their usual norm."""
    public.images.require_public("measuring the units of feature statistics")
    if not normalisation_layers(model):
        raise ConfigError(
            "the teacher has no normalisation layer, so there are no statistics to match. Take a "
            "model that has (--model group-cnn), or --k 0."
        )
    pieces = [found for _, found in observe_features(model, public)]
    layers = [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]
    blocks = [block for pair in layers for block in pair]
    units = torch.stack([block.norm(dim=1).median().clamp(min=1e-6) for block in blocks])
    variances = [q.mean(0) - m.mean(0).square() for m, q in layers]
    gauge = MomentScale(tuple(m.shape[1] for m, _ in layers), units, 1.0, torch.cat(variances))
    usual = float(gauge.vectors(layers).norm(dim=1).median())
    # With its counter, a quarter of the bound, a vector of the usual norm stays within the slack.
    bound = slack * usual / (1 - 1 / 16) ** 0.5
    return MomentScale(gauge.channels, units, bound, gauge.variances)


@torch.no_grad()
def sum_moments(
    model: nn.Module,
    inputs: Inputs,
    gauge: MomentScale,
    groups: Int[Tensor, " units"] | None = None,
    num_groups: int = 1,
    batch_size: int = 512,
) -> Float[Tensor, "groups d"]:
    """The sum of clipped vectors over all images (or people: each has one, the mean over their
    images).

    Guarantee: one image (or person) more or less changes the table by at most `gauge.max_norm`. It
    is exact, and private: only `privatize` may release it.
    """
    if groups is not None and inputs.people is not None:
        raise ConfigError(
            "statistics of each class are for images: a person may be in several. Leave "
            "--per-class out, or take a teacher whose unit is an image."
        )
    total: Tensor | float = 0.0
    for units, found in observe_features(model, inputs, batch_size):
        vectors = gauge.vectors(found).unflatten(0, (-1, inputs.rows)).mean(dim=1)
        where = torch.zeros(len(units), dtype=torch.int64) if groups is None else groups[units]
        counted = with_counter(vectors.double(), gauge.weight)
        table = sum_by_group(counted, where.to(counted.device), num_groups, gauge.max_norm)
        total = total + table
    assert isinstance(total, Tensor)
    return total


def observe_features(
    model: nn.Module, inputs: Inputs, batch_size: int = 512
) -> Iterator[tuple[Int[Tensor, " units"], list[Float[Tensor, "2 rows _"]]]]:
    """Run the model, in evaluation mode and float32, over all units; what each pass observed."""
    with in_evaluation_mode(model), observed(model) as found:
        for units in torch.arange(len(inputs)).split(batch_size):
            chunk = Chunk(units, torch.ones(len(units), dtype=torch.bool))
            found.clear()
            model(inputs.normalise(inputs.scale(inputs.places(chunk, 0))))
            yield units, list(found)
