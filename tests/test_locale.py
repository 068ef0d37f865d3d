"""Names with letters of any language, in whatever locale."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from folders import save_folder

import sfumato
from sfumato.cli import main
from sfumato.data.load import load_images


def in_ascii(*words, **variables):
    """The command in a locale without letters beyond ASCII."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-m", "sfumato", *map(str, words)],
        env={**os.environ, **plain, "PYTHONPATH": str(Path(sfumato.__file__).parents[1])},
        capture_output=True,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def test_files_are_read_and_written_in_utf8_whatever_the_locale(tmp_path):
    digits = load_images("digits@0,1").split(60 / 800)[0]
    save_folder(replace(digits, classes=("caf\xe9", "\u65e5")), tmp_path / "scans")
    words = ["--data", tmp_path / "scans", "--epsilon", "4", "--steps", "1", "--batch-size", "9"]
    with pytest.raises(SystemExit) as done:
        main(["train", *map(str, words), "--out", str(tmp_path / "run")])
    assert done.value.code == 0
    code, told = in_ascii("report", tmp_path / "run")
    assert code == 0, told
    code, told = in_ascii("train", *words, "--out", tmp_path / "other")
    assert code == 2
    assert "Traceback" not in told
    assert "Set PYTHONUTF8=1" in told
    # A terminal that lacks a letter is no reason to stop.
    there = (tmp_path / "run").rename(tmp_path / "\xfcber")
    code, told = in_ascii("report", there, PYTHONUTF8="1", PYTHONIOENCODING="ascii")
    assert code == 0, told
    assert "\\xfcber" in told
