"""What the Poisson loader draws is what is clipped: each example once, with all its views."""

import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset, losses, net, repeatable
from oracle import norm_of, norms_of
from torch import nn

from sfumato.clipping.admit import one_at_a_time
from sfumato.errors import PrivacyError

NO_NOISE = {"noise_multiplier": 0.0}


class OfViews(nn.Module):
    """A network of images, given several views of each on an axis of their own."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def views(x, count):
    return torch.stack([x.roll(shift, -1) for shift in range(count)], dim=1)


def mean_over_views(out, y):
    each = F.cross_entropy(out.flatten(0, 1), y.repeat_interleave(out.shape[1]), reduction="none")
    return each.unflatten(0, out.shape[:2]).mean(dim=1)


def start():
    """An engine, and its loader that gives batches in pieces."""
    model, optimizer, engine = attached(**repeatable())
    return model, optimizer, engine, engine.loader(dataset(), physical_batch_size=5)


@pytest.mark.parametrize("place", ["the first piece", "the last piece"])
def test_an_example_given_as_several_rows_is_refused(place):
    model, optimizer, engine, loader = start()
    x, y = next(loader)
    while place == "the last piece" and not engine._drawn[1]:
        optimizer.step(loss=losses(model, x, y))
        x, y = next(loader)
    x, y = x.repeat_interleave(8, 0), y.repeat_interleave(8)
    with pytest.raises(PrivacyError, match=f"{len(x) // 8} examples were drawn.*given {len(x)}"):
        optimizer.step(loss=losses(model, x, y))
    assert engine.taken == 0


def test_a_piece_of_which_examples_are_left_out_is_refused():
    model, optimizer, engine, loader = start()
    x, y = next(loader)
    with pytest.raises(PrivacyError, match=r"5 examples were drawn.*given 4"):
        optimizer.step(loss=losses(model, x[1:], y[1:]))
    # What was refused is in no sum: the piece can still be given as it was drawn.
    optimizer.step(loss=losses(model, x, y))
    assert engine._gathered == 5


@pytest.mark.parametrize("pieces", [1, 2])
def test_two_loaders_cannot_take_turns(pieces):
    model, optimizer, engine, first = start()
    loaders = [first, engine.loader(dataset(), physical_batch_size=5)]

    def step(loader):
        x, y = next(loader)
        optimizer.step(loss=losses(model, x, y))

    step(first)
    for _ in range(pieces):
        step(loaders[1])
    if pieces == 1:  # the first can go on, for so far both are in the same place
        step(first)
    late = loaders[pieces == 1]
    with pytest.raises(PrivacyError, match="another loader of this data"):
        step(late)


def test_views_on_an_axis_of_their_own_are_one_contribution():
    """One example is all there is: what the weights move by is what it adds."""
    settings = {"sample_size": 1, "batch_size": 1, "epochs": None, "steps": 1, "lr": 1.0}
    model, optimizer, engine = attached(OfViews(), **settings, **{**repeatable(), **NO_NOISE})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in engine.loader(dataset(1)):
        optimizer.step(loss=10 * mean_over_views(model(views(x, 8)), y))
    assert engine.taken == 1
    moved = norm_of({name: p.detach() - before[name] for name, p in model.named_parameters()})
    assert moved == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("physical", [1, 5, None])
def test_views_are_clipped_with_the_gradient_of_their_mean(physical):
    model = OfViews()
    model, optimizer, engine = attached(model, **repeatable())
    x, y = next(engine.loader(dataset(), physical_batch_size=physical))

    def loss(model, x, y):
        return mean_over_views(model(x), y)

    norms = norms_of(one_at_a_time(model.eval(), loss, (views(x, 8), y)))
    optimizer.step(loss=loss(model.train(), views(x, 8), y))
    middle = float(norms.sort().values[len(x) // 2])
    assert optimizer.get_training_stats()["med_norm"] == pytest.approx(middle, rel=1e-4)
