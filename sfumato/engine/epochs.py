"""Batches that are no Poisson samples: what can be known of them, and what they cost.

Nobody but the loader knows who is in them, so nothing is amplified: a step costs what one release
of the whole data costs. A pass over a `DataLoader` whose sampler is known is better: it shows every
example once, so its steps touch disjoint examples, and cost together what one of them does. That
holds as long as no sum reaches over the end of a pass. Of batches from anywhere else each step is
charged by itself, for they may hold the same examples every time.
"""

import warnings
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.accounting import shuffled_epsilon
from sfumato.privacy.budget import Plan

LOOP = """Call step(loss=...) at the end of each pass, also on a smaller batch:

    for i, (x, y) in enumerate(engine.shuffled(loader)):
        loss = F.cross_entropy(model(x), y, reduction="none")
        if (i + 1) % k == 0 or i + 1 == len(loader):
            optimizer.step(loss=loss)
        else:
            optimizer.virtual_step(loss=loss)
"""


UNKNOWN = (
    " The engine does not know how they are drawn, so each step is charged as if it held the same "
    "examples. Go through a shuffled DataLoader by engine.shuffled(loader): epsilon will be "
    "{epsilon:.3g}."
)


class EpochTracker:
    """Passes over `size` examples: known ones, or as far as they show, by how many came.

    Of batches from an unknown loader, one that does not fit into what is left of the data begins
    the next pass, whether the loader drops an incomplete last batch or not.
    """

    def __init__(self, plan: Plan, size: int) -> None:
        self.plan = plan
        self.size = size
        self.begin(0)

    def begin(self, step: int) -> None:
        """Examples may come once more from this step on."""
        self._begun, self._seen = step, 0

    def check(self, examples: int, gathered: int) -> None:
        """Refuse more examples in a sum than were planned, if they are not paid for."""
        total, most = gathered + examples, self.plan.expected_batch
        if total > most:
            raise PrivacyError(
                f"this logical batch has {total} examples and batch_size is {most:g}: some may be "
                "in it twice, and once is paid for. Call step(loss=...) sooner, or plan with the "
                "batch size that is used."
            )
        if gathered and self._seen + examples > self.size:
            raise PrivacyError(
                f"this logical batch begins in one pass over the {self.size} examples and goes on "
                f"in the next: some would be in one sum twice, and once is paid for. {LOOP}"
            )

    def add(self, examples: int) -> None:
        """So many were added to a sum."""
        fits = self._seen + examples <= self.size
        self._seen = (self._seen if fits else 0) + examples

    def price(self, step: int, delta: float, *, known: bool) -> tuple[Plan, str]:
        """A plan without amplification, and a name for the steps that cost together what one does.

        Only of a pass that is `known` there is such a name. What all steps will cost is said once,
        before the first.
        """
        if self.plan.noise_decay != 1:
            raise ConfigError("noise_decay needs Poisson batches: draw them by engine.loader.")
        exact = replace(self.plan, rate=1.0)
        if step == 0:
            self._warn(exact, delta, known=known)
        return exact, f"pass from step {self._begun} on" if known else ""

    def _warn(self, exact: Plan, delta: float, *, known: bool) -> None:
        steps = int(1 / self.plan.rate + 1e-6)  # the fewest that a pass can take
        passes = shuffled_epsilon(exact.noise_multiplier, self.plan.steps / steps, delta)
        honest = passes if known else exact.epsilon(delta)
        better = "" if known else UNKNOWN.format(epsilon=passes)
        warnings.warn(
            "these batches do not come from engine.loader, so they are not Poisson samples: after "
            f"{self.plan.steps} steps epsilon will be {honest:.3g}, not "
            f"{self.plan.epsilon(delta):.3g}.{better}",
            stacklevel=6,
        )


def sizes_of(loader: Any, sample_size: int) -> list[int]:
    """How many examples each batch of a pass has; loaders that may repeat some are refused."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise ConfigError(
            f"engine.shuffled takes a torch.utils.data.DataLoader with a batch_size, not a "
            f"{type(loader).__name__}."
        )
    sampler, number = loader.sampler, size_of(loader.dataset)
    if number != sample_size:
        raise ConfigError(
            f"the loader has {number} examples and sample_size is {sample_size}: a pass over other "
            "data costs another epsilon. Make the engine with sample_size=len(dataset)."
        )
    batches = loader.batch_sampler
    once = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples <= number
    )
    whole = once and len(sampler.data_source) == number  # pyright: ignore
    if not whole or type(batches) is not BatchSampler or batches.sampler is not sampler:
        raise ConfigError(
            f"the loader draws by a {type(sampler).__name__} of which it is not known that it "
            "draws each example once in a pass. Use DataLoader(dataset, batch_size, shuffle=True), "
            "or the Poisson batches of engine.loader(dataset)."
        )
    drawn = sampler.num_samples if isinstance(sampler, RandomSampler) else number
    size = loader.batch_size
    rest = [] if loader.drop_last or drawn % size == 0 else [drawn % size]
    return [size] * (drawn // size) + rest


def size_of(dataset: Any) -> int:
    """How many examples a data set has; one that does not say cannot be drawn from."""
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"the data set is a {type(dataset).__name__} without a length. Batches are drawn from "
            "all examples at random, so the data set must have len(dataset) and dataset[i]: put a "
            "stream (an IterableDataset) into a list, or write it to files first."
        ) from None
