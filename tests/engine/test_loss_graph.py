"""What a loss does outside the model's own pass, as far as its graph shows."""

import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset, losses, repeatable
from torch import nn

from sfumato.errors import ConfigError, PrivacyError

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


def take(loss_of, *sizes, model=None):
    """A step on this many examples each, and how many were taken."""
    model, optimizer, engine = attached(model, **repeatable())
    try:
        for size in sizes:
            x, y = dataset()[:size]
            optimizer.step(loss=loss_of(model, x, y))
    finally:
        loss_of.taken = engine.taken
    return engine.taken


COUNTS = {
    "divided": lambda m, x, y: losses(m, x, y) / len(x),
    "multiplied": lambda m, x, y: (1 / len(x)) * losses(m, x, y),
    "a tensor": lambda m, x, y: losses(m, x, y) / torch.tensor(float(len(x))),
    "weights of one over n": lambda m, x, y: losses(m, x, y) * torch.full((len(x),), 1 / len(x)),
    "the output": lambda m, x, y: F.cross_entropy(m(x) / len(x), y, reduction="none"),
    "in place": lambda m, x, y: losses(m, x, y).div_(len(y)),
}


@pytest.mark.parametrize("counts", COUNTS)
def test_a_loss_that_is_divided_by_the_number_of_examples_is_refused_before_a_step(counts):
    with pytest.raises(PrivacyError, match=r"len\(batch\)"):
        take(COUNTS[counts], 12)
    assert COUNTS[counts].taken == 0


@pytest.mark.parametrize("sizes", [(12, 9), (9, 12), (2, 1), (1, 2)])
def test_a_factor_that_moves_with_the_number_of_examples_is_refused(sizes):
    def loss(model, x, y):
        return losses(model, x, y) / (3 * len(x))

    with pytest.raises(PrivacyError, match=r"len\(batch\)"):
        take(loss, *sizes)
    assert loss.taken == 1


def test_fixed_factors_and_weights_of_examples_are_no_reason_to_refuse():
    def loss(model, x, y):
        weights = 1 + x.flatten(1).mean(dim=1).abs()
        return (0.5 * losses(model, x, y) + 0.1 * model.last.square().mean(dim=1)) * weights / 7

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(64, 3)

        def forward(self, x):
            self.last = self.body(x.flatten(1)) / 12  # a number of the model's own
            return self.last

    assert take(loss, 12, 7, 9, 7, model=Keeping()) == 4


class Head(nn.Module):
    """A head that the forward method does not use."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.body(x.flatten(1))


def with_head(model, x, y):
    return F.cross_entropy(model.head(model(x)), y, reduction="none")


def with_penalty(model, x, y):
    return model(x).square().sum(dim=1) + 10 * model.body.weight.square().sum()


def computed_before(model, x, y):
    weight = model.head.weight.T * 2
    return F.cross_entropy(model(x) @ weight, y, reduction="none")


@pytest.mark.parametrize("loss", [with_head, with_penalty, computed_before])
def test_parameters_that_are_used_outside_forward_are_refused(loss):
    with pytest.raises(ConfigError, match="outside"):
        take(loss, 12, model=Head())
    assert loss.taken == 0


def test_frozen_parameters_may_be_used_anywhere():
    model = Head()
    model.head.requires_grad_(False)
    assert take(with_head, 12, 9, model=model) == 2
