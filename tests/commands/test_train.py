"""`sfumato train`, end to end on the embedded digits."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from contents import summaries
from safetensors.torch import load_file
from synced import Synced
from torch import nn

from sfumato.commands.train import command as train
from sfumato.errors import ConfigError
from sfumato.files import read_lines
from sfumato.models.diverged import has_diverged
from sfumato.privacy import noise
from sfumato.privacy.ledger import Ledger
from sfumato.reporting.scores import findings_of
from sfumato.runs import open_run

SMALL = train.Config(epsilon=3.0, batch_size=400, steps=6, lr=0.5, noise_seed=1)


def run_train(out, config=SMALL):
    with open_run(config, verb="train", out=out) as run:
        return train.run(config, run)


def weights(out):
    return load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of those settings."""
    out = tmp_path_factory.mktemp("runs") / "small"
    return out, run_train(out)


def test_a_run_leaves_a_model_a_ledger_and_private_scores(tmp_path):
    summary = run_train(tmp_path / "run", replace(SMALL, noise_seed=None))
    assert 2.9 < summary["epsilon"] <= 3
    assert summary["not_for_release"] == []
    assert str(tmp_path) not in summaries(tmp_path / "run")
    ledger = Ledger.from_records(read_lines(tmp_path / "run" / "ledger.jsonl"))
    assert len(ledger.releases) == 6
    assert ledger.epsilon() == summary["epsilon"]
    left = {path.name for path in (tmp_path / "run" / "private").iterdir()}
    assert left == {"data.json", "findings.json", "metrics.jsonl", "scores.json"}
    public = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [set(line) for line in public] == [{"step", "lr"}] * 6  # no batch size, no time, no loss
    private = read_lines(tmp_path / "run" / "private" / "metrics.jsonl")
    assert [line["step"] for line in private] == list(range(6))
    assert "test_accuracy" in json.loads((tmp_path / "run/private/scores.json").read_text())


def test_what_a_step_costs_is_on_disk_before_there_is_noise(tmp_path, monkeypatch):
    ledger, synced, lines = tmp_path / "run" / "ledger.jsonl", Synced(monkeypatch), []
    release = noise._release

    def listen(*given):
        lines.append(len(read_lines(ledger)))
        assert synced.holds(ledger)
        assert synced.holds(ledger.parent)
        release(*given)

    monkeypatch.setattr(noise, "_release", listen)
    run_train(tmp_path / "run", replace(SMALL, steps=3))
    assert lines == [2, 3, 4]


def test_the_test_accuracy_is_on_the_screen_at_the_end_and_there_alone(small):
    out, summary = small
    (accuracy,) = findings_of(out).of("accuracy")
    told = f"{accuracy.value[0]:.3f}"
    lines = train.show(summary).splitlines()
    (place,) = [
        number
        for number, line in enumerate(lines)
        if "do not share that folder, nor these numbers:" in line
    ]
    assert lines[place + 1].split()[0] == told
    for file in out.glob("*.*"):
        assert told.encode() not in file.read_bytes()
    assert "test_accuracy" not in json.loads((out / "done.json").read_text())


def test_some_classes_and_the_middle_of_images_are_trained_on(tmp_path):
    config = replace(SMALL, data="digits@3,1,4", centre_crop=24, batch_size=100, steps=2)
    assert run_train(tmp_path / "run", config)["data"] == "digits@3,1,4-train"
    shapes = {len(value) for value in weights(tmp_path / "run").values()}
    assert 3 in shapes
    assert 10 not in shapes


@pytest.mark.parametrize(
    "changes", [{"mode": "ghost"}, {"mode": "non-ghost"}, {"physical_batch_size": 37}]
)
def test_modes_and_physical_batches_train_the_same_model(tmp_path, small, changes):
    run_train(tmp_path / "other", replace(SMALL, **changes))
    for name, value in weights(small[0]).items():
        torch.testing.assert_close(weights(tmp_path / "other")[name], value, rtol=1e-4, atol=1e-4)


def test_reduced_precision_trains_almost_the_same_model(tmp_path):
    run_train(tmp_path / "full", replace(SMALL, steps=2))
    run_train(tmp_path / "bf16", replace(SMALL, steps=2, precision="bf16"))
    for name, value in weights(tmp_path / "full").items():
        torch.testing.assert_close(weights(tmp_path / "bf16")[name], value, rtol=0, atol=2e-2)


def test_plain_training_guarantees_nothing_and_says_so(tmp_path):
    config = replace(SMALL, mode="non-private", epsilon=None, noise_seed=None)
    summary = run_train(tmp_path / "run", config)
    assert summary["epsilon"] == "inf"
    assert "exact" in summary["not_for_release"][0]
    assert "none: epsilon is infinite" in train.show(summary)


def test_views_average_and_frozen_parts_work_together(tmp_path):
    config = replace(SMALL, augmult=2, crop=2, ema=0.9, train_only="head", schedule="cosine")
    run_train(tmp_path / "run", config)
    assert weights(tmp_path / "run")


def test_any_timm_model_trains_and_explains_itself(tmp_path):
    config = replace(SMALL, model="resnet10t", image_size=32, steps=1, batch_size=20)
    summary = run_train(tmp_path / "explained", replace(config, explain=True))
    assert "predicted private cost" in summary["explanation"]
    assert "conv1.0.weight" in summary["explanation"]
    assert run_train(tmp_path / "run", config)["steps"] == 1


def test_an_interrupted_run_goes_on_to_the_same_model(tmp_path):
    config = replace(SMALL, steps=60, image_size=8, model="group-cnn-small")
    words = ["--epsilon", "3", "--steps", "60", "--noise-seed", "1", "--batch-size", "400"]
    words += ["--image-size", "8", "--model", "group-cnn-small", "--lr", "0.5"]
    command = [sys.executable, "-m", "sfumato", "train", *words, "--out", str(tmp_path / "cut")]
    run_train(tmp_path / "whole", config)
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "cut" / "private" / "metrics.jsonl"
    while not (metrics.exists() and len(read_lines(metrics)) > 5) and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, heard = child.communicate()
    assert child.returncode == 130, heard
    assert "repeat the command" in heard
    assert (tmp_path / "cut" / "private" / "checkpoint.safetensors").exists()
    assert not list((tmp_path / "cut").glob("*checkpoint*"))
    run_train(tmp_path / "cut", config)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "cut")[name], value)
    assert len(read_lines(tmp_path / "cut" / "ledger.jsonl")) == 61


@pytest.mark.parametrize("mode", ["ghost_mixed", "non-private"])
def test_training_that_diverges_stops_and_leaves_the_budget_unspent(tmp_path, mode):
    epsilon = 3.0 if mode == "ghost_mixed" else None
    config = replace(
        SMALL, model="group-cnn-small", lr=1e30, batch_size=20, steps=100, mode=mode,
        epsilon=epsilon, noise_seed=None,
    )  # fmt: skip
    for _ in range(2):  # the same command again pays for nothing either
        with pytest.raises(ConfigError, match="--lr"):
            run_train(tmp_path / "run", config)
        taken = read_lines(tmp_path / "run/metrics.jsonl")
        assert 0 < len(taken) < 10
        assert len(read_lines(tmp_path / "run/ledger.jsonl")) - 1 == (len(taken) if epsilon else 1)


def test_a_decision_to_stop_looks_at_no_private_image():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(4, 2))
    blank = torch.zeros(1, 1, 2, 2)
    before = torch.get_rng_state()
    assert not has_diverged(model, lambda: model(blank))
    assert model[1].training
    assert before.equal(torch.get_rng_state())
    nn.init.constant_(model.get_parameter("2.weight"), torch.inf)
    assert has_diverged(model, lambda: torch.zeros(1))
    nn.init.constant_(model.get_parameter("2.weight"), 3e38)
    assert not has_diverged(model, lambda: model(blank))
    assert has_diverged(model, lambda: model(blank + 9))
