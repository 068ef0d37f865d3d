"""No pass of a private batch writes to a buffer, whenever a model would like to."""

import copy

import pytest
import torch
from loops import attached, dataset, losses
from torch import nn

from sfumato.clipping.admit import admit
from sfumato.clipping.buffers import Buffers
from sfumato.clipping.clip import GradientClipper
from sfumato.errors import PrivacyError, UnsupportedLayer

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


class Keeping(nn.Module):
    """Writes to a buffer `when` it is told to, in the way that `write` says."""

    mean: torch.Tensor

    def __init__(self, when, write=lambda self, new: self.mean.copy_(new)):
        super().__init__()
        self.layer, self.when, self.write, self.calls = nn.Linear(64, 3), when, write, 0
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        self.calls += 1
        x = x.flatten(1)
        if self.when(self):
            self.write(self, x.detach().mean(dim=0))
        return self.layer(x)


def replace(self, new):
    self.mean = new


WRITES = {
    "in place": lambda self, new: self.mean.copy_(new),
    "aside": lambda self, new: self.mean.data.copy_(new),
    "another tensor": replace,
    "a buffer more": lambda self, new: self.register_buffer("seen", new),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_a_later_pass_writes_is_refused(write):
    model, optimizer, engine = attached(Keeping(lambda self: self.calls > 60, WRITES[write]))
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x, y))
    model.calls = 100
    with pytest.raises(UnsupportedLayer, match=r'writes to the buffer "(mean|seen)"'):
        optimizer.step(loss=losses(model, x, y))
    assert engine.taken == 1
    assert not model.mean.any(), "it is put back"


@pytest.mark.parametrize("gradients", [False, True])
def test_a_trial_is_made_with_gradients_and_without(gradients):
    model = Keeping(lambda _: torch.is_grad_enabled() == gradients)
    x, y = dataset()[:3]
    with pytest.raises(UnsupportedLayer, match='buffer "mean"'):
        admit(GradientClipper(model), losses, (x, y), 3)


def test_a_pass_without_gradients_is_watched_in_training_mode():
    model, _, _ = attached(Keeping(lambda self: self.training))
    with torch.no_grad(), pytest.raises(UnsupportedLayer, match='buffer "mean"'):
        model(dataset()[:12][0])
    model.eval()(dataset()[:12][0])


def test_what_a_backward_pass_writes_is_refused():
    class Hooked(Keeping):
        def forward(self, x):
            self.calls += 1
            out = super().forward(x)
            if self.calls > 60:
                out.register_hook(lambda g: self.mean.add_(g.abs().sum()).new_zeros(g.shape))
            return out

    model, optimizer, _ = attached(Hooked(lambda _: False))
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x, y))
    model.calls = 100
    with pytest.raises(UnsupportedLayer, match='buffer "mean"'):
        optimizer.step(loss=losses(model, x, y))


SAME = {
    "in place": lambda self, _: self.mean.copy_(torch.zeros(64)),
    "another tensor": lambda self, _: replace(self, torch.zeros(64)),
    "not a number": lambda self, _: self.mean.mul_(1),
}


@pytest.mark.parametrize("write", SAME)
def test_a_table_that_is_written_anew_with_what_it_held_is_no_reason_to_refuse(write):
    model = Keeping(lambda _: True, SAME[write])
    if write == "not a number":
        model.mean[0] = torch.nan
    model, optimizer, engine = attached(model, ema=0.5)
    x, y = dataset()[:12]
    for _ in range(3):
        optimizer.step(loss=losses(model, x, y))
        copy.deepcopy(model)
    assert engine.taken == 3


def test_between_passes_buffers_are_the_users_own():
    model, optimizer, engine = attached(Keeping(lambda _: False))
    x, y = dataset()[:12]
    for number in range(3):
        optimizer.step(loss=losses(model, x, y))
        model.mean.fill_(number)
        model.mean.data.add_(1)
        model.load_state_dict({**model.state_dict(), "mean": torch.full((64,), 7.0)})
    assert engine.taken == 3


def test_values_are_looked_at_where_versions_cannot_tell(monkeypatch):
    model = Keeping(lambda _: False)
    buffers = Buffers(model)
    monkeypatch.setattr("sfumato.clipping.buffers.BufferVersion.equals", lambda *_: False)
    with pytest.raises(UnsupportedLayer, match='buffer "mean"'):
        buffers.check(values=True)


WRITTEN = {
    "frozen": lambda self, new: self.kept.data.copy_(new),
    "another tensor": lambda self, new: setattr(self, "kept", nn.Parameter(new, False)),
    "trained, by .data": lambda self, new: self.layer.weight.data[0].copy_(new),
}


@pytest.mark.parametrize("write", WRITTEN)
def test_what_a_pass_writes_to_a_parameter_is_refused(write):
    model = Keeping(lambda self: self.calls > 60, WRITTEN[write])
    model.kept = nn.Parameter(torch.zeros(64), requires_grad=False)
    model, optimizer, engine = attached(model)
    model.calls = 100
    x, y = dataset()[:12]
    with pytest.raises((UnsupportedLayer, PrivacyError), match="parameter"):
        optimizer.step(loss=losses(model, x, y))
    assert not engine.ledger.releases


def test_whichever_call_of_the_first_step_writes_nothing_of_it_is_left():
    """The model is also run to be surveyed, on some of the same images; trials run copies of it."""
    x, y = dataset()[:12]
    model, optimizer, _ = attached(Keeping(lambda _: False))
    optimizer.step(loss=losses(model, x, y))
    refused = 0
    for call in range(1, model.calls + 1):
        found, optimizer, _ = attached(Keeping(lambda self, call=call: self.calls == call))
        try:
            optimizer.step(loss=losses(found, x, y))
        except UnsupportedLayer:
            refused += 1
        assert not found.mean.any(), call
    assert refused > model.calls // 2
