"""A folder from elsewhere may name code, which lies beside it: it runs on trust alone."""

import json
import shutil
import sys

import numpy as np
import pytest
from finished import forge
from safetensors.torch import save_file

import sfumato
from sfumato.cli import main
from sfumato.commands.train import command as train
from sfumato.config import to_json
from sfumato.errors import RunError
from sfumato.runs import open_run
from sfumato.settings.diffusion import Diffusion

HOSTILE = "from pathlib import Path\nPath('ran').touch()\nraise ImportError('that was enough')\n"
ON_PATCHES = ["--public", "patches", "--grey", "--image-size", "28"]


@pytest.fixture(scope="module", name="finished")
def finished_run(tmp_path_factory):
    config = train.Config(model="group-cnn-small", epsilon=3.0, batch_size=100, steps=1)
    with open_run(config, verb="train", out=tmp_path_factory.mktemp("runs") / "run") as run:
        train.run(config, run)
    return run.path


@pytest.fixture(name="folder")
def a_strangers_folder(finished, tmp_path, monkeypatch):
    """One stands in it, as after unpacking an archive, and calls the console script."""
    shutil.copytree(finished, tmp_path / "run")
    edit(tmp_path / "run/config.json", ("config", "model"), "others:make")
    describe(tmp_path / "run")
    (tmp_path / "others.py").write_text(HOSTILE)
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    (tmp_path / "cut/done.json").unlink()
    shutil.copytree(finished, tmp_path / "half")  # config.json looks fine
    describe(tmp_path / "half")
    generator(tmp_path / "drawn/stages/generator")
    noise(tmp_path / "noise.npz", seed=0)
    noise(tmp_path / "public.npz", seed=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return tmp_path


def noise(file, seed):
    """Images that no run was trained on."""
    pixels = np.random.default_rng(seed).integers(256, size=(1000, 28, 28), dtype=np.uint8)
    labels = np.arange(1000) % 10
    np.savez(file, x_train=pixels, y_train=labels, x_test=pixels[:50], y_test=labels[:50])


def edit(file, place, value):
    record = json.loads(file.read_text())
    part = record
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    file.write_text(json.dumps(record))


def describe(run):
    forge(run, model=json.loads((run / "model.json").read_text()) | {"model": "others:make"})


def generator(folder):
    folder.mkdir(parents=True)
    save_file({}, folder / "model.safetensors")
    blueprint = {
        "shape": [1, 8, 8], "classes": ["a"], "diffusion": to_json(Diffusion()), "ledger": False,
        "brought": "others:make", "told": True,
    }  # fmt: skip
    (folder / "generator.json").write_text(json.dumps(blueprint))
    (folder / "done.json").write_text("{}")
    (folder.parents[1] / "config.json").write_text('{"verb": "warmup"}')


COMMANDS = {
    "audit": ["audit", "--run", "run", "--shadows", "0", "--out", "a"],
    "audit of model.json": ["audit", "--run", "half", "--shadows", "0", "--out", "a"],
    "release": ["release", "--teacher", "run", *ON_PATCHES, "--epsilon", "9", "--out", "a"],
    "invert": ["invert", "--target", "run", *ON_PATCHES, "--other-classes", "--n", "9"],
    "invert's judge": [
        "invert", "--data", "noise.npz", "--public", "public.npz", "--shared-classes",
        "--mode", "non-private", "--judge", "run", "--n", "9", "--method", "pixels",
    ],
    "sample": ["warmup", "sample", "--run", "drawn", "--number", "1", "--out", "a.npz"],
    "going on": ["train", "--out", "cut"],
}  # fmt: skip


def call(*words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return stopped.value.code


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_code_that_a_folder_names_runs_on_trust_alone(words, folder, capsys):
    assert call(*words) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert not (folder / "ran").exists()
    assert call(*words, "--trust-code") == 2
    assert (folder / "ran").exists()
    assert "that was enough" in capsys.readouterr().err
    assert "" not in sys.path


def test_in_python_it_runs_on_trust_alone_too(folder):
    with pytest.raises(RunError, match="trust_code=True"):
        sfumato.load_model(folder / "run")
    assert not (folder / "ran").exists()


def test_trust_is_not_remembered_by_a_run(folder):
    (folder / "others.py").write_text(
        "from torch import nn\n\ndef make(classes):\n    raise OSError"
    )
    assert call("train", "--out", "cut", "--trust-code") == 2
    assert call("train", "--out", "cut") == 2
    assert "trust" not in (folder / "cut/config.json").read_text()


def test_code_that_the_user_names_runs_and_leaves_no_trace_in_the_path(folder):
    code = (
        "from torch import nn\n\ndef make(classes):\n    import mine_too\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    (folder / "mine.py").write_text(code)
    (folder / "mine_too.py").write_text("")
    words = ["train", "--model", "mine:make", "--image-size", "8", "--noise-multiplier", "1"]
    assert call(*words, "--steps", "1", "--batch-size", "9", "--out", "own") == 0
    assert "" not in sys.path
    assert call("train", "--out", "own") == 0  # finished: nothing is built
