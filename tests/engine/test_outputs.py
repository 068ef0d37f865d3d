"""What a model says may be a tensor, or tensors in a tuple, a list, a mapping or a dataclass."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset
from oracle import norms_of
from torch import nn

from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.rules.registry import RULES
from sfumato.errors import ConfigError, PrivacyError, UnsupportedLayer

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


@dataclass
class Said:
    logits: torch.Tensor
    ids: torch.Tensor


class Output(OrderedDict):
    """As the transformers package has it."""


SHAPES = {
    "a number an example": lambda y: y[:, 0],
    "rows of an example side by side": lambda y: y.reshape(-1, 1),
    "tuple": lambda y: (y.argmax(dim=1), y),
    "list": lambda y: [y, y.square()],
    "mapping": lambda y: {"logits": y, "all": [y.mean()], "none": None},
    "subclass of a mapping": lambda y: Output(logits=y),
    "dataclass": lambda y: Said(y, y.argmax(dim=1)),
}


class Saying(nn.Module):
    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.aside, self.shape = nn.Linear(64, 3), nn.Linear(64, 3), shape

    def forward(self, x):
        return self.shape(self.layer(x.flatten(1)))


def logits_of(out):
    """The logits, wherever they are."""
    if isinstance(out, dict):
        return out["logits"]
    if isinstance(out, Said):
        return out.logits
    return out[-1] if isinstance(out, tuple | list) else out


def loss_of(model, x):
    return logits_of(model(x)).reshape(len(x), -1).sin().sum(dim=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_models_that_say_it_in_any_way_are_clipped(shape):
    x, _ = dataset()[:12]
    model = Saying(SHAPES[shape])
    norms = norms_of(one_at_a_time(model, loss_of, (x,)))
    model, optimizer, engine = attached(model)
    optimizer.step(loss=loss_of(model, x))
    assert engine.taken == 1
    middle = float(norms.sort().values[6])
    assert optimizer.get_training_stats()["med_norm"] == pytest.approx(middle, rel=1e-4)


@pytest.mark.parametrize("said", [None, "a word", {"ids": torch.zeros(3, dtype=torch.int64)}])
def test_a_model_that_says_nothing_to_learn_from_is_told_so(said):
    model, _, _ = attached(Saying(lambda _: said))
    with pytest.raises(ConfigError, match=f"gives a {type(said).__name__} in which no tensor"):
        model(dataset()[:12][0])


@pytest.mark.parametrize("kind", ["of another", "of all together"])
def test_a_loss_of_other_examples_is_noticed_in_mappings_too(kind):
    model, optimizer, _ = attached(Saying(lambda y: {"logits": y, "mean": y.square().mean()}))
    out = model(dataset()[:12][0])
    loss = F.cross_entropy(out["logits"] @ out["logits"].T, torch.arange(12), reduction="none")
    if kind == "of all together":
        loss = out["logits"].sum(dim=1) + out["mean"]
    with pytest.raises(PrivacyError, match="depends on what the model says of another"):
        optimizer.step(loss=loss)


class TwoHeads(Saying):
    def forward(self, x):
        x = x.flatten(1)
        return {"logits": self.layer(x), "aside": x @ self.aside.weight.T + self.aside.bias}


def test_every_head_is_tested(monkeypatch):
    rule = RULES[torch.Tensor.matmul]
    wrong = rule._replace(follow=lambda tape, x, *rest: rule.follow(tape, 2 * x, *rest))
    monkeypatch.setitem(RULES, torch.Tensor.matmul, wrong)
    model, _, _ = attached(TwoHeads(None))
    with pytest.raises(UnsupportedLayer, match="not those of autograd"):
        model(dataset()[:12][0])
