"""`make_private` makes a Poisson loader of an ordinary one, for people who come from Opacus."""

import pytest
import torch
from loops import dataset, losses, net
from torch.utils.data import DataLoader, SubsetRandomSampler

from sfumato.engine import make_private
from sfumato.errors import ConfigError

NOISY = {"max_grad_norm": 0.1, "noise_multiplier": 1.0, "target_delta": 1e-3}


def private(loader, **settings):
    """A tiny model and what is made private for it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, *make_private(model, optimizer, loader, **settings)


def test_the_poisson_loader_keeps_the_guarantee():
    model, optimizer, engine, loader = private(
        DataLoader(dataset(), batch_size=12), physical_batch_size=5,
        epochs=2, max_grad_norm=0.1, target_epsilon=3.0, target_delta=1e-3,
    )  # fmt: skip
    for x, y in loader:
        assert len(x) <= 5
        optimizer.step(loss=losses(model, x, y))
    assert engine.taken == engine.plan.steps == 10
    assert 2.9 < engine.get_privacy_spent()["epsilon"] <= 3


def test_a_loader_is_made_private_for_a_training_of_some_length():
    def train(**length):
        model, optimizer, engine, loader = private(DataLoader(dataset(), 12), **NOISY, **length)
        for x, y in loader:
            optimizer.step(loss=losses(model, x, y))
        return engine.taken

    assert train(steps=2) == 2
    assert train(epochs=1) == 5
    with pytest.raises(ConfigError, match="give epochs, or steps"):
        train()


def test_the_loaders_own_way_to_make_a_batch_is_kept():
    def as_named(examples):
        return {"x": torch.stack([x for x, _ in examples]), "y": [int(y) for _, y in examples]}

    loader = DataLoader(dataset(), batch_size=12, collate_fn=as_named)
    with pytest.warns(UserWarning, match="collate_fn of its own.*MixUp"):
        made = private(loader, steps=2, physical_batch_size=5, **NOISY)
    model, optimizer, engine, batches = made
    for batch in batches:
        assert len(batch["y"]) <= 5
        optimizer.step(loss=losses(model, batch["x"], torch.tensor(batch["y"])))
    assert engine.taken == 2


def test_a_sampler_that_would_be_ignored_is_refused():
    loader = DataLoader(dataset(), batch_size=12, sampler=SubsetRandomSampler(range(30)))
    with pytest.raises(ConfigError, match=r"SubsetRandomSampler.*Subset"):
        private(loader, steps=2, **NOISY)
    private(DataLoader(dataset(), batch_size=12, shuffle=True), steps=2, **NOISY)
