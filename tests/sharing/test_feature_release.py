"""The release of feature statistics, and the published ways to get it wrong.

Each of these is planted in the tests' own words, and a check that the right way passes is shown to
fail for it.
"""

import numpy as np
import torch
from scipy import stats
from teachers import Explosive, faces, gauge_of, largest_move, sums_with, teacher, vectors_of

from sfumato.privacy.budget import make_plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.moments import clip_rows, weighted_means, with_counter
from sfumato.privacy.noise import privatize
from sfumato.privacy.session_key import SessionKey


def released(table, plan, secret):
    header = LedgerHeader(
        data="faces", delta=1e-5, fixed_seed=secret.fixed, secret=secret.commitment
    )
    made = privatize({"table": table}, plan, Ledger(header), secret, step=0, stage="moments")
    return made["table"]


def test_the_release_has_the_noise_that_the_ledger_says():
    # A sound mechanism fails once in 1000 seeds; the seeds are fixed.
    model, gauge, images = teacher(), gauge_of(teacher()), faces()
    table = sums_with(model, gauge)(images)
    plan = make_plan(size=24, noise_multiplier=3.0, max_norm=gauge.max_norm)
    drawn = [released(table, plan, SessionKey.from_seed(seed)) - table / 24 for seed in range(300)]
    noise = torch.stack(drawn).flatten(1).numpy()
    deviation = 3.0 * gauge.max_norm / 24
    assert stats.kstest(noise.ravel(), "norm", (0, deviation)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise.ravel(), "norm", (0, wrong * deviation)).pvalue < 1e-6
    assert np.abs(noise.mean(axis=0)).max() < 4.5 * deviation / 300**0.5
    assert np.abs(noise.std(axis=0) / deviation - 1).max() < 4.5 / 600**0.5
    unrelated = np.corrcoef(noise.T) - np.eye(noise.shape[1])
    assert np.abs(unrelated).max() < 4.5 / 300**0.5


def test_noise_that_is_drawn_and_not_added_would_be_noticed(monkeypatch):
    model, gauge = teacher(), gauge_of(teacher())
    table = sums_with(model, gauge)(faces())
    plan = make_plan(size=24, noise_multiplier=3.0, max_norm=gauge.max_norm)

    def hidden():
        """Two secrets release two tables, and neither is the sum."""
        one, other = (released(table, plan, SessionKey.draw()) for _ in range(2))
        return not (one == other).any() and not (one == table / 24).any()

    assert hidden()
    exact = "sfumato.privacy.noise.to_philox_mean"
    monkeypatch.setattr(exact, lambda total, deviation, divisor, key: total.div_(divisor))
    assert not hidden()


def test_with_little_noise_the_release_gives_the_statistics_back():
    model, gauge, images = teacher(), gauge_of(teacher(), slack=1.0), faces(400)
    table = sums_with(model, gauge)(images)
    plan = make_plan(size=400, noise_multiplier=1.0, max_norm=gauge.max_norm)
    noisy = released(table, plan, SessionKey.from_seed(0))
    means = weighted_means(noisy, gauge.weight, least=1 / 400)[0].float()
    exact = gauge.mean(vectors_of(model, images, gauge).float())
    assert float((means - exact).norm() / exact.norm()) < 0.05


def test_clipping_element_by_element_would_be_noticed():
    model, gauge = teacher(Explosive()), gauge_of(teacher())

    def clamped(images):
        vectors = with_counter(vectors_of(model, images, gauge), gauge.weight)
        return vectors.nan_to_num().clamp(-gauge.max_norm, gauge.max_norm).sum(dim=0)

    assert largest_move(clamped, faces()) > 2 * gauge.max_norm


def running_average(model, gauge, batch_size):
    """As a BatchNorm averages, of clipped vectors; times the number of images."""

    def table(images):
        average = torch.zeros(2 * (4 + 6), dtype=torch.float64)
        for batch in vectors_of(model, images, gauge).split(batch_size):
            average = 0.9 * average + 0.1 * clip_rows(batch, gauge.max_norm).mean(dim=0)
        return len(images) * average

    return table


def test_a_running_average_would_be_noticed():
    model, gauge, images = teacher(), gauge_of(teacher()), faces(60)
    images = images.select([*range(2, 60), 0, 1])
    assert largest_move(sums_with(model, gauge), images) <= gauge.max_norm * (1 + 1e-6)
    assert largest_move(running_average(model, gauge, 1), images) > 2 * gauge.max_norm
    few, many = (running_average(model, gauge, size)(images) for size in (2, 20))
    assert float((few - many).norm() / many.norm()) > 0.1, "it depends on the batches"
