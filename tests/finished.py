"""One small finished run, and every command that reads such a run."""

import base64
import json
import shutil
import zlib
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import releases
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sfumato
from sfumato.cli import main
from sfumato.commands.train import command as train
from sfumato.errors import SfumatoError
from sfumato.runs import open_run


class Runs:
    """A place for runs that are made once in a test session."""

    def __init__(self, place: Path):
        self.place = place
        self.settings = releases.tiny(place, noise_multiplier=3.0)
        self.public = place / "clouds.npz"

    def made(self, name, **changes):
        """A run of `sfumato train` with these settings; the same again if it is there."""
        from dataclasses import replace

        out = self.place / name
        if not out.exists():
            config = replace(self.settings.train.alone, **changes)
            with open_run(config, verb="train", out=out) as run:
                train.run(config, run)
        return out

    def copy(self, name, to, **changes):
        return shutil.copytree(self.made(name, **changes), to)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("finished"))


def forge(run, *, model=None, ledger=None):
    """A stranger's run: its model.json or ledger changed, and the note in the weights too."""
    file = run / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        notes = dict(opened.metadata())
    if model is not None:
        notes["model.json"] = json.dumps(model)
        (run / "model.json").write_text(notes["model.json"])
    if ledger is not None:
        packed = base64.b85encode(zlib.compress(ledger.encode())).decode()
        notes["sfumato"] = json.dumps(json.loads(notes["sfumato"]) | {"ledger": packed})
        (run / "ledger.jsonl").write_text(ledger)
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    save_file(tensors, file, metadata=notes)


def command(words):
    """Exit code and all that is printed."""
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return stopped.value.code, out.getvalue()


def load(run, public, out):
    try:
        trained = sfumato.load_model(run)
    except SfumatoError as problem:
        return problem.code, str(problem)
    return 0, str(trained.guarantee)


def words(*some):
    return [*some, "--device", "cpu"]


COMMANDS = {
    "load_model": load,
    "account": lambda run, public, out: command(["account", "--ledger", run]),
    "report": lambda run, public, out: command(["report", run, "--out", out]),
    "audit": lambda run, public, out: command(
        words("audit", "--run", run, "--shadows", 0, "--out", out)
    ),
    "release": lambda run, public, out: command(
        words(
            "release",
            "teacher",
            "--teacher",
            run,
            "--public",
            public,
            "--epsilon",
            9,
            "--out",
            out,
        )
    ),
    "invert": lambda run, public, out: command(
        words("invert", "target", "--target", run, "--public", public, "--n", 20, "--out", out)
    ),
    "weights": lambda run, public, out: command(
        words(
            "train",
            "--weights",
            run / "model.safetensors",
            "--data",
            public.with_name("digits.npz"),
            "--model",
            "group-cnn-small",
            "--noise-multiplier",
            9,
            "--batch-size",
            60,
            "--steps",
            1,
            "--out",
            out,
        )
    ),
}
"""Whoever reads a finished run: exit code and words, of a run, public images and an --out."""
