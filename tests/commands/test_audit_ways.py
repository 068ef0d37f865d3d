"""sfumato audit of heads, and of trainers that are called again and again."""

import importlib
import json
import sys
from collections import Counter
from dataclasses import replace

import pytest
from audits import do, few_digits, findings
from cuts import cut_in
from planted import replace_everywhere

from sfumato.attacks.heads import HeadRecipe
from sfumato.cli import main, parse
from sfumato.commands import subcommands_of
from sfumato.commands.audit import command as audit
from sfumato.config import dumps, to_json
from sfumato.errors import DataError
from sfumato.files import read_lines
from sfumato.privacy.accounting import price
from sfumato.runs import Run
from sfumato.setting_groups import defaults, leaves
from sfumato.settings.audit import AuditHeads, AuditTrainer

HEADS = HeadRecipe(max_norm=4.0, noise_multiplier=6.0)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return few_digits(tmp_path_factory.mktemp("data") / "digits.npz")


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    out = tmp_path_factory.mktemp("audits") / "heads"
    do(AuditHeads(head=HEADS, trials=3000, image_size=8, device="cpu"), out)
    return out


def test_heads_prove_most_of_what_their_recipe_guarantees_and_no_more(heads):
    found = findings(heads)
    guaranteed = found["promise"]["epsilon"]
    assert guaranteed == pytest.approx(price(HEADS.mechanisms(), 1e-5))
    plain, gaussian = found["bounds"]
    assert 0.5 < plain["epsilon"] < gaussian["epsilon"] < guaranteed
    assert gaussian["epsilon"] > 0.75 * guaranteed
    assert plain["kept"] is gaussian["kept"] is True
    assert plain["confidence"] == 0.95
    assert "shared among all bounds" in plain["thresholds"]
    assert "Gaussian" in gaussian["assumes"]
    assert "does not break" in audit.show(Run(heads).summary)


def test_heads_without_noise_guarantee_nothing_and_give_the_image_away(tmp_path):
    config = AuditHeads(trials=256, image_size=8, device="cpu")
    do(config, tmp_path / "run")
    found = findings(tmp_path / "run")
    assert found["promise"] is None
    (bound,) = found["bounds"]
    assert bound["epsilon"] > 3
    assert bound["kept"] is None
    assert "guarantee none" in audit.show(Run(tmp_path / "run").summary)


def test_heads_with_half_of_the_noise_they_claim_are_found_out(tmp_path, monkeypatch):
    from sfumato.attacks import head_audit

    honest = head_audit.train_heads
    replace_everywhere(
        monkeypatch,
        head_audit,
        "train_heads",
        lambda recipe, *rest: honest(replace(recipe, noise_multiplier=3.0), *rest),
    )
    do(AuditHeads(head=HEADS, trials=2000, image_size=8, device="cpu"), tmp_path / "run")
    found = findings(tmp_path / "run")
    assert found["bounds"][1]["kept"] is False
    told = audit.show(Run(tmp_path / "run").summary)
    assert "THE GUARANTEE IS BROKEN (by many heads, Gaussian noise)" in told


@pytest.fixture(scope="module")
def called(tmp_path_factory, digits):
    out = tmp_path_factory.mktemp("audits") / "trainer"
    config = AuditTrainer(
        trainer="audits:learn_digits", data=str(digits), runs=60, epsilon=0.5, device="cpu"
    )
    with cut_in("sfumato.attacks.retraining_audit:_surety", after=25):
        do(config, out)
    do(config, out)
    return out


def test_a_trainer_that_breaks_its_guarantee_is_told_so(called):
    (bound,) = findings(called)["bounds"]
    assert bound["epsilon"] > 0.5
    assert bound["kept"] is False
    told = audit.show(Run(called).summary)
    assert "BROKEN" in told
    assert "guarantee ε ≤ 0.50: as claimed" in told


def test_a_broken_guarantee_is_heard_by_programs(called, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "--out", str(called), "--json"])
    assert stopped.value.code == 3
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"THE GUARANTEE IS BROKEN: {called}/private/audit.json"
    assert "broken" not in said.out.lower()


def test_a_failed_check_is_heard_by_programs_and_a_sound_audit_is_not(tmp_path):
    checks = [{"name": "noise", "passed": False}]
    for failed, heard in (([], False), (checks, True)):
        Run(tmp_path).write_json("private/audit.json", {"target": "run", "checks": failed})
        found = audit.alarm({"run": str(tmp_path)})
        assert (found is not None and "A CHECK OF THE MECHANISM FAILED" in found) == heard


def test_calls_that_were_made_before_a_cut_are_not_made_again(called):
    lines = read_lines(called / "private" / "trials.jsonl")
    assert Counter(line["run"] for line in lines) == Counter(range(60))


TRAINER = """
import torch

def train(images):
    seen = len(images)
    %s
    weights = torch.randn(10) %s
    return lambda pixels: weights[None] * pixels.mean()
"""


def test_calls_of_a_trainer_that_has_changed_do_not_count(digits, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "changing", raising=False)
    config = AuditTrainer(trainer="changing:train", data=str(digits), runs=20, device="cpu")

    def audit_as(*code):
        (tmp_path / "changing.py").write_text(TRAINER % code)
        sys.modules.pop("changing", None)
        importlib.invalidate_caches()
        return do(config, tmp_path / "out")

    with cut_in("sfumato.attacks.retraining_audit:_surety", after=6):
        audit_as("pass", "")
    with cut_in("sfumato.attacks.retraining_audit:_surety", after=6):
        audit_as("pass", "")
    log = tmp_path / "out/log.txt"
    assert "6 calls of changing:train kept from before" in log.read_text()
    with pytest.raises(DataError, match="very same model"):
        audit_as("torch.manual_seed(0)", "")
    assert "changing:train has changed: 12 calls of it as it was do not count" in log.read_text()
    with pytest.raises(DataError, match="all 2 calls so far answered NaN"):
        audit_as("torch.manual_seed(0)", "* torch.nan")
    audit_as("pass", "  # mended")
    lines = read_lines(tmp_path / "out/private/trials.jsonl")
    assert Counter(line["run"] for line in lines) == Counter(range(20))


@pytest.mark.parametrize(
    ("way", "changes"),
    [("run", {"run": "x"}), ("heads", {"heads": True}), ("trainer", {"trainer": "a:b"})],
)
def test_an_audit_of_the_last_version_is_read_as_the_way_that_it_was(way, changes, tmp_path):
    ways = subcommands_of("audit")
    whole = {"heads": False}
    for other in ways.values():
        whole |= dict.fromkeys(leaves(other.kind)) | to_json(defaults(other.kind))
    config = {**whole, "run": None, "trainer": None, **changes}
    (tmp_path / "config.json").write_text(json.dumps({"verb": "audit", "config": config}))
    read = parse("audit", ["--out", str(tmp_path)]).config
    assert type(read) is ways[way].kind
    (tmp_path / "config.json").write_text(dumps({"verb": "audit", "version": 2, "config": read}))
    assert parse("audit", ["--out", str(tmp_path)]).config == read


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (["run", "x"], ["--run", "x"]),
        (["run", "--run", "x"], ["--run=x"]),
        (["heads", "--trials", "200"], ["--heads", "--trials", "200"]),
        (["trainer", "a:b", "--runs", "4"], ["--trainer", "a:b", "--runs", "4"]),
    ],
)
def test_flags_of_the_last_version_name_the_same_way(new, old):
    assert parse("audit", new).config == parse("audit", old).config
