"""What one example adds is measured on real batches: in the first step, and rarely after it."""

from dataclasses import replace

import pytest
import torch
from people import portraits
from torch import nn

from sfumato.clipping import admit, sums
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import CLIP_STYLES, Clipping
from sfumato.clipping.method_choice import MODES
from sfumato.data.augment import Augmentation
from sfumato.errors import PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.privacy.session_key import SessionKey
from sfumato.training import private_step as steps
from sfumato.training.inputs import Inputs
from sfumato.training.private_step import PrivacyContext, private_step


def batch(step, *parts):
    every = (torch.ones(len(part), dtype=torch.bool) for part in parts)
    return Batch(step, tuple(map(Chunk, map(torch.tensor, parts), every)))


class Context:
    """A private step of a small model, its ledger, and how often something was clipped in it."""

    def __init__(self, *, max_norm=0.01, mode="ghost_mixed", changes=None, **clipping):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(400, 3)
        )
        plain = Inputs(portraits(), torch.device("cpu"), (0.5,), (0.5,), seed=3)
        plan = Plan(noise_multiplier=1.0, expected_batch=12.0, steps=99, max_norm=max_norm)
        secret = SessionKey.draw()
        self.ledger = Ledger(LedgerHeader(data="d", delta=1e-5, secret=secret.commitment))
        self.clipper = GradientClipper(
            model, mode, clipping=Clipping(max_norm=max_norm, **clipping)
        )
        self.clips = 0
        inputs = replace(plain, **(changes or {}))
        paid = PrivacyContext(plan, self.ledger, secret)
        self.step = private_step(self.clipper, inputs, paid, clip=self._clip)

    def _clip(self, *given, **how):
        self.clips += 1
        return self.clipper.clip(*given, **how)


def lengthened(monkeypatch, by=1.5):
    """The planted bug: between norms and sums everything gets longer."""
    right = sums._add_up

    def add_up(*given, **how):
        return {name: by * total for name, total in right(*given, **how).items()}

    monkeypatch.setattr(sums, "_add_up", add_up)


@pytest.mark.parametrize("part", [[7], [0, 1, 2, 3]], ids=["one example", "four"])
def test_a_sum_longer_than_its_norms_is_refused_in_the_first_step(part, monkeypatch):
    context = Context()
    lengthened(monkeypatch)
    with pytest.raises(PrivacyError, match="beyond the bound"):
        context.step(batch(0, part))
    assert not context.ledger.releases
    assert all(p.grad is None for p in context.clipper.parameters.values())


def test_the_first_step_is_that_of_this_process_and_has_examples(monkeypatch):
    context = Context()
    lengthened(monkeypatch)
    context.step(batch(40))  # nobody was drawn
    with pytest.raises(PrivacyError, match="beyond the bound"):
        context.step(batch(41, [0, 1, 2]))


def test_later_steps_are_measured_rarely_at_times_that_nobody_can_foresee(monkeypatch):
    context = Context()
    context.step(batch(0, [0, 1], [2, 3]))
    assert context.clips == 2 + 2, "two examples, then the two chunks"
    asked = [admit.contributions_due(turn) for turn in range(1, 20_001)]
    assert 120 < sum(asked) < 290
    assert admit.contributions_due(0)
    lengthened(monkeypatch)
    monkeypatch.setattr(steps, "contributions_due", lambda before: before == 3)
    for number in (1, 2):
        context.step(batch(number, [0, 1], [2, 3]))
    with pytest.raises(PrivacyError, match="beyond the bound"):
        context.step(batch(3, [0, 1], [2, 3]))
    assert len(context.ledger.releases) == 3


SOUND = {
    "plain": {},
    **{mode: {"mode": mode} for mode in MODES},
    **{style: {"style": style} for style in CLIP_STYLES},
    "per layer": {"per_layer": True},
    "bfloat16": {"changes": {"precision": torch.bfloat16}},
    "views": {"changes": {"augmentation": Augmentation(crop=3, flip=True), "views": 3}},
    "hardly clipped": {"max_norm": 100.0},
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_steps_pass_at_every_batch(case, monkeypatch):
    monkeypatch.setattr(steps, "contributions_due", lambda _: True)
    context = Context(**SOUND[case])
    for number in range(6):
        context.step(batch(number, [5 * number + i for i in range(5)], [number]))
    assert len(context.ledger.releases) == 6


def test_an_example_that_is_not_finite_is_no_alarm(monkeypatch):
    monkeypatch.setattr(steps, "contributions_due", lambda _: True)
    context = Context()
    with torch.no_grad():
        context.clipper.model[0].weight[:] = 1e30
    context.step(batch(0, [0, 1, 2]))
    assert len(context.ledger.releases) == 1
