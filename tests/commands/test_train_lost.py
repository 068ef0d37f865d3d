"""Steps of `sfumato train` that were paid for and lost in a crash: how many, and who is told."""

from dataclasses import replace

import pytest

from sfumato.commands.train import command as train
from sfumato.errors import RunError
from sfumato.files import read_json, read_lines
from sfumato.runs import Run, open_run

SETTINGS = train.Config(
    data="digits@0-2", image_size=8, model="group-cnn-small", device="cpu", epsilon=3.0,
    batch_size=200, steps=5, physical_batch_size=200,
)  # fmt: skip


def go(config, out):
    with open_run(config, verb="train", out=out, say=print) as run:
        return train.run(config, run)


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """A run that was killed in its fourth step, before its first checkpoint."""

    def advance(train_state):
        if train_state.step == 3:
            raise RunError("killed")
        train_state.optimizer.step()
        train_state.step += 1

    with monkeypatch.context() as patch:
        patch.setattr("sfumato.training.fit.TrainState.advance", advance)
        patch.setattr(Run, "save_checkpoint", lambda *_: None)
        with pytest.raises(RunError, match="killed"):
            go(SETTINGS, tmp_path / "run")
    return tmp_path / "run"


def test_steps_that_were_paid_and_lost_are_counted_and_told(killed, capsys):
    go(replace(SETTINGS, physical_batch_size=7), killed)
    assert "4 steps (a private count) were paid and had no effect" in capsys.readouterr().out
    assert read_json(killed / "private/scores.json")["steps_left_out"] == 4
    said = (killed / "log.txt").read_text()
    assert "private count" not in said + (killed / "done.json").read_text()
    assert "without a checkpoint yet: what was paid is not paid again. 4 steps from here on" in said
    assert len(read_lines(killed / "ledger.jsonl")) == 6


def test_steps_that_come_out_the_same_are_not_lost(killed, capsys):
    go(SETTINGS, killed)
    assert read_json(killed / "private/scores.json")["steps_left_out"] == 0
    assert "had no effect" not in capsys.readouterr().out


def test_the_first_checkpoints_come_early(tmp_path, monkeypatch):
    now, kept = [0.0], []
    monkeypatch.setattr("sfumato.training.fit.time.monotonic", lambda: now[0])

    def advance(train_state):
        now[0] += 1.5
        train_state.step += 1

    monkeypatch.setattr("sfumato.training.fit.TrainState.advance", advance)
    monkeypatch.setattr(Run, "save_checkpoint", lambda _, state: kept.append(state["step"]))
    go(replace(SETTINGS, steps=12, batch_size=20), tmp_path / "run")
    assert kept == [1, 3, 6, 12, 12]
