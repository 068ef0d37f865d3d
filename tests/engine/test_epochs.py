"""Ordinary loaders: no example is in one sum twice, and no more is said than can be known."""

import pytest
from loops import attached, dataset, losses
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.accounting import shuffled_epsilon

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


def start(batch_size, **settings):
    noisy = {"target_epsilon": None, "noise_multiplier": 1.0, "epochs": None, "steps": 100}
    return attached(batch_size=batch_size, **noisy, **settings)


def train(pieces, every, epochs=3, ends=False, drop_last=False, batch_size=None, known=True):
    """Sums of `every` pieces; with `ends` also a shorter one at the end of each pass."""
    model, optimizer, engine = start(batch_size or pieces * every)
    loader = DataLoader(dataset(), pieces, shuffle=True, drop_last=drop_last)
    number = 0
    for _ in range(epochs):
        for i, (x, y) in enumerate(engine.shuffled(loader) if known else loader):
            number += 1
            step = number % every == 0 or (ends and i == len(loader) - 1)
            number *= not step
            (optimizer.step if step else optimizer.virtual_step)(loss=losses(model, x, y))
    return engine


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("pieces", [6, 7])
def test_a_sum_that_reaches_over_the_end_of_a_pass_is_refused(pieces, drop_last, known):
    with pytest.raises(PrivacyError, match=r"(?s)at the end of each pass.*len\(loader\)"):
        train(pieces, 5 if pieces == 7 and drop_last else 4, drop_last=drop_last, known=known)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("pieces", [6, 7, 60])
def test_whoever_steps_at_the_end_of_each_pass_is_not_disturbed(pieces, drop_last, known):
    every = 4 if pieces < 60 else 1
    engine = train(pieces, every, ends=True, drop_last=drop_last, known=known)
    steps = 1 if pieces == 60 else 2 if pieces == 7 and drop_last else 3
    assert engine.taken == 3 * steps


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
def test_whole_batches_are_not_disturbed_where_passes_end(drop_last, known):
    assert train(16, 1, drop_last=drop_last, known=known).taken == 3 * (3 if drop_last else 4)


def test_the_sum_goes_on_after_a_refusal():
    model, optimizer, engine = start(40)
    x, y = dataset()[:20]
    optimizer.step(loss=losses(model, x, y))
    for _ in range(2):
        optimizer.virtual_step(loss=losses(model, x, y))
    with pytest.raises(PrivacyError, match="batch_size is 40"):
        optimizer.virtual_step(loss=losses(model, x, y))
    assert engine._gathered == 40


def cost(engine):
    """How many releases of all of the data cost what the engine says that it has spent."""
    spent = engine.get_privacy_spent()["epsilon"]
    prices = [shuffled_epsilon(1.0, times, 1e-3) for times in range(1, 20)]
    return min(range(1, 20), key=lambda times: abs(prices[times - 1] - spent))


def test_a_pass_costs_what_one_of_its_steps_does():
    engine = train(12, 1, epochs=2)
    assert engine.taken == 10
    assert engine.get_privacy_spent()["epsilon"] == pytest.approx(shuffled_epsilon(1.0, 2, 1e-3))


def test_steps_on_batches_from_anywhere_are_charged_one_by_one():
    model, optimizer, engine = start(12)
    x, y = dataset()[:12]
    for _ in range(10):
        optimizer.step(loss=losses(model, x, y))
    assert cost(engine) == 10


def test_a_batch_that_is_used_again_is_charged_again():
    model, optimizer, engine = start(12)
    for x, y in engine.shuffled(DataLoader(dataset(), 12)):
        optimizer.step(loss=losses(model, x, y))
        if engine.taken == 3:
            optimizer.step(loss=losses(model, x, y))
    assert cost(engine) == 2


def test_a_sum_with_a_batch_from_elsewhere_is_charged_by_itself():
    model, optimizer, engine = start(24)
    x, y = dataset()[48:]
    for number, batch in enumerate(engine.shuffled(DataLoader(dataset(), 12))):
        if number == 1:
            optimizer.virtual_step(loss=losses(model, x, y))
        optimizer.step(loss=losses(model, *batch))
    assert cost(engine) == 2


def test_a_pass_that_is_broken_off_costs_as_much_as_a_whole_one():
    model, optimizer, engine = start(12)
    for times in range(1, 4):
        for number, (x, y) in enumerate(engine.shuffled(DataLoader(dataset(), 12, shuffle=True))):
            if number == 2:
                break
            optimizer.step(loss=losses(model, x, y))
        assert cost(engine) == times


def test_two_passes_cannot_take_turns():
    model, optimizer, engine = start(12)
    one, other = (engine.shuffled(DataLoader(dataset(), 12)) for _ in range(2))
    for batch in (next(one), next(other)):
        optimizer.step(loss=losses(model, *batch))
    with pytest.raises(PrivacyError, match="another pass"):
        next(one)
    assert cost(engine) == 2


def test_an_example_given_as_several_rows_of_a_known_batch_is_refused():
    model, optimizer, engine = start(12)
    for x, y in engine.shuffled(DataLoader(dataset(), 6)):
        with pytest.raises(PrivacyError, match="6 examples were drawn"):
            optimizer.step(loss=losses(model, x.repeat(2, 1, 1, 1), y.repeat(2)))
        break
    assert engine.taken == 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset())


def replaced(batch_sampler):
    """A loader whose batches are drawn by another sampler than it says."""
    loader = DataLoader(data, 12, shuffle=True)
    loader.batch_sampler.sampler = batch_sampler
    return loader


data = dataset()
LOADERS = {
    "with replacement": DataLoader(data, 12, sampler=RandomSampler(data, replacement=True)),
    "more than once": DataLoader(data, 12, sampler=RandomSampler(data, num_samples=120)),
    "weights": DataLoader(data, 12, sampler=WeightedRandomSampler([1.0] * 60, 60)),
    "a subset": DataLoader(data, 12, sampler=SubsetRandomSampler([0, 0, 1])),
    "own batches": DataLoader(data, batch_sampler=BatchSampler([0, 0, 1, 2], 2, drop_last=False)),
    "a stream": DataLoader(Stream(), 12),
    "no batches": DataLoader(data, batch_size=None),
    "data ten times": DataLoader(ConcatDataset([data] * 10), 12, shuffle=True),
    "less data": DataLoader(dataset(48), 12, shuffle=True),
    "a few": DataLoader(data, 12, sampler=RandomSampler(range(12), num_samples=60)),
    "a few in turn": DataLoader(data, 12, sampler=SequentialSampler([0, 0, 1])),
    "replaced": replaced(RandomSampler(range(12), num_samples=60)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_may_draw_an_example_twice_is_refused(kind):
    _, _, engine = start(12)
    with pytest.raises(ConfigError):
        next(engine.shuffled(LOADERS[kind]))
