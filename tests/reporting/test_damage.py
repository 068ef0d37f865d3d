"""A ledger that has lost something is not believed."""

import json

import pytest
from pages import make_run

from sfumato.commands import account, report
from sfumato.reporting import words
from sfumato.reporting.card import read_card
from sfumato.reporting.render import caveats


def without_some(lines):
    return lines[:10] + lines[20:]


def without_the_last(lines):
    return lines[:-1]


def with_other_noise(lines):
    release = json.loads(lines[5])
    release["event"]["noise_multiplier"] = 0.1
    return [*lines[:5], json.dumps(release), *lines[6:]]


def spoil(path, how):
    file = path / "ledger.jsonl"
    file.write_text("\n".join(how(file.read_text().splitlines())) + "\n")
    return path


def for_people(lines):
    first = json.loads(lines[0])
    first["header"]["unit"] = "person"
    return [json.dumps(first), *lines[1:]]


LOSSES = [
    (for_people, "unit person, and config.json says example"),
    (without_some, "lacks 10 of its steps: 9, 10, 11, ..."),
    (without_the_last, "29 of the 30 steps that were taken"),
    (with_other_noise, "step 4 is not as in plan.json: Gaussian noise of 0.1"),
]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(("how", "found"), LOSSES)
def test_what_is_missing_or_changed_is_told_in_red_and_on_the_screen(
    tmp_path, how, found, finished
):
    path = spoil(make_run(tmp_path / "run", finished=finished), how)
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(30)))
    card = read_card(path)
    assert any(found in problem for problem in card.damage)
    of_summary = finished and how is not for_people  # make_run's summary says no unit
    assert any("done.json" in problem for problem in card.damage) == of_summary
    assert words.guarantee_words(card)[0] == "not known"
    assert not words.may_be_shared(card)
    assert "damaged" in next(iter(caveats(card)))
    told = report.show(report.write_report([path], path))
    assert "DAMAGED" in told
    assert found in told
    page = (path / "report.html").read_text()
    assert '<p class="alarm" role="note"><strong>This run is damaged.' in page
    assert "ε ≤" not in page
    assert "DAMAGED" in (path / "report.md").read_text()


@pytest.mark.parametrize(("how", "found"), LOSSES)
@pytest.mark.parametrize("file", ["", "ledger.jsonl"])
def test_the_price_of_such_a_ledger_says_it_too(tmp_path, how, found, file):
    path = make_run(tmp_path / "run")
    whole = account.run(account.Config(ledger=path / file), None)
    assert "DAMAGED" not in account.show(whole)
    told = account.show(account.run(account.Config(ledger=spoil(path, how) / file), None))
    assert "DAMAGED" in told
    assert found in told


@pytest.mark.parametrize(
    ("name", "value"),
    [("delta", 0.1), ("unit", "person"), ("relation", "replace"), ("data", "flowers")],
)
def test_a_summary_that_says_otherwise_than_the_header_is_told(tmp_path, name, value):
    path = make_run(tmp_path / "run")
    done = json.loads((path / "done.json").read_text())
    (path / "done.json").write_text(json.dumps(done | {name: value}))
    found = account.run(account.Config(ledger=path), None)["damage"]
    assert any(name in problem and "done.json" in problem for problem in found)


@pytest.mark.parametrize("change", [{"secure": True}, {"noise_seed": 3}, {"delta": 1e-7}])
def test_settings_that_say_otherwise_than_the_header_are_told(tmp_path, change):
    path = make_run(tmp_path / "run", **change)
    (problem,) = account.run(account.Config(ledger=path), None)["damage"]
    assert "config.json" in problem


def test_a_private_run_without_its_ledger_does_not_say_that_nothing_was_guaranteed(tmp_path):
    path = make_run(tmp_path / "run")
    (path / "ledger.jsonl").unlink()
    card = read_card(path)
    assert card.damage == ("there is no ledger, and done.json says that there was one",)
    assert words.guarantee_words(card)[0] == "not known"
    going = make_run(tmp_path / "going", finished=False)
    (going / "ledger.jsonl").unlink()
    assert read_card(going).damage == (), "its first step is not taken yet"
    (going / "metrics.jsonl").write_text('{"step": 0}\n')
    assert "steps of plan.json were taken" in read_card(going).damage[0]


@pytest.mark.parametrize("private", [True, False])
def test_a_ledger_that_is_whole_is_believed(tmp_path, private):
    assert read_card(make_run(tmp_path / "run", private=private)).damage == ()
    going = make_run(tmp_path / "going", private=private, taken=10, finished=False)
    (going / "metrics.jsonl").write_text('{"step": 9}\n')
    assert read_card(going).damage == ()
