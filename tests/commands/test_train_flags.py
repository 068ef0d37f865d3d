"""Every flag of `sfumato train` has its effect, and keeps its guarantee."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cuts import cut_in
from safetensors.torch import load_file

from sfumato.cli import parse
from sfumato.commands.train import command as train
from sfumato.errors import ConfigError, SfumatoWarning
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.runs import open_run
from sfumato.training import fit

SMALL = train.Config(epsilon=3.0, batch_size=60, steps=3, lr=0.5, noise_seed=1)


def run_train(out, config):
    with open_run(config, verb="train", out=out) as run:
        return train.run(config, run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("flags") / "plain"
    run_train(out, SMALL)
    return load_file(out / "model.safetensors"), read_lines(out / "ledger.jsonl")


CHANGES = {
    "clip": {"clip": "automatic"},
    "per_layer": {"per_layer": True},
    "momentum": {"momentum": 0.9},
    "weight_decay": {"weight_decay": 0.1},
    "optimizer": {"optimizer": "adamw", "lr": 0.01},
    "schedule": {"schedule": "cosine"},
    "flip": {"flip": True},
    "crop": {"crop": 3},
    "max_grad_norm": {"max_grad_norm": 0.3},
    "noise_decay": {"noise_decay": 0.5},
    "clip_decay": {"clip_decay": 0.5},
    "secure": {"secure": True},
    "seed": {"seed": 5},
    "ema": {"ema": 0.9},
    "train_only": {"train_only": "bias"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_flag_changes_the_model(tmp_path, plain, change):
    summary = run_train(tmp_path / "run", replace(SMALL, **CHANGES[change]))
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert any(
        not torch.allclose(found[name], value, atol=1e-6) for name, value in plain[0].items()
    )
    assert 2.9 < summary["epsilon"] <= 3
    records = read_lines(tmp_path / "run" / "ledger.jsonl")
    releases = Ledger.from_records(records).releases
    if change == "noise_decay":
        assert releases[-1].noise_multiplier == pytest.approx(releases[0].noise_multiplier / 2)
    if change == "clip_decay":
        assert [release.max_norm for release in releases] == pytest.approx([1, 0.5**0.5, 0.5])
    if change == "secure":
        assert records[0]["header"]["noise"] == "chacha20"


COMPILED = """
import torch
from sfumato.cli import main
compile = torch.compile  # in one graph, as always; run by torch's own kernels, which is quick
torch.compile = lambda f, **options: compile(f, backend="aot_eager", **options)
main("train --epsilon 3 --batch-size 60 --steps 3 --lr 0.5 --noise-seed 1 --compile "
     "--physical-batch-size 40 --device cpu --out OUT".split())
"""


def test_a_compiled_step_trains_the_same_model(tmp_path, plain):
    # In a process of its own: the checks of shapes that tests run with cannot be compiled.
    script = COMPILED.replace("OUT", str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, value in load_file(tmp_path / "run" / "model.safetensors").items():
        torch.testing.assert_close(value, plain[0][name], rtol=1e-4, atol=1e-5)


def test_a_killed_run_that_goes_on_otherwise_keeps_its_epsilon(tmp_path, monkeypatch):
    config = replace(SMALL, noise_seed=None, steps=8)
    monkeypatch.setattr(fit, "_kept", lambda *_: nullcontext())  # as if killed
    with cut_in("sfumato.training.fit:TrainState.advance", 4):
        run_train(tmp_path / "run", config)
    monkeypatch.undo()
    paid = len(read_lines(tmp_path / "run" / "ledger.jsonl")) - 1
    assert paid == 5
    summary = run_train(tmp_path / "run", replace(config, physical_batch_size=7))
    assert 2.9 < summary["epsilon"] <= 3
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 9
    again = tmp_path / "as it was"
    assert run_train(again, config)["epsilon"] == summary["epsilon"]


def test_any_failure_leaves_a_checkpoint_of_the_last_whole_step(tmp_path, monkeypatch):
    config = replace(SMALL, noise_seed=None, steps=4)
    measure, count = train.Run.measure, []

    def fail(self, *args, **kwargs):
        count.append(1)
        if len(count) == 4:
            raise ConfigError("out of memory, say")
        measure(self, *args, **kwargs)

    monkeypatch.setattr(train.Run, "measure", fail)
    with pytest.raises(ConfigError):
        run_train(tmp_path / "run", config)
    monkeypatch.undo()
    summary = run_train(tmp_path / "run", replace(config, physical_batch_size=9))
    assert summary["steps"] == 4
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 5


def test_an_order_that_was_refused_does_not_block_its_directory(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="delta"):
        run_train(out, replace(SMALL, delta=0.5))
    with pytest.raises(ConfigError, match="delta"):
        run_train(out, replace(SMALL, epsilon=None, noise_multiplier=1.0, delta=0.5))
    assert run_train(out, SMALL)["steps"] == 3


@pytest.mark.parametrize(
    ("removed", "instead"),
    [
        (["--two-pass"], "--physical-batch-size"),
        (["--no-two-pass"], "--physical-batch-size"),
        (["--two_pass"], "--physical-batch-size"),
        (["--check-every", "50"], "every run"),
        (["--check-every=50"], "every run"),
    ],
)
def test_a_flag_that_was_removed_is_ignored_with_a_word_on_what_to_do(removed, instead):
    words = ["--epsilon", "3", *removed, "--lr", "0.1"]
    with pytest.warns(SfumatoWarning, match="no effect") as told:
        config = parse("train", words).config
    assert config == train.Config(epsilon=3.0, lr=0.1)
    assert instead in str(told[0].message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": -1.0}, "lr=-1"),
        ({"noise_multiplier": 1.0}, "both of --epsilon and"),
        ({"epsilon": None}, "neither of --epsilon and"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


def test_an_explanation_asks_for_no_guarantee_and_leaves_nothing():
    config = train.Config(explain=True)
    assert not train.COMMAND.needs_run(config)
    assert "tanh" not in json.dumps(train.run(config, None)["explanation"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "3"], {"steps": 3, "epochs": None, "epsilon": 3.0}),
        (["--epochs=2"], {"steps": None, "epochs": 2.0}),
        (["--noise-multiplier", "2"], {"noise_multiplier": 2.0, "epsilon": None, "epochs": 25}),
        (["--steps=3", "--epsilon", "1"], {"steps": 3, "epochs": None, "epsilon": 1.0}),
    ],
)
def test_a_flag_displaces_what_the_preset_says_otherwise(words, expected):
    config = parse("train", ["--preset", "digits-cpu", *words]).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_two_flags_for_one_thing_are_refused_after_a_preset_too():
    words = ["--preset", "digits-cpu", "--epsilon", "1", "--noise-multiplier", "2"]
    with pytest.raises(ConfigError, match="both of --epsilon and --noise-multiplier"):
        parse("train", words)


def test_what_is_done_to_a_model_is_said(tmp_path):
    small = replace(SMALL, data="digits@0,1", batch_size=8, steps=1)
    run_train(tmp_path / "own", replace(small, model="resnet10t", image_size=32))
    said = (tmp_path / "own/log.txt").read_text()
    assert "BatchNorm mixes examples: it is replaced by GroupNorm" in said
    assert "random features" not in said
    run_train(tmp_path / "head", replace(small, train_only="head"))
    said = (tmp_path / "head/log.txt").read_text()
    assert "--train-only head without weights: it learns from random features" in said
    assert "BatchNorm" not in said
    run_train(tmp_path / "fixed", replace(small, train_only="head", model="scatter-linear"))
    assert "random features" not in (tmp_path / "fixed/log.txt").read_text()
