"""Whether numbers are normal deviates: distribution, moments, tails."""

import math

import numpy as np
from scipy import stats


def assert_normal(drawn):
    """A sound generator fails once in some hundred keys, so keys are fixed; 2 % of scale shows."""
    count = len(drawn)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert stats.kstest(drawn, stats.norm(0, 1.02).cdf).pvalue < 1e-3
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((drawn**power).mean() - mean) < 4 * math.sqrt(variance / count)
    for limit in (2, 3, 4):
        beyond = int((np.abs(drawn) > limit).sum())
        assert stats.binomtest(beyond, count, 2 * stats.norm.sf(limit)).pvalue > 1e-3
