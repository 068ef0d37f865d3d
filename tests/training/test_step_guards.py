"""What a private step must not leave out: each test fails when that one line of it is removed."""

import threading
from dataclasses import dataclass, field, replace

import pytest
import torch
from oracle import norm_of
from people import portraits
from torch import nn

from sfumato.clipping.buffers import Buffers
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.errors import UnsupportedLayer
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.privacy.session_key import SessionKey
from sfumato.training import private_step as steps
from sfumato.training.inputs import Inputs
from sfumato.training.private_step import PrivacyContext, private_step
from sfumato.training.process_group import ProcessGroup

PLAN = Plan(noise_multiplier=0.0, expected_batch=4.0, steps=9, max_norm=0.1)


def inputs():
    return Inputs(portraits(), torch.device("cpu"), (0.5,), (0.5,), seed=3)


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3))


def batch(step, *parts):
    every = (torch.ones(len(part), dtype=torch.bool) for part in parts)
    return Batch(step, tuple(map(Chunk, map(torch.tensor, parts), every)))


def step_of(model, plan=PLAN, read=None, processes=None):
    secret = SessionKey.from_seed(0)
    header = LedgerHeader(data="d", delta=1e-5, fixed_seed=True, secret=secret.commitment)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=plan.max_norm))
    paid = PrivacyContext(plan, Ledger(header), secret)
    return private_step(clipper, read or inputs(), paid, processes=processes)


def test_each_step_clips_to_the_norm_bound_that_its_schedule_has_then():
    plan = replace(PLAN, clip_decay=0.1, expected_batch=1.0)
    model = linear()
    step = step_of(model, plan)
    for number in (0, 4, 8, 2):
        step(batch(number, [5]))
        added = norm_of({name: p.grad for name, p in model.named_parameters()})
        assert added == pytest.approx(plan.at(number).max_norm, rel=1e-4)
        assert added <= plan.at(number).max_norm
    assert plan.at(8).max_norm < 0.2 * plan.at(0).max_norm


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("look", ["is_due", "contributions_due"])
def test_what_checks_draw_moves_no_dropout_of_the_step(look, broken, monkeypatch):
    # A step that is taken again after a cut may be checked where it was not before, or not. With
    # another sum it would be paid again.
    read, found = inputs(), []
    odd, _ = read.tensors(Chunk(torch.tensor([3]), torch.ones(1, dtype=torch.bool)), 0)
    for number, due in enumerate((True, False)):
        monkeypatch.setattr(steps, "is_due", lambda *_, **__: False)
        monkeypatch.setattr(steps, "contributions_due", lambda _: False)
        monkeypatch.setattr(steps, look, lambda *_, due=due, **__: due)
        model = Dividing(odd if broken else odd + 1)
        model.body = nn.Sequential(nn.Dropout(0.5), model.body)
        step = step_of(model, read=read)
        torch.manual_seed(number)
        step(batch(0, [0, 1, 2], [3, 4]))
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.any()
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=0)


class Counting(nn.Module):
    """Keeps what it has seen in a buffer, from the pass on that it is told of."""

    def __init__(self, after):
        super().__init__()
        torch.manual_seed(0)
        self.last, self.after = nn.Linear(144, 3), after
        self.register_buffer("seen", torch.zeros(144))

    def forward(self, x):
        self.after -= 1
        if self.after < 0:
            self.seen += x.detach().flatten(1).sum(dim=0)
        return self.last(x.flatten(1))


def test_a_step_whose_passes_write_to_a_buffer_is_refused_and_not_charged():
    model = Counting(after=10**9)
    secret = SessionKey.draw()
    ledger = Ledger(LedgerHeader(data="d", delta=1e-5, secret=secret.commitment))
    plan = replace(PLAN, noise_multiplier=1.0)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.1))
    step = private_step(clipper, inputs(), PrivacyContext(plan, ledger, secret))
    step(batch(0, [0, 1, 2]))
    model.after = 0
    for parameter in model.parameters():
        parameter.grad = None
    with pytest.raises(UnsupportedLayer, match="seen"):
        step(batch(1, [3, 4]))
    assert len(ledger.releases) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.seen.any(), "what was private is taken out again"


def test_in_the_last_step_values_of_buffers_are_looked_at_on_a_gpu_too(monkeypatch):
    # What a replay writes there moves no version. On a CPU values are always looked at.
    asked, check = [], Buffers.check

    def listen(buffers, *, values=False):
        asked.append(values)
        check(buffers, values=values)

    monkeypatch.setattr(Buffers, "check", listen)
    step = step_of(linear())
    for number in (0, PLAN.steps - 2, PLAN.steps - 1):
        step(batch(number, [0, 1]))
    assert asked == [False, False, True]


class Meeting:
    """Where two threads meet that stand for two processes."""

    def __init__(self):
        self.barrier, self.boxes = threading.Barrier(2), [None, None]

    def exchange(self, rank, value):
        self.boxes[rank] = value
        self.barrier.wait(timeout=60)
        found = list(self.boxes)
        self.barrier.wait(timeout=60)
        return found


@dataclass(frozen=True)
class Thread(ProcessGroup):
    """A world whose processes are threads."""

    size: int = 2
    meeting: Meeting = field(default_factory=Meeting)

    def all_reduce(self, tensors):
        both = self.meeting.exchange(self.rank, {n: t.clone() for n, t in tensors.items()})
        for name, tensor in tensors.items():
            tensor.copy_(both[0][name] + both[1][name])

    def broadcast(self, tensors):
        first, _ = self.meeting.exchange(self.rank, {n: t.clone() for n, t in tensors.items()})
        for name, tensor in tensors.items():
            tensor.copy_(first[name])

    def agree(self, value):
        return self.meeting.exchange(self.rank, value)[0]


class Dividing(nn.Module):
    """One image, which another process may have, is divided by zero."""

    def __init__(self, broken):
        super().__init__()
        self.body, self.broken = linear(), broken

    def forward(self, x):
        same = (x.flatten(1) == self.broken.flatten(1)).all(dim=1)
        return self.body(x) / (~same)[:, None]


def test_when_one_process_meets_a_broken_example_all_sum_again_and_together():
    read = inputs()
    broken, _ = read.tensors(Chunk(torch.tensor([3]), torch.ones(1, dtype=torch.bool)), 0)
    drawn = batch(0, [0, 1], [2, 3])
    alone = Dividing(broken)
    step_of(alone, read=read)(drawn)
    models, meeting, found, problems = [Dividing(broken) for _ in (0, 1)], Meeting(), {}, []

    def process(rank):
        try:
            step_of(models[rank], read=read, processes=Thread(rank, meeting=meeting))(drawn)
            found[rank] = {name: p.grad for name, p in models[rank].named_parameters()}
        except Exception as problem:
            meeting.barrier.abort()
            problems.append(problem)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for name, parameter in alone.named_parameters():
        assert parameter.grad.isfinite().all()
        for rank in (0, 1):
            torch.testing.assert_close(found[rank][name], parameter.grad)
