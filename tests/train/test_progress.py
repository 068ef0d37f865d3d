"""How far a training is: rate and time left, also of one that goes on, and in other units."""

import pytest

from sfumato.train import progress as module
from sfumato.train.progress import progress


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
    assert told[-1] == "step 30/50  64 examples/s  loss 0.250  epsilon 3.00  20 s left"


def test_images_are_counted_without_a_loss_and_slow_ones_are_not_rounded_away(clock):
    told = []
    tell = progress(100, 40, None, told.append, unit="images", counted="image")
    clock[0] += 20
    tell(44, {"batch": 4.0})
    assert told == ["image 44/100  0.2 images/s  280 s left"]
