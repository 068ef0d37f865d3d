"""How far a training is: rate, time left and cost, also of one that goes on, in any units."""

from dataclasses import replace

import pytest

from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.releases import Release
from sfumato.training import progress as module
from sfumato.training.progress import price_list, progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_rate_and_time_left_are_those_of_this_start(clock):
    told = []
    tell = progress(50, 10, lambda step: step / 10, told.append)
    for step in range(11, 31):
        clock[0] += 1
        tell(step, {"batch": 64.0, "loss": 0.25})
    assert len(told) == 4, "it speaks every five seconds"
    before, private, after = told[-1].partition("private:")
    assert before.split() == ["step", "30/50", "epsilon", "3.00", "20", "s", "left"]
    assert private, "those who see the screen are told"
    assert after == " loss 0.250, 64 examples/s"


def test_images_are_counted_without_a_loss_and_slow_ones_are_not_rounded_away(clock):
    told = []
    tell = progress(100, 40, None, told.append, unit="images", counted="image")
    clock[0] += 20
    tell(44, {"batch": 4.0})
    assert told == ["image 44/100  280 s left  0.2 images/s"]


def test_the_epsilon_shown_is_that_of_the_ledger_when_the_step_is_taken():
    plan = Plan(noise_multiplier=1.5, expected_batch=50, rate=0.05, steps=20, noise_decay=0.8)
    ledger = Ledger(LedgerHeader(data="d", delta=1e-5))
    before = Ledger(LedgerHeader(data="d", delta=1e-5))
    before.charge(Release(stage="train", noise_multiplier=6.0))
    ledger.inherit(before)
    for step in range(8):
        ledger.charge(plan.release("train", step))
    # Begun again after step 5: step 5 was taken with other sums, and pays again.
    ledger = Ledger.from_records(ledger.records())
    ledger.charge(replace(plan.release("train", 5), tag="another"))
    shown = price_list(plan, ledger, "train")
    assert shown is not None
    assert shown(6) == shown(8) == pytest.approx(ledger.epsilon(), rel=1e-3)
    for step in range(8, 20):
        ledger.charge(plan.release("train", step))
    assert shown(20) == pytest.approx(ledger.epsilon(), rel=1e-3)
