"""Parameters that are a single number, without an axis: in all their forms."""

import pytest
import torch
from loops import attached, dataset, losses, repeatable
from oracle import compare
from samples import sampled
from torch import nn

from sfumato.clipping.method_choice import MODES

FORMS = {
    "bare": lambda m, out: out * m.number,
    "exp": lambda m, out: out * m.number.exp(),
    "sigmoid": lambda m, out: out * m.number.sigmoid(),
    "one less": lambda m, out: out * (1 - m.number),
    "square": lambda m, out: out * m.number**2,
    "clamp": lambda m, out: out * m.number.clamp(max=100),
    "added": lambda m, out: out + m.number.tanh(),
    "divided": lambda m, out: out / m.number,
    "twice": lambda m, out: out.sin() * m.number + out.cos() * m.number,
    "twice in two forms": lambda m, out: out.sin() * m.number + m.number.exp() * out,
    "in a weight": lambda m, out: out @ (m.weight * m.number),
    "in a weight and outside": lambda m, out: (out @ (m.weight * m.number.exp())) * m.number,
}


class Number(nn.Module):
    def __init__(self, form, shape=()):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.form = nn.Linear(64, 3), form
        self.number = nn.Parameter(torch.full(shape, 1.5))
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return self.form(self, self.body(x.flatten(1)).tanh() @ self.weight)


@sampled(form=FORMS, mode=MODES, shape=[(), (1,)])
def test_norms_and_sums_are_those_of_autograd(form, shape, mode):
    compare(Number(FORMS[form], shape).double(), dataset()[:5][0].double(), 5, mode=mode)


@pytest.mark.parametrize("form", ["exp", "twice"])
def test_an_engine_trains_it(form):
    model, optimizer, engine = attached(Number(FORMS[form]), **repeatable())
    x, y = dataset()[:12]
    before = model.number.item()
    with pytest.warns(UserWarning, match="these batches"):
        optimizer.step(loss=losses(model, x, y))
    assert engine.taken == 1
    assert model.number.item() != before
