"""A finished run of every command, made by an earlier version, is read by every command today."""

import json
import re
import shutil

import numpy as np
import pytest
from samples import few

from golden import adapter, stored
from golden.commands import COMMANDS, GAN, MATCHING, PRIVATE, PUBLIC, inside
from golden.files import read
from golden.store import RUNS

FROZEN = read("stored.json")
CPU = "--device cpu"
ATTACK = f"{PUBLIC} {GAN} --judges group-cnn-small --judge-epochs 0.5 --n 20 {CPU}"
MORE = PRIVATE.replace("--epsilon 8", "--epsilon 20")

READERS = {
    "audit": f"audit --run train --shadows 0 {CPU}",
    "audit with shadow models": f"audit --run train --shadows 2 {CPU}",
    "audit of a plain run": f"audit --run plain --shadows 0 {CPU}",
    "audit of canaries": f"audit --run canaries --shadows 0 {CPU}",
    "release": f"release --teacher train {PUBLIC} {MATCHING} --epsilon 20 {CPU}",
    "invert": f"invert --target train {ATTACK}",
    "invert a plain run": f"invert --target plain {ATTACK}",
    "draw from its generator": f"warmup sample --run warmup --number 6 {CPU}",
    "train its weights": f"train {MORE} --weights train/model.safetensors",
}


@pytest.fixture(params=sorted(FROZEN))
def place(request, tmp_path):
    """A copy: an audit leaves its findings with the run."""
    shutil.copytree(RUNS / request.param, tmp_path, dirs_exist_ok=True)
    return tmp_path


def done(place, words, **options):
    with inside(place):
        code, printed = adapter.command(words.split())
    assert code == 0, printed
    return printed


@pytest.mark.parametrize("version", FROZEN)
def test_models_of_stored_runs_answer_as_they_did(version):
    # Sums in float32 in another order differ by 1e-6.
    found = stored.compute(version)
    for name, logits in FROZEN[version]["logits"].items():
        np.testing.assert_allclose(found["logits"][name], logits, rtol=1e-4, atol=1e-5)
    for name, wanted in FROZEN[version]["account"].items():
        now = found["account"][name]
        assert float(now["epsilon"]) == pytest.approx(float(wanted["epsilon"]), rel=0, abs=1e-9)
        assert {**now, "epsilon": 0} == {**wanted, "epsilon": 0}


@pytest.mark.parametrize("private", ["", "--include-private"])
def test_every_stored_run_is_reported(place, private):
    for run in sorted(file.parent.name for file in place.glob("*/config.json")):
        done(place, f"report {run} --out page {private}")
        page = place / "page" / ("private" if private else ".") / "report.html"
        assert page.stat().st_size > 0
    done(place, f"report train plain release warmup --out page {private}")


@few("reader", [(reader,) for reader in READERS], every=2)
def test_a_stored_run_is_read(reader, place):
    out = "out.npz" if "sample" in READERS[reader] else "out"
    done(place, f"{READERS[reader]} --out {out}")
    assert (place / out).exists()


def test_weights_of_a_stored_run_bring_their_ledger(place):
    done(place, f"{READERS['train its weights']} --out again")
    found = json.loads(done(place, "account --ledger again --json"))
    assert found["stages"] == {"train": 8}


def test_a_stored_bundle_is_whole(place):
    done(place, "release verify release/bundle")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"report"}))
def test_the_command_of_a_stored_run_finds_it_finished(name, place):
    before = {file: file.stat().st_mtime_ns for file in place.rglob("*.safetensors")}
    words = re.sub(r" --noise-seed \d+", "", COMMANDS[name])
    done(place, f"{words} --out {name}")
    assert before == {file: file.stat().st_mtime_ns for file in place.rglob("*.safetensors")}
