"""What events cost. The only door to dp-accounting.

The price is the privacy loss distribution (PLD) of the composed mechanism, discretised so that
the result is an upper bound; Rényi DP stands beside it as an independent cross-check. Both hold
for Poisson batches only, so there is also `shuffled_epsilon`, what the same noise honestly gives
when batches come from an ordinary shuffled loader: no amplification at all.

Koskela et al. 2020; Doroshenko et al. 2022 (connect the dots); Mironov 2017; Chua et al. 2024.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import dp_accounting
import numpy as np
from absl import logging
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from jaxtyping import Float

from sfumato.errors import ConfigError
from sfumato.privacy.releases import LEAST_NOISE, Mechanism, Relation, Release

Accountant = Literal["pld", "rdp"]

MOST_EVENTS = 10**6
"""Beyond these, prices take minutes and mean nothing."""

LEAST_DELTA = 1e-10
"""Composed distributions are right to about 1e-13 by rounding alone: seen at a thousand steps."""

Pair = Literal["remove", "add", "replace"]
"""Two neighbours in an order: the example is there and then not, the reverse, or another one is."""


def epsilon(
    releases: Sequence[Release],
    delta: float,
    relation: Relation = "add-or-remove",
    accountant: Accountant = "pld",
    *,
    cells_for: int = 0,
) -> float:
    """An upper bound on epsilon at `delta` of all `releases` composed, in any order.

    Zero for no events, infinite if one of them was exact. The RDP bound is NaN for what Rényi
    accounting has no formula for: replace-one and truncated batches. `cells_for` as for `price`.
    """
    return price(mechanisms_of(releases), delta, relation, accountant, cells_for=cells_for)


def mechanisms_of(releases: Iterable[Release]) -> Counter[Mechanism]:
    """The mechanisms that `releases` are, counted: what the accountant prices.

    Guarantee: composed, they cost at least what the events do. Releases of one step share its batch
    and are one mechanism; a family of events on disjoint examples costs what one of them would
    alone, for each mechanism that occurs in it.
    """
    steps: dict[tuple[str, str, int], list[Release]] = {}
    for release in releases:
        steps.setdefault((release.ledger, release.stage, release.step), []).append(release)
    singles, families = [], set()
    for (ledger, stage, _), same in steps.items():
        family, *others = {release.family for release in same}
        if family and not others:
            families.add((ledger, stage, family, _together(same)))
        else:
            singles.append(_together(same))
    return Counter(singles) + Counter(mechanism for *_, mechanism in families)


def _together(releases: Sequence[Release]) -> Mechanism:
    """What several releases of one step are together, since they share its batch.

    Amplification comes from the batch being a sample, and it is drawn once: k Gaussian releases on
    it are one release with less noise on one sample, not k independent samples. No price is known
    for releases that cut the batch in different ways: they count as exact.
    """
    first = releases[0].mechanism
    if len(releases) == 1:
        return first
    ways_of_cutting = {(release.max_batch, release.size) for release in releases}
    if any(release.is_exact for release in releases) or len(ways_of_cutting) > 1:
        return first._replace(rate=1.0, noise_multiplier=0.0)
    precision = sum(release.noise_multiplier**-2 for release in releases)
    rate = max(release.rate for release in releases)
    return first._replace(rate=rate, noise_multiplier=precision**-0.5)


def price(
    mechanisms: Counter[Mechanism],
    delta: float,
    relation: Relation = "add-or-remove",
    accountant: Accountant = "pld",
    *,
    cells_for: int = 0,
) -> float:
    """`epsilon` for events that have been counted already.

    `cells_for` asks for cells as fine as that many events need. Prices along a training then share
    their cells, and so the distribution of one step, which is kept: a curve of them is cheap.
    """
    if not LEAST_DELTA <= delta < 1:
        raise ConfigError(
            f"delta={delta:g} must lie between {LEAST_DELTA:g} and 1: below that, what floats "
            "round off is as large as delta itself, and epsilon could come out too small."
        )
    if any(mechanism.noise_multiplier == 0 for mechanism in mechanisms):
        return math.inf
    if not +mechanisms:
        return 0.0
    if accountant == "rdp":
        return _rdp_epsilon(mechanisms, delta, relation)
    total, interval = None, _interval(+mechanisms, cells_for)
    for mechanism, count in (+mechanisms).items():
        part = _composed(mechanism, count, relation, interval)
        total = part if total is None else total.compose(part)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


def loss_cells(
    rate: float, noise_multiplier: float, steps: int, pair: Pair
) -> tuple[Float[np.ndarray, " cells"], Float[np.ndarray, " cells"]]:
    """What a Poisson-sampled Gaussian mechanism does with and without an example, in cells of loss.

    Returns the chance of each cell with the example and without it, largest privacy loss first;
    the first cell is the infinite loss. "add" swaps the two, and for "replace" another example
    stands in its place. Guarantee: up to the rounding of floats (1e-7 in all), these two are at
    least as easy to tell apart as the real pair.
    """
    mechanism = Mechanism(rate, noise_multiplier)
    # Cells that resolve the loss of one step, unless there would be millions of them.
    width = min(_interval(Counter({mechanism: steps}), 0), rate / noise_multiplier / 20)
    largest = 0.5 / noise_multiplier**2 + 10 / noise_multiplier
    width = max(width, largest * max(math.sqrt(steps) / 3e5, 1 / 6e4))
    relation: Relation = "replace" if pair == "replace" else "add-or-remove"
    total = _composed(mechanism, steps, relation, width)
    # dp-accounting keeps the two directions, and the cells themselves, to itself.
    cells = (total._pmf_add if pair == "add" else total._pmf_remove).to_dense_pmf()
    losses = (cells._lower_loss + np.arange(cells.size)) * cells._discretization
    likely = np.maximum(cells._probs, 0)
    # Beyond 700 the exponential is too large for a float; cells of such a loss hold nothing.
    other = likely * np.exp(-np.maximum(losses, -700))
    return np.append(likely, cells._infinity_mass)[::-1], np.append(other, 0.0)[::-1]


def shuffled_epsilon(
    noise_multiplier: float, epochs: float, delta: float, relation: Relation = "add-or-remove"
) -> float:
    """Epsilon of the same noise with shuffled batches: each epoch sees every example once.

    Whoever knows the order sees one plain Gaussian release an epoch, and nothing better is proven
    for what an ordinary loader does. Adding or removing an example would move all later ones
    between batches, so here the relation means an example emptied in its place (its gradient set to
    zero); replacing it moves the sum by up to twice the norm bound.
    """
    mechanism = Mechanism(1.0, noise_multiplier)
    return price(Counter({mechanism: math.ceil(round(epochs, 6))}), delta, relation)


def _interval(mechanisms: Counter[Mechanism], cells_for: int) -> float:
    """Width of the PLD's cells. Any width gives an upper bound.

    The bound exceeds the limit by about count * width^2: up to 20,000 events this width keeps that
    within 2e-4. With little noise one event has a large loss; so have many full-batch events, which
    `_at_once` turns into one with less noise. Cells are then made wider, to keep them to about
    10^5. (A cell of 700 is too wide for the exponential of a float.)
    """
    count = max(mechanisms.total(), cells_for)
    noise = min(mechanism.noise_multiplier for mechanism in mechanisms)
    if count > MOST_EVENTS or noise < LEAST_NOISE:
        raise ConfigError(
            f"{count} events with noise multiplier {noise:g} cannot be priced: at most "
            f"{MOST_EVENTS} events, each with at least {LEAST_NOISE:g}, can."
        )
    noise = min(_at_once(*item)[0].noise_multiplier for item in mechanisms.items())
    largest = 0.5 / noise**2 + 10 / noise
    return max(min(1e-3, max(1e-4, math.sqrt(2e-4 / count))), min(largest / 2e5, 500.0))


@lru_cache(maxsize=64)
def _single(mechanism: Mechanism, relation: Relation, interval: float) -> PrivacyLossDistribution:
    """The PLD of one event."""
    rate, noise, max_batch, size = mechanism
    if max_batch is not None and size is not None:
        return pld.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=size,
            sampling_probability=rate,
            truncated_batch_size=max_batch,
            noise_multiplier=noise,
            value_discretization_interval=interval,
            neighboring_relation=_neighbours(relation),
        )
    return pld.from_gaussian_mechanism(
        standard_deviation=noise,
        sampling_prob=rate,
        value_discretization_interval=interval,
        neighboring_relation=_neighbours(relation),
    )


def _composed(
    mechanism: Mechanism, count: int, relation: Relation, interval: float
) -> PrivacyLossDistribution:
    """The PLD of a mechanism that is used `count` times."""
    left, times = _at_once(mechanism, count)
    one = _single(left, relation, interval)
    return one if times == 1 else one.self_compose(times)


def _at_once(mechanism: Mechanism, count: int) -> tuple[Mechanism, int]:
    """What is left to compose of a mechanism that is used so often, and how often.

    n Gaussian releases on all of the data are one with 1/sqrt(n) of the noise: exact, and fast.
    """
    if mechanism.rate < 1 or mechanism.max_batch is not None:
        return mechanism, count
    return mechanism._replace(noise_multiplier=mechanism.noise_multiplier / math.sqrt(count)), 1


def _rdp_epsilon(mechanisms: Counter[Mechanism], delta: float, relation: Relation) -> float:
    """The cross-check by Rényi DP; NaN where it has no formula."""
    if relation == "replace" or any(m.max_batch is not None for m in mechanisms):
        return math.nan
    accountant = RdpAccountant(neighboring_relation=_neighbours(relation))
    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it warns of each order that it leaves out
    try:
        for mechanism, count in mechanisms.items():
            dp_event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
            if mechanism.rate < 1:
                dp_event = dp_accounting.PoissonSampledDpEvent(mechanism.rate, dp_event)
            accountant.compose(dp_accounting.SelfComposedDpEvent(dp_event, count))
        return float(accountant.get_epsilon(delta))
    finally:
        logging.set_verbosity(level)


def _neighbours(relation: Relation) -> NeighboringRelation:
    names = {"add-or-remove": "ADD_OR_REMOVE_ONE", "replace": "REPLACE_ONE"}
    return NeighboringRelation[names[relation]]
