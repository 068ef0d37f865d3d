"""Ordinary loaders: no example is in one sum twice, and honest loops are not disturbed."""

import pytest
from loops import attached, dataset, losses
from torch.utils.data import DataLoader

from sfumato.errors import PrivacyError
from sfumato.privacy.accounting import shuffled_epsilon

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


def start(batch_size, **settings):
    noisy = {"target_epsilon": None, "noise_multiplier": 1.0, "epochs": None, "steps": 100}
    return attached(batch_size=batch_size, **noisy, **settings)


def train(pieces, every, epochs=3, ends=False, drop_last=False, batch_size=None):
    """Sums of `every` pieces; with `ends` also a shorter one at the end of each pass."""
    model, optimizer, engine = start(batch_size or pieces * every)
    loader = DataLoader(dataset(), pieces, shuffle=True, drop_last=drop_last)
    number = 0
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            number += 1
            step = number % every == 0 or (ends and i == len(loader) - 1)
            number *= not step
            (optimizer.step if step else optimizer.virtual_step)(loss=losses(model, x, y))
    return engine


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("pieces", [6, 7])
def test_a_sum_that_reaches_over_the_end_of_a_pass_is_refused(pieces, drop_last):
    with pytest.raises(PrivacyError, match=r"twice.*at the end of each pass"):
        train(pieces, 5 if pieces == 7 and drop_last else 4, drop_last=drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("pieces", [6, 7, 60])
def test_whoever_steps_at_the_end_of_each_pass_is_not_disturbed(pieces, drop_last):
    engine = train(pieces, 4 if pieces < 60 else 1, ends=True, drop_last=drop_last)
    steps = 1 if pieces == 60 else 2 if pieces == 7 and drop_last else 3
    assert engine.taken == 3 * steps


@pytest.mark.parametrize("drop_last", [False, True])
def test_whole_batches_are_not_disturbed_where_passes_end(drop_last):
    assert train(16, 1, drop_last=drop_last).taken == 3 * (3 if drop_last else 4)


def test_the_sum_goes_on_after_a_refusal():
    model, optimizer, engine = start(40)
    x, y = dataset()[:20]
    optimizer.step(loss=losses(model, x, y))
    for _ in range(2):
        optimizer.virtual_step(loss=losses(model, x, y))
    with pytest.raises(PrivacyError, match="batch_size is 40"):
        optimizer.virtual_step(loss=losses(model, x, y))
    assert engine._gathered == 40


def test_a_pass_costs_what_one_of_its_steps_does():
    engine = train(12, 1, epochs=2)
    assert engine.taken == 10
    assert engine.get_privacy_spent()["epsilon"] == pytest.approx(shuffled_epsilon(1.0, 2, 1e-3))
