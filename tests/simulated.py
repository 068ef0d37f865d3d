"""What the best attack reaches against sampled Gaussian noise, by simulation and not by account."""

import math

import numpy as np
from scipy.stats import beta, binom


def sampled_tpr(
    fpr,
    *,
    rate,
    noise_multiplier,
    steps,
    pair,
    draws=200_000,
    level=0.99,
    seed=0,
):
    """`largest_tpr` by simulation: an estimate, and an upper limit that holds with chance `level`.

    Runs the worst case `draws` times with and `draws` times without the example and applies the
    best test. It shares nothing with the accountant, so it checks it. The limit allows for the
    threshold, which is itself estimated, and for the count above it (Clopper and Pearson 1934).
    Weighing one sample by likelihood ratios needs half the draws, and comes out too low.
    """
    points = np.asarray(fpr, dtype=np.float64)
    flat = points.reshape(-1)
    generator = np.random.default_rng(seed)
    first, second = {"remove": (1, 0), "add": (0, 1), "replace": (1, -1)}[pair]
    size = max(1, 2_000_000 // steps)
    sizes = [min(size, draws - start) for start in range(0, draws, size)]

    def losses(shift):
        parts = []
        for rows in sizes:
            sums = noise_multiplier * generator.standard_normal((rows, steps))
            sums += shift * (generator.random((rows, steps)) < rate)
            here = _log_ratio(sums, first, rate, noise_multiplier)
            parts.append(here - _log_ratio(sums, second, rate, noise_multiplier))
        return np.concatenate(parts)

    positives = np.sort(losses(first))
    negatives = np.append(np.sort(losses(second))[::-1], -np.inf)

    def above(rank):
        """How many positives lie above the negative of that rank, 0 being the largest."""
        return draws - np.searchsorted(positives, negatives[rank], side="right")

    half = (1 + level) / 2
    estimate = above(np.floor(flat * draws).astype(int)) / draws
    # With chance `half`, the test that this many negatives pass has a size of at least fpr.
    hits = above(binom.ppf(half, draws, flat).astype(int))
    limit = np.where(hits == draws, 1.0, beta.ppf(half, hits + 1, np.maximum(draws - hits, 1)))
    return estimate.reshape(points.shape), limit.reshape(points.shape)


def _log_ratio(sums, shift, rate, noise):
    """Log likelihood of runs in which an example adds `shift`, over runs in which it adds 0."""
    if shift == 0:
        return np.zeros(len(sums))
    absent = math.log1p(-rate) if rate < 1 else -math.inf
    present = math.log(rate) + (2 * shift * sums - 1) / (2 * noise**2)
    return np.logaddexp(absent, present).sum(axis=1)
