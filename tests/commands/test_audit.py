"""sfumato audit: runs, heads and trainers, on digits and with tiny networks."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audits import do, few_digits, findings, small_run
from contents import summaries
from cuts import cut_in

from sfumato.cli import main
from sfumato.commands.audit import command as audit
from sfumato.commands.audit.command import Config
from sfumato.commands.audit.finished import open_target
from sfumato.commands.audit.record import AuditRecord, describe_attack
from sfumato.errors import ConfigError, DataError, RunError
from sfumato.files import read_json
from sfumato.privacy.audit.lower import Bound
from sfumato.reporting import words
from sfumato.reporting.card import read_card
from sfumato.reporting.render import audit_text
from sfumato.reporting.scores import findings_of, of_audit
from sfumato.runs import Run, open_run
from sfumato.settings.audit import Audit
from sfumato.trusted_code import trusting


def attacks_of(out):
    return {attack["name"]: attack for attack in findings(out)["attacks"]}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return few_digits(tmp_path_factory.mktemp("data") / "digits.npz")


@pytest.fixture(scope="module")
def plain(tmp_path_factory, digits):
    out = tmp_path_factory.mktemp("runs") / "plain"
    return small_run(out, digits, mode="non-private", epochs=60, optimizer="adam", lr=0.02)


@pytest.fixture(scope="module")
def private(tmp_path_factory, digits):
    return small_run(tmp_path_factory.mktemp("runs") / "private", digits, epsilon=2.0, epochs=5)


@pytest.fixture(scope="module")
def audited(tmp_path_factory, plain):
    out = tmp_path_factory.mktemp("audits") / "plain"
    do(Config(run=plain, shadows=8, device="cpu"), out)
    return out


def test_a_network_that_learnt_by_heart_is_caught_by_every_attack(audited):
    found = attacks_of(audited)
    assert set(found) == {"loss", "lira-online", "lira-offline", "rmia"}
    assert all(attack["auc"][1] > 0.8 for attack in found.values())
    assert found["lira-online"]["auc"][0] > found["loss"]["auc"][0]
    for attack in found.values():
        rates = [attack["tpr_at_1_percent_fpr"], attack["tpr_at_0.1_percent_fpr"]]
        for value, low, high in [attack["auc"], *filter(None, rates)]:
            assert 0 <= low <= value <= high <= 1
        assert attack["roc"]["fpr"][-1] == attack["roc"]["tpr"][-1] == 1


def test_without_coins_no_epsilon_is_proved_and_that_is_said(audited, plain):
    found = findings(audited)
    assert found["promise"] is None
    assert found["curve"] is None
    assert found["bounds"] == found["checks"] == []
    told = audit.show(Run(audited).summary)
    assert "guarantee none" in told
    assert "Nobody tossed a coin" in told


def test_what_was_found_is_private_and_the_summary_says_only_what_was_done(audited):
    assert {p.name for p in (audited / "private").iterdir()} == {
        "audit.json", "findings.json", "tradeoff.png", "stages",
    }  # fmt: skip
    done = summaries(audited)
    assert '"lira-online"' in done
    assert str(audited.parents[1]) not in done
    assert "auc" not in done
    assert "tpr" not in done


def test_an_auditor_who_may_not_write_to_the_run_finishes(plain, tmp_path, monkeypatch):
    target, out, write = tmp_path / "run", tmp_path / "audit", Run.write_json
    shutil.copytree(plain, target)

    def refuses(run, name, value):
        if run.path == target:
            raise PermissionError(13, "Permission denied")
        return write(run, name, value)

    monkeypatch.setattr(Run, "write_json", refuses)
    assert do(Config(run=target, shadows=0, device="cpu"), out) == Run(out).summary
    assert (out / "private" / "tradeoff.png").exists()
    assert (
        "could not take a copy of the findings (Permission denied)" in (out / "log.txt").read_text()
    )


def test_a_private_run_stands_beside_its_ledger_and_is_hard_to_attack(private, tmp_path, capsys):
    out = tmp_path / "audit"
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "audit",
                "--run",
                str(private),
                "--shadows",
                "0",
                "--out",
                str(out),
                "--json",
                "--trust-code",
            ]
        )
    assert stopped.value.code == 0
    done = json.loads(capsys.readouterr().out)
    assert done["attacks"] == ["loss"]
    assert done["promise"]["epsilon"] == pytest.approx(2.0, abs=0.05)
    found = findings(out)
    (attack,) = found["attacks"]
    curve = found["curve"]
    allowed = np.interp(attack["roc"]["fpr"], curve["fpr"], curve["tpr"])
    assert attack["auc"][0] < 0.65
    assert np.trapezoid(curve["tpr"], curve["fpr"]) > attack["auc"][1]
    assert (allowed >= attack["roc"]["fpr"]).all()
    assert (out / "private" / "tradeoff.png").stat().st_size > 10_000


@pytest.mark.parametrize("unit", ["example", "person"])
def test_canaries_are_asked_for_only_where_they_can_be_had(unit):
    guarantee = {"epsilon": 3.0, "delta": 1e-5, "relation": "add-or-remove", "unit": unit}
    told = audit_text(of_audit(AuditRecord(target="run", guarantee=guarantee).record()))
    assert ("Train with --canaries" in told) is (unit == "example")
    assert ("no lower bound can be had" in told) is (unit == "person")


@pytest.mark.parametrize("kind", ["gradient", "mislabelled"])
def test_canaries_prove_a_part_of_what_was_guaranteed(digits, tmp_path, monkeypatch, kind):
    # One sound run in twenty raises an alarm: these coins are the same in each test.
    monkeypatch.setattr("secrets.randbits", random.Random(1).getrandbits)
    run = small_run(tmp_path / "run", digits, epsilon=2.0, epochs=5, canaries=40, canary_kind=kind)
    do(Config(run=run, shadows=0, device="cpu"), tmp_path / "audit")
    found = findings(tmp_path / "audit")
    assert found["bounds"]
    assert all(bound["kept"] is True for bound in found["bounds"])
    assert all(bound["delta"] == found["promise"]["delta"] for bound in found["bounds"])
    assert all(check["passed"] is not False for check in found["checks"])
    assert [attack["name"] for attack in found["attacks"]][1:] == ["loss"]
    told = audit.show(Run(tmp_path / "audit").summary)
    assert "That does not break the guarantee" in told
    assert "Assumes: a fair coin" in told
    assert read_json(run / "private" / "audit.json") == found, "a report on the run has it too"
    for kind in ("attack", "bound", "check"):
        assert findings_of(run).of(kind) == findings_of(tmp_path / "audit").of(kind) != ()
    assert findings_of(run).of("accuracy"), "what the run found itself is still there"
    card = read_card(run, include_private=True)
    assert words.guarantee_words(card)[0].startswith("ε ≤ 2.0")
    assert words.proof_words(card)[0].startswith("ε ≥ ")
    shutil.rmtree(run / "private")
    with pytest.raises(RunError, match="how the coins fell"):
        do(Config(run=run, shadows=0, device="cpu"), tmp_path / "again")


def test_canaries_are_no_members_of_the_other_attacks(digits, tmp_path):
    run = small_run(
        tmp_path / "run", digits, epsilon=2.0, steps=1, canaries=30, canary_kind="natural"
    )
    with trusting(), open_run(Config(run=run), verb="audit", out=tmp_path / "audit") as place:
        target = open_target(Config(run=run), place)
    assert target.members == 50
    assert len(target.pool) == 50 + 180
    assert len(target.population) == 60


def test_an_audit_that_was_cut_keeps_the_shadow_models_it_has(plain, tmp_path, monkeypatch):
    from sfumato.commands.audit import shadows as audit_shadows

    monkeypatch.setattr(audit_shadows, "GROUP", 2)
    config = Config(run=plain, shadows=4, device="cpu")
    do(config, tmp_path / "whole")
    with cut_in("sfumato.commands.audit.shadows:_train", after=1):
        do(config, tmp_path / "cut")
    kept = tmp_path / "cut" / "private" / "stages" / "shadows" / "odds-0-2.safetensors"
    before = kept.stat().st_mtime_ns
    do(config, tmp_path / "cut")
    assert kept.stat().st_mtime_ns == before
    assert findings(tmp_path / "cut") == findings(tmp_path / "whole")


def test_the_same_scores_on_both_sides_are_no_attack():
    scores = np.random.default_rng(0).normal(size=400)
    found = describe_attack("none", scores, scores, 0.95)
    assert found["auc"][0] == 0.5
    assert found["auc"][1] < 0.5 < found["auc"][2]
    points = {name: np.array(values) for name, values in found["roc"].items()}
    assert (points["low"] <= points["high"]).all()
    inner = (points["fpr"] > 0.1) & (points["fpr"] < 0.9)
    assert (points["low"] < points["tpr"])[inner].all()
    assert (points["tpr"] < points["high"])[inner].all()


def test_what_the_ledger_allows_stands_under_the_rates():
    curve = {"fpr": [0.01, 1.0], "tpr": [0.05, 1.0]}
    told = told_of(crafted("loss", [0.6, 0.5, 0.7], [0.078, 0.004, 0.137]), curve=curve)
    assert "the ledger allows a TPR of 0.050 at 1 % FPR" in told


def told_of(*attacks, **more):
    record = AuditRecord(target="run", guarantee=None, attacks=list(attacks), **more).record()
    return audit_text(of_audit(record))


def crafted(name, auc, tpr):
    return {"name": name, "auc": auc, "tpr_at_1_percent_fpr": tpr}


def test_attacks_whose_intervals_hold_a_guess_are_not_better_than_guessing():
    attacks = [
        crafted("rmia", [0.525, 0.492, 0.559], None),
        crafted("loss", [0.5, 0.47, 0.53], [0.012, 0.002, 0.03]),
        crafted("lira", [0.51, 0.48, 0.55], [0.026, 0.014, 0.04]),
    ]
    lines = {line.split()[1]: line for line in told_of(*attacks).splitlines() if "AUC" in line}
    guesses = {name for name, line in lines.items() if "no better than guessing" in line}
    assert guesses == {"rmia:", "loss:"}


def test_no_rate_is_stated_where_no_threshold_has_so_few_false_alarms():
    inside, outside = np.random.default_rng(0).integers(0, 4, size=(2, 300)).astype(float)
    found = describe_attack("coarse", inside + 1, outside, 0.95)
    assert found["tpr_at_1_percent_fpr"][0] > 0.1, "one value is of members alone"
    found = describe_attack("coarse", inside, outside, 0.95)
    assert found["tpr_at_1_percent_fpr"] is None
    assert found["tpr_at_0.1_percent_fpr"] is None
    assert "TPR 0.0" not in told_of(found)
    assert "not known" in told_of(found)


def test_no_rate_is_stated_where_the_others_are_fewer_than_its_inverse():
    # A guess finds 1 member in 17 before the first of 16 others, which 1 % of them cannot show.
    inside = np.append(np.full(6, 2.0), np.linspace(0, 1, 58))
    for others, known in ((16, False), (99, False), (100, True)):
        found = describe_attack("x", inside, np.linspace(0, 1, others), 0.95)
        assert (found["tpr_at_1_percent_fpr"] is not None) == known
        assert found["tpr_at_0.1_percent_fpr"] is None
    few = describe_attack("x", inside, np.linspace(0, 1, 16), 0.95)
    assert "no better than guessing" in told_of(few)


@pytest.mark.parametrize("caught", [0, 300])
def test_a_rate_of_none_or_all_has_an_interval_with_a_width(caught):
    outside = np.linspace(0, 1, 400)
    inside = np.full(300, 0.9999 if caught else -1.0) + np.arange(300) * 1e-9
    outside[-1] = 2.0
    value, low, high = describe_attack("x", inside, outside, 0.95)["tpr_at_1_percent_fpr"]
    assert value == caught / 300
    assert high - low == pytest.approx(1 - 0.025 ** (1 / 300), rel=1e-6)


def test_the_picture_has_the_interval_of_every_curve(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        "sfumato.commands.audit.command.save_roc",
        lambda path, curves, **others: drawn.update(others),
    )
    scores = np.random.default_rng(0).normal(size=100)
    record = AuditRecord(
        target="x", guarantee=None, attacks=[describe_attack("a", scores, scores, 0.9)]
    )
    audit.draw_curves(record, tmp_path / "x.png")
    low, high = drawn["bands"]["a: AUC 0.500"]
    assert len(low) == len(high) > 10
    monkeypatch.undo()
    audit.draw_curves(record, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_a_failed_check_is_spelt_out():
    bound = Bound(
        name="x", epsilon=1.0, delta=1e-5, confidence=0.95, relation="add-or-remove",
        thresholds="", assumes="",
    )  # fmt: skip
    guarantee = {"epsilon": 3.0, "delta": 1e-5, "relation": "add-or-remove", "unit": "example"}
    checks = [
        {"name": "noise", "question": "?", "passed": False, "p_value": 1e-9, "says": "too small"},
        {"name": "seed", "question": "?", "passed": True, "p_value": 0.5, "says": "fine"},
    ]
    found = AuditRecord(target="run", guarantee=guarantee, bounds=[bound], checks=checks)
    of_others = replace(found, bounds=[replace(bound, relation="replace", epsilon=9.0)])
    assert of_others.record()["bounds"][0]["kept"] is None, "it speaks of other neighbours"
    assert "BROKEN" not in audit_text(of_audit(of_others.record()))
    told = audit_text(of_audit(found.record()))
    assert "guarantee ε ≤ 3.00: by the ledger of run, at δ = 1e-05, for one image" in told
    assert "check FAILED: 1 of 2 checks" in told
    assert "does not break" not in told
    assert "FAILED    ?: too small" in told
    assert "1 of 2 passed" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "audit what?"),
        (["--run", "nowhere"], "there is no such folder"),
        (["--preset", "digits-cpu", "--shadows", "3"], "they come in pairs"),
        (["--run", "x", "--epsilon", "1"], "--epsilon is for sfumato audit trainer"),
        (["run", "x", "--data", "y.npz"], "--data is for sfumato audit"),
        (["--preset", "digits-cpu", "--image-size", "8"], "--image-size is for sfumato audit"),
        (["heads", "--run", "x"], "--run is for sfumato audit run"),
        (["heads", "--preset", "digits-cpu"], "has no preset"),
        (["trainer"], "audit what?"),
        (["--trainer", "audits:learn_digits", "--delta", "0.5"], "is not below 1/4000"),
        (["heads", "--delta", "0.5"], "is not below 1/10"),
        (["--trainer", "audits"], "give it as module:function"),
        (["--trainer", "audits:nothing"], "cannot be loaded"),
        (["--trainer", "tests/audits.py:learn_digits"], "a module's name, found in this folder"),
        (["--trainer", "audits:learn_digits", "--runs", "7"], "even number"),
        (["haeds"], 'Did you mean "heads"?'),
        (["heads", "--trials", "5"], "fewer than 100"),
        (["heads", "--class-size", "401", "--trials", "100"], "lower --class-size"),
        (["--preset", "heads-cpu", "--confidence", "1"], "confidence=1"),
    ],
)
def test_what_cannot_be_audited_is_refused_in_words(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *words, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def edited(folder, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change(copy)
    return Config(run=copy, shadows=0, device="cpu")


def renamed(copy):
    record = read_json(copy / "config.json")
    (copy / "config.json").write_text(json.dumps({**record, "verb": "invert"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda copy: (copy / "done.json").unlink(), "done.json is missing"),
        (lambda copy: (copy / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda copy: (copy / "ledger.jsonl").unlink(), "there is no ledger"),
        (lambda copy: (copy / "plan.json").unlink(), "has no plan.json"),
        (renamed, "is a run of sfumato invert"),
    ],
)
def test_a_run_that_is_not_whole_is_refused_by_what_is_missing(plain, tmp_path, change, message):
    with pytest.raises(RunError, match=message):
        do(edited(plain, tmp_path, change), tmp_path / "out")


def test_images_that_were_exchanged_since_are_noticed(tmp_path):
    data = few_digits(tmp_path / "digits.npz", trained_on=60, others=40)
    run = small_run(tmp_path / "run", data, mode="non-private", epochs=1)
    few_digits(data, trained_on=59, others=40)
    config = Config(run=run, shadows=0, device="cpu")
    with pytest.raises(DataError, match="trained on 60 images"):
        do(config, tmp_path / "out")
    Path(data).unlink()
    with pytest.raises(DataError):
        do(config, tmp_path / "out")


def test_presets_are_sound():
    assert set(audit.PRESETS) == {"digits-cpu", "heads-cpu"}
    assert all(isinstance(make(), Audit) for make in audit.PRESETS.values())
    with pytest.raises(ConfigError):
        Config()
