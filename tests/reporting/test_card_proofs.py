"""What a report says of audits: what was proved, of whom, and what it takes."""

import pytest
from pages import make_audit, make_run, write

from sfumato.reporting import words
from sfumato.reporting.card import read_card
from sfumato.reporting.render import render_markdown, render_page


def test_an_audit_stands_beside_its_guarantee(tmp_path):
    card = read_card(make_audit(tmp_path / "audit"), include_private=True)
    assert words.guarantee_words(card) == (
        "ε ≤ 3.00",
        "by the ledger of runs/dp, at δ = 1e-05, for one image added or removed",
    )
    number, about = words.proof_words(card)
    assert number == "ε ≥ 1.73"
    assert "95 %" in about
    assert "many" in about
    assert "does not break the guarantee" in about
    page = render_page([card], [tmp_path / "audit"])
    assert "Assumes: coins" in page
    assert "0.510 (0.490 to 0.530)" in page
    assert "p = 0.4" in page
    assert read_card(tmp_path / "audit").private is None


@pytest.mark.parametrize("canaries", [0, 100])
def test_what_a_proof_would_take_is_said_beside_attacks_that_prove_nothing(tmp_path, canaries):
    path = make_run(tmp_path / "run", canaries=canaries)
    loss = {"name": "loss", "auc": [0.5, 0.4, 0.6]}
    write(path / "private" / "audit.json", {"target": str(path), "attacks": [loss]})
    runs = [path, make_audit(tmp_path / "audit")]
    cards = [read_card(run, include_private=True) for run in runs]
    page = render_page(cards, runs)
    assert "not audited" not in page
    assert ("--canaries 1000" in page) == (not canaries)
    assert ("asks the canaries" in words.proof_words(cards[0])[1]) == bool(canaries)


def test_curves_of_attacks_have_their_intervals(tmp_path):
    points = {"fpr": [0.0, 0.5, 1.0], "tpr": [0.0, 0.6, 1.0]}
    for band in ({}, {"low": [0.0, 0.4, 1.0], "high": [0.1, 0.8, 1.0]}):
        attack = {"name": "loss", "auc": [0.6, 0.5, 0.7], "roc": {**points, **band}}
        path = make_audit(tmp_path / f"audit{len(band)}", attacks=[attack])
        page = render_page([read_card(path, include_private=True)], [path])
        assert ('class="band attack-0"' in page) == bool(band)


def test_a_broken_guarantee_and_a_failed_check_are_headlines(tmp_path):
    bound = {"name": "x", "epsilon": 3.5, "delta": 1e-5, "relation": "add-or-remove"}
    card = read_card(make_audit(tmp_path / "a", bounds=[bound]), include_private=True)
    assert "BROKEN" in words.proof_words(card)[1]
    check = {"name": "clip", "question": "Is it clipped?", "passed": False, "says": "no"}
    card = read_card(make_audit(tmp_path / "b", checks=[check]), include_private=True)
    assert words.proof_words(card)[0] == "check FAILED"
    for path in (tmp_path / "a", tmp_path / "b", make_audit(tmp_path / "sound")):
        card = read_card(path, include_private=True)
        assert words.broken(card.private) == (path.name != "sound")
        assert ('class="big no"' in render_page([card], [path])) == (path.name == "a")
        assert ('class="big quiet no"' in render_page([card], [path])) == (path.name == "b")


@pytest.mark.parametrize("missing", ["promise", "bounds", "attacks", "checks", "curve", "target"])
def test_an_audit_with_a_part_missing_is_still_shown(tmp_path, missing):
    path = make_audit(tmp_path / "audit", **{missing: None})
    card = read_card(path, include_private=True)
    assert "<h1>" in render_page([card], [path])
    assert render_markdown([card])
    write(path / "private" / "audit.json", {})
    assert read_card(path, include_private=True).private.of("bound") == ()


def test_a_bound_about_other_neighbours_is_not_held_against_the_guarantee(tmp_path):
    bound = {"name": "x", "epsilon": 3.5, "delta": 1e-5, "relation": "replace"}
    card = read_card(make_audit(tmp_path / "run", bounds=[bound]), include_private=True)
    (found,) = card.private.of("bound")
    assert found.guaranteed is None
    assert found.kept is None


def test_what_an_attacker_proves_of_other_models_is_no_headline(tmp_path):
    path = make_run(tmp_path / "run")
    write(path / "private" / "findings.json", {"parts": {"theft": "private/theft"}})
    place = path / "private" / "theft" / "private"
    place.mkdir(parents=True)
    write(place.parent / "config.json", {"verb": "reconstruct", "config": {}})
    privacy = {"relation": "replace", "delta": 0.1, "epsilon_proved": 2.9, "confidence": 0.95}
    write(place / "scores.json", {"auc": 0.9, "auc_interval": [0.8, 1.0], "privacy": privacy})
    card = read_card(path, include_private=True)
    assert words.proof_words(card)[0] == "see below"
    assert card.private.of("attack")[0].value == (0.9, 0.8, 1.0)
    assert card.private.of("bound")[0].value == (2.9, None, None)


def test_a_run_of_runs_names_each_and_counts_its_own_among_the_proofs(tmp_path):
    """As sfumato demo leaves them: the auditor's findings lie with the audited run too."""
    path = make_run(tmp_path / "run")
    for name in ("done.json", "plan.json", "private/scores.json"):
        (path / name).unlink()
    write(path / "config.json", {"verb": "demo", "config": {}})
    trained = make_run(path / "stages" / "train")
    (path / "ledger.jsonl").write_text((trained / "ledger.jsonl").read_text())
    plain = make_run(path / "private" / "plain", private=False)
    loss = {"name": "loss", "auc": [0.5, 0.4, 0.6]}
    for place, target in (("audited", trained), ("a_plain", plain)):
        found = {"attacks": [loss], "target": str(target), "bounds": []}
        if target is trained:
            found["bounds"] = [{"name": "coins", "epsilon": 0.5, "delta": 1e-5}]
        audit = make_audit(path / "private" / place, **found, checks=[])
        (target / "private" / "audit.json").write_text((audit / "private/audit.json").read_text())
    stolen = path / "private" / "stolen"
    inner = stolen / "stages" / "noise=0" / "private"
    inner.mkdir(parents=True)
    write(stolen / "config.json", {"verb": "reconstruct", "config": {}})
    write(inner.parent / "config.json", {"verb": "reconstruct", "config": {}})
    write(inner / "scores.json", {"accuracy_of_heads": 0.5})
    found = read_card(path, include_private=True).private
    assert [attack.name for attack in found.of("attack")] == ["train: loss", "plain: loss"]
    assert [rate.name for rate in found.of("accuracy")] == [
        "train: test accuracy", "plain: test accuracy",
        "stolen: noise=0: accuracy of the heads under attack",
    ]  # fmt: skip
    assert [(bound.name, bound.own) for bound in found.of("bound")] == [("train: coins", True)]
    card = read_card(path, include_private=True)
    assert words.proof_words(card)[0] == "ε ≥ 0.50"
    assert words.proof_words(read_card(path))[0] == "not shown"
