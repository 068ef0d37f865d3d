"""Means and intervals where classes, not images, are what was drawn from the world.

Images of a class succeed or fail together: if the attack finds what a 7 looks like, all its guesses
of 7 are good. A bootstrap over images would take a thousand of them for a thousand trials and
claim far too much. So classes are drawn, each with all it has, and all classes count alike.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sfumato.errors import ConfigError

Values = Float[np.ndarray, " n"]
Labels = Int[np.ndarray, " n"]


def class_means(values: Values, labels: Labels) -> dict[int, float]:
    """The mean value of each class, in the order of labels."""
    names, *_, means = _grouped(values, labels)
    return dict(zip(names.tolist(), means.tolist(), strict=True))


def over_classes(
    values: Values,
    labels: Labels,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    inner: bool = False,
) -> dict[str, Any]:
    """The mean of the class means, its interval, and the lowest and highest class.

    The interval is a percentile bootstrap that draws classes with all their values or, with
    `inner`, draws as many values again in each class that was drawn. It is right for many classes
    and too narrow for few; of one class there is none (None). The same seed gives the same limits.
    To pool runs, give a class that occurs in several of them one number.
    """
    if resamples < 1 or not 0 < level < 1:
        raise ConfigError(
            f"resamples={resamples} must be 1 or more and level={level:g} between 0 and 1; "
            "1000 and 0.95 are usual."
        )
    names, together, starts, counts, means = _grouped(values, labels)
    limits = None
    if len(names) > 1:
        generator = np.random.default_rng(seed)
        drawn = generator.integers(len(names), size=(resamples, len(names)))
        averages = means[drawn].mean(axis=1)
        if inner:
            for number, row in enumerate(drawn):
                sizes = counts[row]
                within = generator.integers(np.repeat(sizes, sizes))
                again = together[np.repeat(starts[row], sizes) + within]
                firsts = np.cumsum(sizes) - sizes
                averages[number] = (np.add.reduceat(again, firsts) / sizes).mean()
        limits = np.quantile(averages, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return {
        "mean": float(means.mean()),
        "interval": limits,
        "lowest": float(means.min()),
        "highest": float(means.max()),
    }


def _grouped(values: Values, labels: Labels) -> tuple[np.ndarray, ...]:
    """Labels that occur, values in their order, where each class starts, its size and mean."""
    order = np.argsort(labels, kind="stable")
    names, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    together = values[order]
    return names, together, starts, counts, np.add.reduceat(together, starts) / counts
