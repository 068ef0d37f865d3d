"""What comes beside the batch, inside of containers or by hooks, mixes no examples."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset, losses, net, repeatable
from torch import nn

from sfumato.engine.arguments import CallArguments
from sfumato.errors import ConfigError, PrivacyError, UnsupportedLayer

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


class Two(nn.Module):
    """A layer, whose output `use` changes by the second argument."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use = nn.Linear(64, 3), use

    def forward(self, x, more=None):
        out = self.layer(x.flatten(1))
        return out if more is None else self.use(out, more)


@dataclass
class Held:
    x: torch.Tensor


@dataclass(frozen=True)
class FrozenHeld:
    x: torch.Tensor


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


CONTAINERS = {
    "list": (lambda x: [x], lambda more: more[0]),
    "tuple in a dict": (lambda x: {"a": (1, x)}, lambda more: more["a"][1]),
}
HIDING = {
    "dataclass": Held,
    "frozen dataclass": FrozenHeld,
    "object": lambda x: type("Own", (), {"__init__": lambda s: setattr(s, "x", x)})(),
    "slots": Slots,
    "array": lambda x: x.numpy(),
    "set": lambda x: {x},
}
USES = {
    "mean": lambda out, x: out * x.mean(),
    "count": lambda out, x: out / len(x),
}


def give(model, optimizer, count, more):
    x, y = dataset()[:count]
    optimizer.step(loss=F.cross_entropy(model(x, more(x)), y, reduction="none"))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_in_containers_are_asked_whether_they_mix_examples(kind, use):
    put, get = CONTAINERS[kind]
    model, optimizer, engine = attached(Two(lambda out, more: USES[use](out, get(more))))
    with pytest.raises((PrivacyError, UnsupportedLayer), match=r"depends on|mixes"):
        give(model, optimizer, 12, put)
    assert engine.taken == 0


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_batch_in_a_container_trains_as_it_does_by_itself(kind):
    put, get = CONTAINERS[kind]
    weights = []
    for give_as, take in ((put, get), (lambda x: x, lambda more: more)):
        torch.manual_seed(0)
        model = Two(lambda out, more, take=take: out + take(more).flatten(1)[:, :3])
        model, optimizer, _ = attached(model, **repeatable())
        give(model, optimizer, 12, give_as)
        weights.append(model.layer.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", HIDING)
def test_what_may_hide_a_tensor_is_refused(kind):
    with pytest.raises(ConfigError, match="in which examples cannot be followed"):
        CallArguments.of([torch.zeros(2, 3), HIDING[kind](torch.zeros(2, 3))], {})


def test_a_tensor_without_rows_of_examples_is_refused():
    model, optimizer, _ = attached(Two(lambda out, more: out * more))
    with pytest.raises(ConfigError, match="no row for each of the 12 examples"):
        give(model, optimizer, 12, lambda x: torch.tensor(1 / len(x)))


MOVING = {
    "a fraction": lambda x: 1 / len(x),
    "a count": len,
    "a mean": lambda x: float(x.mean()),
    "in a list": lambda x: [1 / len(x)],
    "so many": lambda x: [0.5] * len(x),
    "a function": lambda x: lambda: len(x),
}


@pytest.mark.parametrize("kind", MOVING)
def test_an_argument_that_is_another_in_every_batch_is_refused(kind):
    model, optimizer, engine = attached(Two(lambda out, _: out))
    give(model, optimizer, 12, MOVING[kind])
    with pytest.raises(PrivacyError, match='argument "1" of the model has another number'):
        give(model, optimizer, 8, MOVING[kind])
    assert engine.taken == 1


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda _, x, out: out * len(out)),
    "before": lambda m: m.register_forward_pre_hook(lambda _, x: (x[0] - x[0].mean(0),)),
    "backward": lambda m: m.register_full_backward_pre_hook(lambda _, g: (g[0] / len(g[0]),)),
    "of all modules": lambda _: nn.modules.module.register_module_forward_hook(
        lambda _, x, out: None
    ),
}


@pytest.mark.parametrize("when", ["before the engine", "later"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_the_model_are_refused(kind, when):
    model = net()
    optimizer, engine = None, None
    if when == "later":
        model, optimizer, engine = attached(model)
    handle = HOOKS[kind](model)
    try:
        with pytest.raises(PrivacyError, match="the model has hooks"):
            losses(attached(model)[0] if engine is None else model, *dataset()[:12])
    finally:
        handle.remove()
    if engine is not None:
        optimizer.step(loss=losses(model, *dataset()[:12]))
        assert engine.taken == 1


def test_a_call_of_its_own_is_refused():
    class Own(nn.Sequential):
        def __call__(self, x):
            return super().__call__(x) / len(x)

    with pytest.raises(PrivacyError, match="__call__ of its own"):
        attached(Own(net()))
