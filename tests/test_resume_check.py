"""Settings of a run: free until something was made with them, guarded ever after."""

import json
import os
from dataclasses import dataclass
from typing import ClassVar

import pytest

from sfumato.errors import RunError
from sfumato.runs import open_run


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    MAY_CHANGE: ClassVar = ("device",)
    read_first: ClassVar = {"draw": ("data", "inner"), "guide": ("weight",), "train": ("epsilon",)}

    data: str = "digits"
    inner: Inner = Inner()
    weight: float = 0.0
    epsilon: float | None = None
    device: str = "cpu"
    unlisted: int = 0


def begin(out, *stages, config=None):
    """A run in which these stages have begun."""
    with open_run(config or Config(), verb="warmup", out=out) as run:
        for stage in stages:
            run.stage(stage).measure(0, loss=1.0)
    return out


def kept(out):
    return json.loads((out / "config.json").read_text())["config"]


def test_a_setting_may_change_until_a_stage_reads_it(tmp_path):
    out = begin(tmp_path / "run", "draw")
    open_run(Config(epsilon=3.0, weight=1.0), verb="warmup", out=out).close()
    assert (kept(out)["epsilon"], kept(out)["weight"]) == (3.0, 1.0)
    begin(out, "train", config=Config(epsilon=3.0, weight=1.0))
    with pytest.raises(RunError, match=r"epsilon: 3.0 -> 2.0 \(the stage train has used it\)"):
        open_run(Config(epsilon=2.0, weight=1.0), verb="warmup", out=out)
    assert kept(out)["epsilon"] == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "mnist"}, r"config\.data: .* \(the stage draw has used it\)"),
        ({"inner": Inner(width=8)}, r"config\.inner\.width: 4 -> 8 \(the stage draw has used it\)"),
        ({"weight": 1.0}, r"config\.weight: .* \(the stage guide has used it\)"),
        ({"epsilon": 3.0}, r"config\.epsilon: .* \(the stage train has used it\)"),
        ({"unlisted": 1}, r"config\.unlisted: 0 -> 1\n"),
    ],
)
def test_a_stage_that_has_begun_guards_its_settings_and_all_before(tmp_path, change, words):
    out = begin(tmp_path / "run", "draw", "train")  # the guide was left out
    with pytest.raises(RunError, match=words):
        open_run(Config(**change), verb="warmup", out=out)
    assert kept(out) == kept(begin(tmp_path / "other"))


def test_a_setting_that_no_stage_lists_is_guarded_from_the_first(tmp_path):
    out = begin(tmp_path / "run", "draw")
    with pytest.raises(RunError, match="unlisted"):
        open_run(Config(unlisted=1, epsilon=3.0), verb="warmup", out=out)
    assert kept(out)["epsilon"] is None
    with pytest.raises(RunError, match=r"is a run of sfumato warmup\. Choose another --out\.$"):
        open_run(Config(), verb="train", out=out)


def test_what_a_refused_order_left_in_a_stage_goes_with_its_settings(tmp_path):
    out = begin(tmp_path / "run", "draw")
    with open_run(Config(epsilon=1.0), verb="warmup", out=out) as run:
        stage = run.stage("train")
        stage.write_ledger({"header": {}})
        stage.secret(lambda: b"s" * 32)
    with open_run(Config(epsilon=1.0), verb="warmup", out=out) as run:
        assert run.stage("train").ledger_records()
    with open_run(Config(epsilon=2.0), verb="warmup", out=out) as run:
        assert not run.stage("train").ledger_records()
        assert run.stage("train").secret(lambda: b"t" * 32) == b"t" * 32
        run.stage("train").write_ledger({"header": {}})
        run.stage("train").write_ledger({"event": {}})
    with pytest.raises(RunError, match="the stage train has used it"):
        open_run(Config(epsilon=3.0), verb="warmup", out=out)


def test_settings_change_whole_or_not_at_all(tmp_path, monkeypatch):
    out = begin(tmp_path / "run", "draw")

    def fail(*_):
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="power cut"):
            open_run(Config(epsilon=3.0), verb="warmup", out=out)
    assert kept(out)["epsilon"] is None
    open_run(Config(epsilon=3.0), verb="warmup", out=out).close()
    assert kept(out)["epsilon"] == 3.0


def test_without_a_directory_only_the_same_settings_go_on(tmp_path):
    with open_run(Config(), verb="warmup", root=tmp_path) as first:
        first.stage("draw").measure(0, loss=1.0)
    assert open_run(Config(epsilon=3.0), verb="warmup", root=tmp_path).path != first.path
    assert open_run(Config(device="cuda"), verb="warmup", root=tmp_path).path == first.path
