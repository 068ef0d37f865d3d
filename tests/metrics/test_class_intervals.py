"""A bootstrap over classes: its width, and what it is spared from."""

import numpy as np
import pytest

from sfumato.metrics.class_intervals import class_means, over_classes


def test_intervals_over_classes_are_wider_than_over_images_that_agree():
    """Twelve classes, half of them easy; all fifty images of a class fare alike."""
    labels = np.repeat(np.arange(12), 50)
    values = (labels % 2).astype(float)
    low, high = over_classes(values, labels)["interval"]
    naive_low, naive_high = over_classes(values, np.arange(600))["interval"]
    assert high - low > 5 * (naive_high - naive_low)
    # Drawn again within classes nothing changes, since images of a class are the same.
    assert over_classes(values, labels, inner=True)["interval"] == [low, high]


def test_the_interval_over_classes_has_the_width_of_theory():
    generator = np.random.default_rng(5)
    labels, classes = np.repeat(np.arange(200), 4), generator.normal(size=200)
    noise = generator.normal(size=800)
    for inner in (False, True):
        found = over_classes(classes[labels] + 2 * noise, labels, inner=inner)
        means = classes + 2 * noise.reshape(200, 4).mean(1)
        # Drawing within classes adds the variance of a class mean, of which 1 - 1/4 is seen.
        within = (2 * noise).reshape(200, 4).var(1).mean() / 4 if inner else 0
        error = np.sqrt((means.var() + within) / 200)
        low, high = found["interval"]
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
        assert found["mean"] == pytest.approx(means.mean())


def test_all_classes_count_alike_however_many_images_they_have():
    found = over_classes(np.array([1.0] * 99 + [0.0]), np.array([7] * 99 + [3]))
    assert found["mean"] == 0.5
    assert class_means(np.array([1.0, 0.0, 1.0]), np.array([7, 3, 3])) == {3: 0.5, 7: 1.0}
