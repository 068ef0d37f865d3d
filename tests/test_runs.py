import errno
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from contents import summaries
from synced import Synced

from sfumato.errors import RunError
from sfumato.files import append_line, atomic, read_lines
from sfumato.runs import Run, open_run


@dataclass(frozen=True, kw_only=True)
class Config:
    epsilon: float = 1.0
    steps: int = 3


def test_a_run_keeps_its_config_and_its_summary(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    assert not run.finished
    run.finish({"epsilon": float("inf")})
    assert run.finished
    config = json.loads((run.path / "config.json").read_text())
    assert config == {"version": 2, "verb": "train", "config": {"epsilon": 1.0, "steps": 3}}
    assert run.summary == {"epsilon": "inf"}


def test_a_changed_config_is_refused_with_the_fields_that_differ(tmp_path):
    with open_run(Config(), verb="train", out=tmp_path / "run") as run:
        run.measure(0, lr=1.0)
    with pytest.raises(RunError, match=r"config.epsilon: 1.0 -> 2.0"):
        open_run(Config(epsilon=2.0), verb="train", out=tmp_path / "run")
    with pytest.raises(RunError, match=r"is a run of sfumato train\. Choose"):
        open_run(Config(), verb="audit", out=tmp_path / "run")
    assert open_run(Config(), verb="train", out=tmp_path / "run").path == tmp_path / "run"


def test_the_same_command_goes_on_with_the_unfinished_run(tmp_path):
    first = open_run(Config(), verb="train", root=tmp_path)
    first.close()
    other = open_run(Config(steps=9), verb="train", label="digits-eps3", root=tmp_path)
    assert other.path.name.startswith("train-digits-eps3-2")
    again = open_run(Config(), verb="train", root=tmp_path)
    assert again.path == first.path != other.path
    again.finish({})
    again.close()
    assert open_run(Config(), verb="train", root=tmp_path).path != first.path


def test_two_processes_do_not_share_a_run(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    with pytest.raises(RunError, match="in use"):
        open_run(Config(), verb="train", out=tmp_path / "run")
    run.close()
    open_run(Config(), verb="train", out=tmp_path / "run")


def test_a_filesystem_that_cannot_lock_is_not_taken_for_a_busy_run(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", cannot)
    with pytest.raises(RunError, match=r"cannot lock files \(No locks available\).* --out"):
        open_run(Config(), verb="train", out=tmp_path / "run")


def test_a_folder_with_other_things_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="holds no run"):
        open_run(Config(), verb="train", out=tmp_path)
    with pytest.raises(RunError, match="is a file"):
        open_run(Config(), verb="train", out=tmp_path / "thesis.tex")


def test_a_run_that_has_not_begun_takes_new_settings(tmp_path):
    open_run(Config(epsilon=-1.0), verb="train", out=tmp_path / "run").close()
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    assert json.loads((run.path / "config.json").read_text())["config"]["epsilon"] == 1.0


def test_a_crash_at_the_very_start_leaves_a_directory_that_works(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".config.json.77.draft").touch()
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    assert not list(run.path.glob(".*.draft"))


def test_drafts_that_a_crash_left_in_folders_below_are_removed(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    places = [run.path / "samples", run.private / "features", run.stage("heads").path / "pictures"]
    for place in places:
        place.mkdir()
    drafts = [place / ".picture.png.77.draft" for place in places]
    for draft in drafts:
        draft.touch()
    run.close()
    open_run(Config(), verb="train", out=tmp_path / "run").close()
    assert not any(draft.exists() for draft in drafts)


def test_a_draft_that_is_a_folder_is_removed_with_what_is_in_it(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    draft = run.stage("heads").path / ".shard-0000-of-0001.draft"
    draft.mkdir()
    for name in (".lock", "members.npy", ".weights.npy.77.draft"):
        (draft / name).touch()
    run.close()
    open_run(Config(), verb="train", out=tmp_path / "run").close()
    assert not draft.exists()


def test_one_damaged_run_does_not_stop_others(tmp_path):
    with open_run(Config(), verb="train", root=tmp_path) as run:
        run.measure(0, lr=1.0)
    (run.path / "config.json").write_text("{")
    assert open_run(Config(), verb="train", root=tmp_path).path != run.path


def test_a_run_that_lost_its_secret_does_not_release_again(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    run.secret(lambda: b"s" * 32)
    run.write_ledger({"header": {}})
    run.write_ledger({"event": {}})
    (run.private / "secret.key").unlink()
    with pytest.raises(RunError, match="unpaid release"):
        run.secret(lambda: b"t" * 32)


def test_a_finished_stage_loses_its_secret_even_if_it_was_cut(tmp_path):
    run = open_run(Config(), verb="release", out=tmp_path / "run")
    stage = run.stage("teacher")
    stage.secret(lambda: b"s" * 32)
    stage.write_json("done.json", {})
    run.finish({})
    assert not (stage.path / "private" / "secret.key").exists()


def test_a_file_is_on_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("name"), replace(a, b))[1])
    with atomic(tmp_path / "model") as file:
        file.write(b"new")
    assert order == ["sync", "name", "sync"]


def test_a_line_of_the_ledger_is_on_disk_when_it_is_written(tmp_path, monkeypatch):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    path, synced = run.path / "ledger.jsonl", Synced(monkeypatch)
    run.write_ledger({"header": {}})
    assert synced.holds(path)
    assert synced.holds(run.path), "a new file has a name there, too"
    for step in range(3):
        run.write_ledger({"event": {"step": step}})
        assert synced.holds(path)
        run.write_ledger({"stage": "train", "step": step, "tag": "late"})  # it may wait
    assert len(read_lines(path)) == 7


def test_a_full_disk_is_named_with_the_file_that_did_not_fit(tmp_path, monkeypatch):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    for name, write in (
        ("log.txt", lambda: run.log("a line")),
        ("ledger.jsonl", lambda: run.write_ledger({"kind": "header"})),
        ("metrics.jsonl", lambda: run.measure(1, lr=0.1)),
    ):
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left") as caught:
            write()
        assert caught.value.filename == str(run.path / name)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run.write_json("done.json", {})
    assert caught.value.filename == str(run.path / "done.json")
    assert not list(run.path.glob(".*.draft"))


def test_checkpoints_tell_apart_what_is_named_alike(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    one, two = torch.zeros(2), torch.ones(2)
    state = {"a": {"b": one}, "a/b": two, "n": {1: one, "1": two}, "t": (1, [2, (3,)])}
    run.save_checkpoint(state)
    found = run.load_checkpoint()
    assert found["a/b"].tolist() == [1, 1]
    assert found["a"]["b"].tolist() == [0, 0]
    assert found["n"][1].tolist() == [0, 0]
    assert found["t"] == (1, [2, (3,)])


def test_metrics_lost_in_a_power_cut_are_not_filled_with_zeros(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    run.measure(0, loss=1.0)
    run.measure(0, private=True, loss=1.0)
    run.save_checkpoint({"step": 1})
    (run.path / "metrics.jsonl").write_bytes(b"")
    run.load_checkpoint()
    assert (run.path / "metrics.jsonl").read_bytes() == b""
    assert len(read_lines(run.private / "metrics.jsonl")) == 1


def test_a_damaged_config_is_named(tmp_path):
    with open_run(Config(), verb="train", out=tmp_path / "run") as run:
        run.measure(0, lr=1.0)
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config.json is damaged"):
        open_run(Config(), verb="train", out=tmp_path / "run")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model"
    with atomic(path) as file:
        file.write(b"old")

    def fail():
        with atomic(path) as file:
            file.write(b"half of the new")
            assert path.read_bytes() == b"old"
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model"]


def test_a_torn_last_line_does_not_count_and_is_mended(tmp_path):
    path = tmp_path / "ledger.jsonl"
    append_line(path, {"a": 1}, durable=True)
    with path.open("a") as file:
        file.write('{"a": 2')
    assert read_lines(path) == [{"a": 1}]
    assert path.read_text().endswith('{"a": 2')
    assert read_lines(path, repair=True) == [{"a": 1}]
    append_line(path, {"a": 3}, durable=True)
    assert read_lines(path) == [{"a": 1}, {"a": 3}]


def test_a_line_damaged_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(RunError, match="damaged"):
        read_lines(path)


def test_a_checkpoint_brings_everything_back(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    assert run.load_checkpoint() is None
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    generator = torch.Generator().manual_seed(4)

    def step(model, optimizer, average, generator):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)

    step(model, optimizer, average, generator)
    run.save_checkpoint(
        {
            "step": 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "average": average.state_dict(),
            "generator": generator.get_state(),
        }
    )
    state = run.load_checkpoint()
    other = torch.nn.Linear(3, 2)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    other_average = torch.optim.swa_utils.AveragedModel(other)
    other_generator = torch.Generator()
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    other_average.load_state_dict(state["average"])
    other_generator.set_state(state["generator"])
    assert state["step"] == 1
    for _ in range(3):
        step(model, optimizer, average, generator)
        step(other, other_optimizer, other_average, other_generator)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(average.module.weight, other_average.module.weight)


def test_a_checkpoint_refuses_what_it_cannot_bring_back(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    with pytest.raises(TypeError, match="/model"):
        run.save_checkpoint({"model": torch.nn.Linear(1, 1)})
    assert run.load_checkpoint() is None


def test_metrics_after_the_checkpoint_are_forgotten(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    run.measure(0, loss=1.0)
    run.save_checkpoint({"step": 1})
    run.measure(1, loss=0.5)
    run.load_checkpoint()
    run.measure(1, loss=0.5)
    assert [line["step"] for line in read_lines(run.path / "metrics.jsonl")] == [0, 1]


def test_the_secret_is_kept_while_it_is_needed_and_no_longer(tmp_path):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    assert run.secret(lambda: b"s" * 32) == run.secret(lambda: b"t" * 32) == b"s" * 32
    path = run.private / "secret.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.private.stat().st_mode) == 0o700
    run.save_checkpoint({"step": 1})
    run.finish({})
    assert not path.exists()
    assert not (run.private / "checkpoint.safetensors").exists()


def test_a_summary_says_where_its_run_is_and_not_where_it_was_made(tmp_path):
    run = open_run(Config(), verb="release", out=tmp_path / "jane" / "run")
    stage = run.stage("match")
    said = {"run": str(run.path), "text": f"  pictures  {run.path}/private/a.png: do not share"}
    assert stage.finish({"bundle": str(run.path / "bundle")}) == {"bundle": f"{run.path}/bundle"}
    assert run.finish({**said, "n": 2, "rows": [str(run.path)]}) == {
        **said, "n": 2, "rows": [str(run.path)],
    }  # fmt: skip
    assert "jane" not in summaries(run.path)
    (tmp_path / "jane").rename(tmp_path / "joe")
    moved = Run(tmp_path / "joe" / "run")
    assert moved.summary["text"] == f"  pictures  {moved.path}/private/a.png: do not share"
    assert moved.stage("match").summary == {"bundle": f"{moved.path}/bundle"}


def test_words_that_are_like_the_path_of_a_run_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("train", "a/train"):
        run = open_run(Config(), verb="train", out=Path(out))
        said = {"text": "train, b/a/train-2 and /a/train are others", "data": "digits-train"}
        assert run.finish(said) == json.loads((run.path / "done.json").read_text()) == said


def test_stages_are_runs_of_their_own(tmp_path):
    run = open_run(Config(), verb="release", out=tmp_path / "run")
    teacher = run.stage("teacher")
    teacher.finish({"epsilon": 1})
    assert run.stage("teacher").finished
    assert not run.stage("student").finished
    assert (run.path / "stages" / "teacher" / "done.json").exists()


def test_messages_go_to_the_log_and_to_whoever_listens(tmp_path):
    heard = []
    run = open_run(Config(), verb="train", out=tmp_path / "run", say=heard.append)
    run.log("half way")
    assert heard == ["half way"]
    assert "half way" in (run.path / "log.txt").read_text()


@pytest.mark.parametrize("damage", ["gone", "shortened", "changed"])
def test_a_checkpoint_is_not_resumed_without_the_ledger_that_paid_for_it(tmp_path, damage):
    run = open_run(Config(), verb="train", out=tmp_path / "run")
    for step in range(3):
        run.write_ledger({"event": {"step": step}})
    run.save_checkpoint({"step": 3})
    run.write_ledger({"event": {"step": 3}})
    assert run.load_checkpoint() == {"step": 3}
    ledger = run.path / "ledger.jsonl"
    text = {"gone": "", "shortened": ledger.read_text()[:30], "changed": "{}\n" * 40}[damage]
    ledger.write_text(text)
    with pytest.raises(RunError, match="paid from"):
        run.load_checkpoint()
