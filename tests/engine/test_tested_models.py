"""The engine tests the very model that it is attached to, whatever that is given."""

import pytest
import torch
from loops import attached
from torch import Tensor, nn

from sfumato.clipping.rules.linear import linear
from sfumato.clipping.rules.registry import RULES, Rule
from sfumato.errors import UnsupportedLayer


class Square(nn.Module):
    """A square weight, used by an operation that has no rule of ours."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))
        self.table = nn.Embedding(5, 8)
        if kind == "a forward method of its own":
            self.forward = lambda x: Square.forward(self, x.float())

    def forward(self, x):
        x = x.float() if x.is_floating_point() or x.dtype == torch.uint8 else self.table(x)
        return torch.addmm(self.bias, x, self.weight)


def right(tape, bias, rows, weight):
    return linear(tape, rows, tape.derive(Tensor.t, weight), bias)


def wrong(tape, bias, rows, weight):
    return linear(tape, rows, weight, bias)


INPUTS = {
    "float32": torch.randn(12, 8),
    "float64": torch.randn(12, 8).double(),
    "bytes": torch.arange(96).reshape(12, 8).to(torch.uint8),
    "ids": torch.arange(12) % 5,
    "a forward method of its own": torch.randn(12, 8),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("rule", [right, wrong])
def test_a_wrong_rule_is_noticed_whatever_the_model_is_given(kind, rule, monkeypatch):
    monkeypatch.setitem(RULES, torch.addmm, Rule(rule, any_axis=True))
    model, _, _ = attached(Square(kind))
    if rule is right:
        assert model(INPUTS[kind]).shape == (12, 8)
    else:
        with pytest.raises(UnsupportedLayer, match="not those of autograd"):
            model(INPUTS[kind])
