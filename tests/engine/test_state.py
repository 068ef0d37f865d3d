"""An engine goes on where the state of another was taken, and is refused where it could not."""

import warnings

import pytest
import torch
from loops import attached, dataset, engine_for, losses, net, repeatable
from torch.utils.data import DataLoader

from sfumato.errors import ConfigError
from sfumato.privacy.accounting import shuffled_epsilon


def test_the_ledger_survives_a_checkpoint():
    model, data = net(), dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_for(model)
    engine.attach(optimizer)
    loader = engine.loader(data)
    for _ in range(4):
        x, y = next(loader)
        optimizer.step(loss=losses(model, x, y))
    state = engine.state_dict()
    engine.detach()
    resumed = engine_for(model)
    resumed.load_state_dict(state)
    resumed.attach(optimizer)
    assert resumed.get_privacy_spent() == engine.get_privacy_spent()
    for x, y in resumed.loader(data):
        optimizer.step(loss=losses(model, x, y))
    assert resumed.taken == 10
    assert resumed.get_privacy_spent()["epsilon"] <= 3


def test_a_state_of_another_plan_is_refused():
    _, _, engine = attached()
    with pytest.raises(ConfigError, match="noise_multiplier"):
        engine_for(net(), target_epsilon=1.0).load_state_dict(engine.state_dict())
    with pytest.raises(ConfigError, match="delta"):
        engine_for(net(), target_delta=0.5, target_epsilon=None, noise_multiplier=1.0)


@pytest.mark.parametrize(("then", "now"), [(0.0, 0.5), (0.5, 0.0)])
def test_an_average_is_neither_made_up_nor_dropped(then, now):
    state = engine_for(net(), ema=then).state_dict()
    engine = engine_for(net(), ema=now)
    ledger = engine.ledger
    with pytest.raises(ConfigError, match=f"ema: {str(then > 0).lower()} -> "):
        engine.load_state_dict(state)
    assert engine.ledger is ledger
    engine_for(net(), ema=then).load_state_dict(state)


def test_whoever_shuffles_anew_in_the_middle_of_an_epoch_pays_for_examples_that_come_again():
    noisy = {"target_epsilon": None, "noise_multiplier": 1.0}  # five steps are an epoch
    through = take(engine_for(net(), **noisy), 5)
    cut, again = take(engine_for(net(), **noisy), 2), engine_for(net(), **noisy)
    again.load_state_dict(cut.state_dict())
    take(again, 3)
    # An example may have been in a batch before and in one after: twice, not once.
    for engine, times in ((through, 1), (cut, 1), (again, 2)):
        spent = engine.get_privacy_spent()["epsilon"]
        assert spent == pytest.approx(shuffled_epsilon(1.0, times, 1e-3))


@pytest.mark.parametrize("fixed", [False, True])
def test_whoever_goes_back_pays_for_the_steps_that_are_taken_again(fixed):
    settings = repeatable() if fixed else {"target_epsilon": None, "noise_multiplier": 1.0}
    _, optimizer, engine = attached(**settings)
    draw(engine, optimizer, 0, 6)
    state, once = engine.state_dict(), engine.get_privacy_spent()["epsilon"]
    draw(engine, optimizer, 6, 10)
    with pytest.warns(UserWarning, match="4 releases that the state does not know"):
        engine.load_state_dict(state)
    assert engine.taken == 6
    assert len(engine.ledger.releases) == 10, "what was released stays paid for"
    draw(engine, optimizer, 6, 10)
    releases = engine.ledger.releases
    assert [release.step for release in releases] == [*range(10), *range(6, 10)]
    assert len(engine.ledger.objections) == fixed, "its own seed is no seed of a parent"
    assert engine.get_privacy_spent()["epsilon"] > once
    # The last state knows all of it, and a state of now does too.
    engine.load_state_dict(engine.state_dict())
    assert engine.ledger.releases == releases


def test_what_an_engine_spent_before_it_took_anothers_state_over_stays_paid_for():
    _, optimizer, engine = attached()
    draw(engine, optimizer, 0, 2)
    spent = engine.ledger.releases
    with pytest.warns(UserWarning, match="2 releases"):
        engine.load_state_dict(engine_for(net()).state_dict())
    assert engine.ledger.releases == spent


def draw(engine, optimizer, start, end):
    """The steps of the engine's own loader from `start` up to `end`, with inputs that change."""
    assert engine.taken == start
    for x, y in engine.loader(dataset()):
        optimizer.step(loss=losses(engine.module, x + 0.1 * torch.randn_like(x), y))
        if engine.taken == end:
            return


def take(engine, steps):
    """So many steps of a pass over an ordinary loader."""
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.attach(optimizer)
    size = int(engine.plan.expected_batch)
    batches = engine.shuffled(DataLoader(dataset(), batch_size=size, shuffle=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            x, y = next(batches)
            optimizer.step(loss=losses(engine.module, x, y))
    engine.detach()
    return engine
