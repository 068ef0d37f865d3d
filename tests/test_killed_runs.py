"""A run killed at any instant ends with the same model, the same ledger and the same epsilon."""

import subprocess
import sys
from pathlib import Path

import pytest
from contents import content

from sfumato.files import read_lines

FILES = ("model.safetensors", "metrics.jsonl", "done.json")


def train(out: Path, kills: int, seed: int = 0, script: str = "killed.py") -> int:
    path = Path(__file__).with_name(script)
    command = [sys.executable, str(path), str(out), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def releases(out: Path) -> list[dict]:
    lines = read_lines(out / "ledger.jsonl")
    assert set(lines[0]) == {"header"}
    # Tags are keyed by the ledger's id, which every run draws for itself.
    return [{**line["event"], "ledger": "", "tag": ""} for line in lines[1:]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert train(out, kills=0) == 0
    return out


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_killed_many_times_ends_like_an_undisturbed_one(tmp_path, undisturbed, seed):
    out = tmp_path / "killed"
    assert train(out, kills=25, seed=seed) >= 5
    for name in FILES:
        assert content(out / name) == content(undisturbed / name), name
    assert releases(out) == releases(undisturbed)
    assert [release["step"] for release in releases(out)] == list(range(60))
    assert {path.name for path in out.iterdir()} == {path.name for path in undisturbed.iterdir()}
    assert not (out / "private" / "secret.key").exists()


def test_a_generator_killed_many_times_ends_like_an_undisturbed_one_and_leaves_no_draft(tmp_path):
    assert train(tmp_path, kills=5, script="killed_warmup.py") >= 3
    files = {}
    for name in ("undisturbed", "killed"):
        place = tmp_path / name
        found = {path.relative_to(place) for path in place.rglob("*") if path.is_file()}
        files[name] = {path for path in found if path.name != "log.txt"}
    assert files["killed"] == files["undisturbed"]
    for path in files["killed"]:
        ours, theirs = (tmp_path / name / path for name in files)
        assert ours.read_bytes() == theirs.read_bytes(), path
