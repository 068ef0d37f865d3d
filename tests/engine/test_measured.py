"""The engine measures what one example adds: of the first batch of each kind, and rarely after."""

import pytest
import torch
from loops import attached, dataset, losses, net

from sfumato.clipping import sums
from sfumato.engine import recorder
from sfumato.errors import PrivacyError

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


def lengthened(monkeypatch):
    """The planted bug: between norms and sums everything gets longer."""
    right = sums._add_up
    monkeypatch.setattr(
        sums, "_add_up", lambda *a, **k: {n: 1.5 * t for n, t in right(*a, **k).items()}
    )


@pytest.mark.parametrize("examples", [1, 12])
def test_a_sum_longer_than_its_norms_is_refused_at_the_first_step(examples, monkeypatch):
    model, optimizer, engine = attached(net(), max_grad_norm=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(recorder, "admit", lambda *_: None)
    lengthened(monkeypatch)
    x, y = dataset()[:examples]
    with pytest.raises(PrivacyError, match="beyond the bound"):
        optimizer.step(loss=losses(model, x, y))
    assert engine.taken == 0
    assert not engine.ledger.releases
    assert all(map(torch.equal, before, model.parameters()))


def test_to_measure_changes_nothing_of_the_step(monkeypatch):
    left = []
    for asked in (False, True):
        monkeypatch.setattr(recorder, "contributions_due", lambda _, asked=asked: asked)
        model, optimizer, _ = attached(net(), noise_multiplier=0.0, target_epsilon=None)
        x, y = dataset()[:12]
        for _ in range(2):
            optimizer.step(loss=losses(model, x, y))
        left.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *left))


def test_a_later_batch_is_measured_too(monkeypatch):
    asked = []
    monkeypatch.setattr(recorder, "contributions_due", lambda before: asked.append(before) or True)
    model, optimizer, _ = attached(net(), max_grad_norm=0.01)
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x, y))
    lengthened(monkeypatch)
    with pytest.raises(PrivacyError, match="beyond the bound"):
        optimizer.step(loss=losses(model, x, y))
    assert asked == [0, 1]
