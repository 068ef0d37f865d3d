"""Several processes give the guarantee, and the model, of one."""

import json

import pytest
import several
import torch
from safetensors.torch import load_file

from sfumato.cli import main
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.training.process_group import ProcessGroup

FLAGS = [
    "train", "--epsilon", "3", "--batch-size", "60", "--steps", "5", "--physical-batch-size",
    "20", "--crop", "2", "--augmult", "2", "--ema", "0.9", "--device", "cpu",
]  # fmt: skip


def by_two(*flags):
    return several.command(2, *FLAGS, *flags)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("world") / "two"
    flags = ("--noise-seed", "1", "--out", str(out), "--json")
    done = by_two(*flags)
    assert done.returncode == 0, done.stderr[-9000:]
    return out, done.stdout, flags


def test_two_processes_train_the_model_of_one(two, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main([*FLAGS, "--noise-seed", "1", "--out", str(tmp_path / "one")])
    assert stopped.value.code == 0
    wanted, found = (load_file(out / "model.safetensors") for out in (tmp_path / "one", two[0]))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    before, after = (
        read_lines(out / "private/metrics.jsonl") for out in (tmp_path / "one", two[0])
    )
    assert [line["batch"] for line in after] == [line["batch"] for line in before]


def test_one_process_speaks_and_pays_for_all(two):
    out, printed, _ = two
    summary = json.loads(printed)
    ledger = Ledger.from_records(read_lines(out / "ledger.jsonl"))
    assert len(ledger.releases) == 5
    assert ledger.epsilon() == summary["epsilon"] <= 3


@pytest.mark.full
def test_a_finished_run_of_several_processes_is_reported_again(two):
    _, printed, flags = two
    again = by_two(*flags)
    assert again.returncode == 0, again.stderr[-9000:]
    assert json.loads(again.stdout)["epsilon"] == json.loads(printed)["epsilon"]


def test_two_processes_draw_one_secret(tmp_path):
    done = by_two("--out", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr[-9000:]
    assert json.loads(done.stdout)["not_for_release"] == []


def test_shares_are_all_of_the_batch_and_overlap_nowhere():
    shares = [ProcessGroup(rank, 3).share("abcdefgh") for rank in range(3)]
    assert sorted(place for share in shares for place, _ in share) == list(range(8))
    assert ProcessGroup().share("ab") == [(0, "a"), (1, "b")]
