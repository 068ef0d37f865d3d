"""What a step knows early, and what the ledger is told late."""

import pytest
import torch
from interpreted import interpret_kernels
from people import portraits
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.commands.train.command import Config
from sfumato.errors import PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.privacy.session_key import SessionKey
from sfumato.runs import open_run
from sfumato.training import private_step as steps
from sfumato.training.batch_stats import (
    BROKEN,
    CHUNKS,
    CLIPPED,
    EXAMPLES,
    LOSS,
    BatchStats,
    averages_of,
)
from sfumato.training.captured_clip import captured
from sfumato.training.cuda_graph import WARM
from sfumato.training.fit import TrainState, fit
from sfumato.training.inputs import Inputs
from sfumato.training.private_step import PrivacyContext, private_step
from sfumato.training.process_group import ProcessGroup
from sfumato.training.setup import make_schedule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def context(device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3)).to(device)
    inputs = Inputs(portraits(), torch.device(device), (0.5,), (0.5,), seed=3)
    return model, GradientClipper(model, clipping=Clipping(max_norm=2.0)), inputs


@pytest.mark.parametrize("device", DEVICES)
def test_a_tally_is_that_of_all_chunks_captured_or_not(device):
    _, clipper, inputs = context(device)
    clip, stats = captured(clipper, clipper.clip, inputs), BatchStats(torch.device(device))
    mask = torch.tensor([True, True, False, True], device=device)
    for turn in range(WARM + 3):
        stats.begin()
        wanted = torch.zeros(5)
        for part in range(1 + turn % 3):
            x, y = inputs.trial(4)
            tensors = (x * (1 + turn + part), y)
            found = clipper.clip(inputs.losses, tensors, 4, mask)
            clip(inputs.losses, tensors, 4, mask, tell=stats)
            clipped = int((found.factors[0] < 1)[mask].sum())
            wanted += torch.tensor([float(found.losses[mask].sum()), clipped, 3, 0, 1])
        numbers = stats.read(1 + turn % 3, ProcessGroup())
        assert numbers == pytest.approx(wanted.tolist(), rel=1e-4)
    assert wanted[CLIPPED] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_examples_that_are_not_finite_are_counted_even_where_they_do_not_count(device):
    _, clipper, inputs = context(device)
    stats = BatchStats(torch.device(device))
    for there in (True, False):
        x, y = inputs.trial(4)
        x[1] = torch.nan
        stats.begin()
        mask = torch.tensor([True, there, True, True], device=device)
        clipper.clip(inputs.losses, (x, y), 4, mask, tell=stats)
        numbers = stats.read(1, ProcessGroup())
        assert (numbers[BROKEN], numbers[EXAMPLES], numbers[CHUNKS]) == (1, 3 + there, 1)
        assert torch.tensor(numbers[LOSS]).isfinite() == (not there)


def test_a_chunk_that_nobody_told_of_is_noticed():
    _, clipper, inputs = context()
    stats = BatchStats(torch.device("cpu"))
    assert stats.read(0, ProcessGroup()) == [0.0] * 5
    clipper.clip(inputs.losses, inputs.trial(4), 4, tell=stats)
    with pytest.raises(AssertionError, match="not told of"):
        stats.read(2, ProcessGroup())


def test_an_empty_batch_has_averages_too():
    assert averages_of([0.0] * 5) == {"loss": 0.0, "clipped": 0.0, "batch": 0.0}


@pytest.fixture
def kernels(monkeypatch):
    """Releases as on a GPU, in Triton's interpreter."""
    interpret_kernels(monkeypatch)


def batch(step, *parts):
    every = (torch.ones(len(part), dtype=torch.bool) for part in parts)
    return Batch(step, tuple(map(Chunk, map(torch.tensor, parts), every)))


def test_to_check_contributions_changes_nothing_of_the_step(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3))
    _, _, inputs = context()
    plan = Plan(noise_multiplier=0.0, expected_batch=4.0, steps=9, max_norm=2.0)
    secret, found = SessionKey.from_seed(0), []
    header = LedgerHeader(data="d", delta=1e-5, fixed_seed=True, secret=secret.commitment)
    for checked in (False, True):
        monkeypatch.setattr(steps, "contributions_due", lambda _, checked=checked: checked)
        clipper = GradientClipper(model, clipping=Clipping(max_norm=2.0))
        step = private_step(clipper, inputs, PrivacyContext(plan, Ledger(header), secret))
        numbers = step(batch(0, [0, 1, 2], [3, 4]))
        found.append((numbers, [p.grad.clone() for p in model.parameters()]))
    (one, gradients), (other, again) = found
    assert one == other
    assert all(torch.equal(*pair) for pair in zip(gradients, again, strict=True))


@pytest.mark.usefixtures("kernels")
def test_a_killed_step_whose_tag_was_not_told_is_lost_and_the_others_are_repeated():
    model, clipper, inputs = context()
    plan = Plan(noise_multiplier=1.0, expected_batch=4.0, steps=9, max_norm=2.0)
    secret, written = SessionKey.draw(), []
    header = LedgerHeader(data="d", delta=1e-5, secret=secret.commitment)
    batches = [batch(0, [0, 1], [2]), batch(1), batch(2, [5, 6, 7])]

    def gradients(ledger):
        step = private_step(clipper, inputs, PrivacyContext(plan, ledger, secret))
        for each in batches:
            step(each)
            yield [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    first = list(gradients(Ledger(header, written.append)))
    assert all(part is not None for parts in first for part in parts)
    # Killed: nobody has asked for the last tag.
    resumed = Ledger.from_records(written)
    again = list(gradients(resumed))
    for one, other in zip(first[:2], again[:2], strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert again[2] == [None] * 4
    assert len(resumed.releases) == 3
    assert resumed.epsilon() == Ledger.from_records(written).epsilon()


@pytest.mark.usefixtures("kernels")
def test_weights_behind_a_sum_that_is_not_finite_are_never_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "contributions_due", lambda _: False)
    model, clipper, inputs = context()
    plan = Plan(noise_multiplier=1.0, expected_batch=4.0, steps=4, max_norm=2.0)
    secret = SessionKey.draw()
    header = LedgerHeader(data="d", delta=1e-5, secret=secret.commitment)
    batches = [batch(step, [0, 1, 2]) for step in range(4)]

    def train(run, *, spoilt):
        def clip(*given, tell):
            found = clipper.clip(*given, tell=tell)
            if len(taken) == spoilt:  # a sum that overflows, of norms that are fine
                found.total["3.bias"][0] = torch.inf
            taken.append(found)
            return found

        taken = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_state = TrainState(model, optimizer, make_schedule(optimizer, "constant", 4))
        train_state.load(run.load_checkpoint())
        ledger = Ledger.resume(run.ledger_records(), header, run.write_ledger)
        step = private_step(clipper, inputs, PrivacyContext(plan, ledger, secret), clip=clip)
        fit(
            train_state, batches[train_state.step :], step, run, before_saving=ledger.settle,
            checkpoint_seconds=0.0,
        )  # fmt: skip
        return ledger

    with open_run(Config(epsilon=1.0), verb="train", out=tmp_path / "run") as run:
        with pytest.raises(PrivacyError, match="of train, step 2, are not finite"):
            train(run, spoilt=2)
        assert not all(p.isfinite().all() for p in model.parameters())
        ledger = train(run, spoilt=None)
        assert all(p.isfinite().all() for p in model.parameters())
    assert [release.step for release in ledger.releases] == [0, 1, 2, 3]
    assert [release.tag == "" for release in ledger.releases] == [False, False, True, False]
