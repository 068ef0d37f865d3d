"""Examples are not mixed: asked of the batches themselves, at first and again by chance."""

import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset, losses, net, repeatable
from torch import nn
from torch.utils.checkpoint import checkpoint

from sfumato.clipping import mixing
from sfumato.engine import recorder
from sfumato.errors import ConfigError, PrivacyError, UnsupportedLayer

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")

MIXES = "loss of (one|an) example depends on"


class Mixing(nn.Module):
    """Mixes neighbours `when` it is told to, or asked to."""

    def __init__(self, when=lambda *_: False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.when = nn.Linear(64, 8), nn.Linear(8, 3), when

    def forward(self, x, mix=False, scale=1.0):
        self.features = self.body(x.flatten(1)).tanh() * scale
        if mix or self.when(self, x):
            self.features = self.features + self.features.roll(1, 0)
        return self.head(self.features)


@pytest.fixture
def always(monkeypatch):
    """Ask at every step."""
    monkeypatch.setattr(recorder, "is_due", lambda _: True)


def contrast(features):
    return F.cross_entropy(features @ features.T, torch.arange(len(features)), reduction="none")


def test_a_loss_on_features_that_a_model_keeps_aside_is_noticed():
    model, optimizer, engine = attached(Mixing())
    x, y = dataset()[:12]
    loss = losses(model, x, y) + contrast(model.features)
    with pytest.raises(PrivacyError, match=MIXES):
        optimizer.step(loss=loss)
    assert engine.taken == 0


@pytest.mark.parametrize("first", ["failed", "was of one example"])
def test_the_question_is_not_used_up_by_a_step_that(first):
    model, optimizer, _ = attached(Mixing())
    x, y = dataset()[:12]
    if first == "failed":
        with pytest.raises(ConfigError, match="one number for each"):
            optimizer.step(loss=losses(model, x, y).mean())
    else:
        optimizer.step(loss=losses(model, x[:1], y[:1]))
    out = model(x)
    with pytest.raises(PrivacyError, match=MIXES):
        optimizer.step(loss=contrast(out))


@pytest.mark.parametrize("what", ["an argument", "a mode"])
def test_a_branch_that_is_taken_later_is_examined_as_well(what):
    model = Mixing(lambda self, _: not self.head.training)
    model, optimizer, _ = attached(model)
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x, y))
    model.head.train(what == "an argument")
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        model(x, mix=what == "an argument")


WHEN = {
    "larger batches": lambda _, x: len(x) > 8,
    "values": lambda _, x: float(x.detach().mean()) > 10,
    "a switch": lambda self, _: hasattr(self, "switched"),
}


@pytest.mark.parametrize("when", WHEN)
def test_a_branch_that_a_trial_does_not_take_is_noticed(when, always):
    model, optimizer, engine = attached(Mixing(WHEN[when]))
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x[:6], y[:6]))
    model.switched = True
    with pytest.raises(PrivacyError, match=MIXES):
        optimizer.step(loss=losses(model, x + 20 * (when == "values"), y))
    assert engine.taken == 1


def test_batches_that_are_mixed_before_the_first_layer_are_noticed():
    class Centring(Mixing):
        def forward(self, x):
            return super().forward(x - x.mean(dim=0) * (len(x) > 8))

    model, optimizer, _ = attached(Centring())
    x, y = dataset()[:12]
    with pytest.raises(PrivacyError, match=MIXES):
        optimizer.step(loss=losses(model, x, y))


@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
@pytest.mark.parametrize("kind", ["plain", "checkpointed", "autocast"])
def test_a_question_moves_neither_the_sums_nor_anybodys_chance(kind, mode, monkeypatch):
    ways = {"ghost_clipping": mode != "non-ghost", "mixed": mode == "ghost_mixed"}

    def weights(asked):
        monkeypatch.setattr(recorder, "is_due", lambda _: asked)
        model = net()
        if kind == "checkpointed":
            inner = model[0].forward
            model[0].forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        model, optimizer, _ = attached(
            nn.Sequential(model, nn.Dropout(0.5)), **repeatable(), **ways
        )
        torch.manual_seed(1)
        x, y = dataset()[:12]
        x[3] = torch.inf
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                out = model(x)
            optimizer.step(loss=F.cross_entropy(out.float(), y, reduction="none"))
        return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.rand(3)

    for asked, quiet in zip(weights(True), weights(False), strict=True):
        assert torch.equal(asked, quiet)


def test_the_question_comes_at_first_and_then_ever_more_rarely():
    assert all(mixing.is_due(0) for _ in range(20))
    later = sum(mixing.is_due(10_000) for _ in range(5_000))
    assert 50 < later < 170  # one in fifty, give or take seven deviations
    assert not any(mixing.is_due(10**12, rarely=None) for _ in range(20))


def test_what_belongs_to_no_example_may_have_as_many_rows_as_a_batch(always):
    class Near(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 5)

        def forward(self, x, prototypes):
            return self.layer(x.flatten(1)) @ prototypes.T

    model, optimizer, engine = attached(Near())
    prototypes = torch.randn(8, 5)
    for count in (4, 8, 8, 6):
        x, y = dataset()[:count]
        out = model(x, prototypes)
        optimizer.step(loss=F.cross_entropy(out, y, reduction="none"))
    assert len(engine.ledger.releases) == 4
