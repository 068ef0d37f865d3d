"""What a report reads of runs, and above all what it does not."""

import base64
import json
import math
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import MARKER, PNG, header, ledger_of, make_audit, make_run, plant, write

from sfumato.cli import COMMANDS, parse
from sfumato.commands import command_settings, report
from sfumato.config import to_json
from sfumato.errors import PrivacyError, RunError
from sfumato.reporting import words
from sfumato.reporting.card import read_card
from sfumato.reporting.render import caveats, render_page
from sfumato.runs import open_run
from sfumato.settings.audit import AuditHeads


def outputs(folder):
    return {name: (folder / name).read_text() for name in ("report.html", "report.md", "card.json")}


def test_epsilon_is_derived_from_the_ledger_and_not_taken_from_the_summary(tmp_path):
    path = make_run(tmp_path / "run")
    (path / "done.json").write_text(json.dumps({"epsilon": 0.01}))
    card = read_card(path)
    assert card.guarantee.epsilon == ledger_of(path).epsilon() > 0.5
    assert card.damage == (
        f"it adds up to epsilon {card.guarantee.epsilon:.4g}, and done.json says 0.01",
    )
    assert words.guarantee_words(card)[0] == "not known"
    card = read_card(make_run(tmp_path / "whole"))
    assert words.guarantee_words(card)[0] == f"ε ≤ {words.round_up(card.guarantee.epsilon)}"
    assert card.curve.epsilon[-1] == pytest.approx(card.guarantee.epsilon, rel=2e-3)
    assert list(card.curve.epsilon) == sorted(card.curve.epsilon)


def test_like_events_are_told_in_one_sentence(tmp_path):
    (spent,) = read_card(make_run(tmp_path / "run")).events
    assert (spent.stage, spent.count) == ("train", 30)
    assert words.spent_words(spent) == (
        "30 releases, each Gaussian noise of 2 times the norm bound on a Poisson batch (each "
        "example with chance 0.1)"
    )


def test_ledgers_of_stages_are_added_up(tmp_path):
    path = make_run(tmp_path / "run")
    one = read_card(path).guarantee.epsilon
    other = make_run(tmp_path / "other")
    place = path / "stages" / "teacher"
    place.mkdir(parents=True)
    (place / "ledger.jsonl").write_text((other / "ledger.jsonl").read_text())
    write(place / "done.json", {"epsilon": 0.01, "steps": 3})
    assert read_card(path).stages == {"teacher": {"steps": 3}}, "epsilon is the ledger's"
    (place / "done.json").unlink()
    two = read_card(path).guarantee.epsilon
    assert two > 1.3 * one
    (path / "bundle").mkdir()
    (path / "bundle" / "ledger.jsonl").write_text((path / "ledger.jsonl").read_text())
    assert read_card(path).guarantee.epsilon == two, "a line that comes twice counts once"


def test_an_unfinished_run_shows_what_there_is_and_what_is_planned(tmp_path):
    path = make_run(tmp_path / "run", taken=10, finished=False)
    with (path / "ledger.jsonl").open("a") as file:
        file.write('{"event": {"stage"')  # being written just now
    card = read_card(path)
    assert card.steps == (10, 30)
    assert card.guarantee.epsilon < card.guarantee.planned
    assert card.guarantee.planned == read_card(make_run(tmp_path / "whole")).guarantee.epsilon
    assert card.curve.done == 10
    assert "step 10 of 30" in words.progress_words(card)
    assert any("not finished" in limit for limit in caveats(card))
    assert (path / "ledger.jsonl").read_text().endswith('{"event": {"stage"'), "it mends nothing"


def test_plain_training_guarantees_nothing(tmp_path):
    card = read_card(make_run(tmp_path / "run", private=False))
    assert math.isinf(card.guarantee.epsilon)
    assert card.curve is None
    assert words.guarantee_words(card)[0] == "ε = ∞"
    assert "Nothing is guaranteed" in next(iter(caveats(card)))


def test_what_is_not_guaranteed_follows_from_the_ledgers_first_line(tmp_path):
    path = make_run(tmp_path / "run")
    before, *lines = (path / "ledger.jsonl").read_text().splitlines()
    first = header(unit="person", relation="replace", fixed_seed=True, public="only the weather")
    assert "One image replaced by another" in " ".join(caveats(read_card(path)))
    first["header"]["id"] = json.loads(before)["header"]["id"]
    write(path / "done.json", {})
    record = json.loads((path / "config.json").read_text())
    record["config"] |= {"unit": "person", "relation": "replace", "noise_seed": 1}
    write(path / "config.json", record)
    (path / "ledger.jsonl").write_text("\n".join([json.dumps(first), *lines]) + "\n")
    text = " ".join(caveats(read_card(path)))
    assert "one person, with all of their images" in text
    assert "only the weather" in text
    assert "fixed seed" in text
    assert "k times" not in text
    assert "fixed seed" in render_page([read_card(path)], [path])


def test_a_page_about_people_speaks_of_people(tmp_path):
    path = make_run(tmp_path / "run")
    before, *lines = (path / "ledger.jsonl").read_text().splitlines()
    first = json.loads(before)
    first["header"] |= {"unit": "person", "neighbours": "training parts"}
    write(path / "done.json", {})
    record = json.loads((path / "config.json").read_text())
    record["config"]["unit"] = "person"
    write(path / "config.json", record)
    (path / "ledger.jsonl").write_text("\n".join([json.dumps(first), *lines]) + "\n")
    card = read_card(path)
    assert "One person replaced by another is two changes" in " ".join(caveats(card))
    assert "one more person may move others between train and test" in " ".join(caveats(card))
    assert "(each person with chance 0.1)" in words.spent_words(card.events[0])
    assert "each example" not in render_page([card], [path])
    assert "train with --canaries" not in words.unproved(card)


@given(st.floats(min_value=0, max_value=1e6))
def test_rounded_guarantees_are_kept_and_rounded_bounds_proved(epsilon):
    assert float(words.round_down(epsilon)) <= epsilon <= float(words.round_up(epsilon))


def test_a_small_guarantee_has_digits_enough():
    told = {0.000_099: "0.000099", 0.03: "0.030", 0.5: "0.50", 2.996: "3.00"}
    assert {epsilon: words.round_up(epsilon) for epsilon in told} == told


@pytest.mark.parametrize("several", [False, True])
def test_nothing_private_is_in_a_report_unless_it_is_asked_for(tmp_path, several):
    path = make_run(tmp_path / "run")
    runs = [path, make_run(tmp_path / "plain", private=False)] if several else [path]
    for run in runs:
        plant(run)
        (run / "linked.png").symlink_to(run / "private" / "gallery.png")
    report.write_report(runs, tmp_path / "out")
    picture = base64.b64encode(PNG + MARKER.encode()).decode()
    for text in outputs(tmp_path / "out").values():
        assert MARKER not in text
        assert picture[-24:] not in text
        assert not any(
            number in text for number in ("0.123456", "0.1235", "0.9877", "0.988", "9.87")
        )
        assert "DO NOT SHARE" not in text.upper().replace("MUST NOT BE SHARED", "")
    assert not (tmp_path / "out" / "private").exists()
    report.write_report(runs, tmp_path / "out", include_private=True)
    for text in outputs(tmp_path / "out" / "private").values():
        assert MARKER in text, "or the test above proves nothing"


def test_what_is_private_lies_in_private_and_says_so_in_red(tmp_path):
    path = make_run(tmp_path / "run")
    (path / "private" / "gallery.png").write_bytes(PNG + MARKER.encode())
    found = report.write_report([path], path, include_private=True)
    assert found["report"] == str(path / "private" / "report.html")
    assert not (path / "report.html").exists()
    texts = outputs(path / "private")
    assert 'class="alarm"' in texts["report.html"]
    assert "0.900 (0.850 to 0.938)" in texts["report.html"]
    assert base64.b64encode(PNG + MARKER.encode()).decode() in texts["report.html"]
    assert "DO NOT SHARE" in texts["report.md"]
    card = json.loads(texts["card.json"])
    assert card["includes_private"]
    assert "Do not share" in card["warning"]
    report.write_report([path], path)
    assert not json.loads((path / "card.json").read_text())["includes_private"]


def test_a_run_inside_private_needs_to_be_asked_for(tmp_path):
    inner = make_run(make_run(tmp_path / "run") / "private" / "control")
    with pytest.raises(PrivacyError, match="--include-private"):
        read_card(inner)
    assert read_card(inner, include_private=True).private.of("accuracy")


def test_what_reconstruct_learnt_is_not_said_to_be_for_sharing(tmp_path):
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "config.json", {"verb": "reconstruct", "config": {"data": "digits"}})
    stage = tmp_path / "run" / "stages" / "base"
    stage.mkdir(parents=True)
    write(stage / "done.json", {"accuracy_of_heads": 0.5})
    card = read_card(tmp_path / "run")
    assert card.stages == {"base": {}}, "no ledger covers how good heads are"
    assert not words.may_be_shared(card)
    assert any("share it only if that split is public" in limit for limit in caveats(card))


def test_cost_is_told_against_plain_training_of_the_same(tmp_path):
    runs = [make_run(tmp_path / "dp"), make_run(tmp_path / "plain", private=False)]
    cards = [read_card(run, include_private=True) for run in runs]
    assert [words.cost(card, cards) for card in cards] == [
        "200 ms a step (median), 2.00 times that of plain, which has no privacy",
        "100 ms a step (median)",
    ]
    sized = [{"step": i, "seconds": 0.2, "batch": 80.0} for i in range(30)]
    (runs[0] / "private" / "metrics.jsonl").write_text("\n".join(map(json.dumps, sized)) + "\n")
    card = read_card(runs[0], include_private=True)
    assert words.cost(card) == "200 ms a step, 2.5 ms an example (median)"
    assert words.per_example(card) == "2.5 ms"
    assert words.per_example(cards[1]) == "", "it does not say how large its batches were"
    other = read_card(make_run(tmp_path / "other", augmult=4), include_private=True)
    assert words.cost(other, [other, cards[1]]) == "200 ms a step (median)"
    assert [words.cost(read_card(run)) for run in runs] == ["", ""], "times are private"


def test_settings_that_differ_are_set_side_by_side(tmp_path):
    runs = [make_run(tmp_path / "dp"), make_run(tmp_path / "plain", private=False)]
    rows = words.differing([read_card(run) for run in runs])
    assert rows == [("noise multiplier", "2", "-"), ("mode", "ghost_mixed", "non-private")]


def test_names_from_outside_are_shown_as_they_are(tmp_path):
    path = make_run(tmp_path / "run", model="<script>alert(1)</script>|`x`")
    (path / "done.json").write_text(json.dumps({"<b>bold</b>": "</style><i>"}))
    report.write_report([path], path)
    page = (path / "report.html").read_text()
    assert "<script" not in page
    assert "<b>bold" not in page
    assert "</style><i>" not in page
    text = (path / "report.md").read_text()
    assert "<script" not in text.split("Do it again")[0]
    bound = [{"name": '"><script>', "epsilon": 1.0, "delta": 1e-5}]
    audit = make_audit(tmp_path / "audit", bounds=bound)
    card = read_card(audit, include_private=True)
    assert "<script" not in render_page([card], [audit])


def test_a_run_with_a_report_goes_on_and_one_that_has_not_begun_takes_new_settings(tmp_path):
    from sfumato.commands.train.command import Config

    begun = open_run(Config(epsilon=3.0), verb="train", out=tmp_path / "run")
    begun.measure(0, lr=1.0)
    begun.close()
    for private in (False, True):
        report.write_report([tmp_path / "run"], tmp_path / "run", include_private=private)
    open_run(Config(epsilon=3.0), verb="train", out=tmp_path / "run").close()
    with pytest.raises(RunError, match="other settings"):
        open_run(Config(epsilon=4.0), verb="train", out=tmp_path / "run")
    open_run(Config(epsilon=3.0), verb="train", out=tmp_path / "new").close()
    for private in (False, True):
        report.write_report([tmp_path / "new"], tmp_path / "new", include_private=private)
    open_run(Config(epsilon=4.0), verb="train", out=tmp_path / "new").close()
    assert not (tmp_path / "new" / "report.html").exists(), "it spoke of other settings"


def test_bad_input_is_answered_with_what_to_do(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        read_card(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="is a file"):
        read_card(tmp_path / "file")
    make_run(tmp_path / "runs" / "one")
    with pytest.raises(RunError, match="There are runs in it: one"):
        read_card(tmp_path / "runs")
    path = make_run(tmp_path / "run")
    (path / "ledger.jsonl").write_text('{"header": {}}\n')
    with pytest.raises(RunError, match=r"ledger.jsonl cannot be trusted"):
        read_card(path)
    (path / "ledger.jsonl").write_text('{"a\n{}\n')
    with pytest.raises(RunError, match="damaged"):
        read_card(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(RunError, match="names no command"):
        read_card(path)


def test_a_file_is_told_to_be_no_run(tmp_path):
    (tmp_path / "images.npz").touch()
    with pytest.raises(RunError, match="Give the directory of a run"):
        report.write_reports(report.Config(runs=(tmp_path / "images.npz",)), None, print)


def test_pages_name_places_by_their_last_folders(tmp_path):
    path = make_run(tmp_path / "run", data=str(tmp_path / "mine" / "faces.npz"))
    write(path / "done.json", {"model": str(tmp_path / "net.py"), "weights": str(tmp_path)})
    audit = make_audit(tmp_path / "audit", target=str(path))
    write(audit / "done.json", {"target": str(path)})
    for runs in ([path], [audit], [path, audit]):
        report.write_report(runs, tmp_path / "out", include_private=True)
        for name, text in outputs(tmp_path / "out" / "private").items():
            assert str(tmp_path) not in text, name
    assert "mine/faces.npz" in (tmp_path / "out" / "private" / "report.html").read_text()
    assert words.title([read_card(audit)]) == f"An audit of {tmp_path.name}/run"


def test_a_page_without_a_ledger_does_not_speak_of_one(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    write(path / "config.json", {"verb": "invert", "config": {"mode": "non-private"}})
    card = read_card(path)
    assert "computed again" not in render_page([card], [path])
    assert not any("spent" in limit for limit in caveats(card)), "nothing is"
    other = make_run(tmp_path / "other")
    assert "computed again" in render_page([read_card(other)], [other])


def test_a_ledger_that_lost_its_header_is_not_shown_as_a_cheaper_one(tmp_path):
    path = make_run(tmp_path / "run")
    lines = (path / "ledger.jsonl").read_text().splitlines(keepends=True)
    (path / "ledger.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(RunError, match="does not begin with a header"):
        read_card(path)


@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if verb != "report"])
def test_the_command_makes_the_same_settings_again(tmp_path, verb):
    for preset in command_settings(verb)[1].values():
        write(tmp_path / "config.json", {"verb": verb, "config": to_json(preset())})
        first, second, *flags = shlex.split(report.command_of(tmp_path))
        assert (first, second) == ("sfumato", verb)
        assert parse(verb, flags).config == preset()


def test_the_command_has_flags_for_what_is_in_no_preset(tmp_path):
    from sfumato.commands.train import command as train

    config = train.Config(
        mode="non-private", freeze=("a.*", "b c"), flip=True, lr=0.25, data="my images"
    )
    write(tmp_path / "config.json", {"verb": "train", "config": to_json(config)})
    flags = shlex.split(report.command_of(tmp_path))[2:]
    assert parse("train", flags).config == config
    write(tmp_path / "config.json", {"verb": "train", "config": {"gone": 1}})
    assert report.command_of(tmp_path) is None


def test_the_command_names_the_subcommand(tmp_path):
    config = AuditHeads(trials=999)
    write(tmp_path / "config.json", {"verb": "audit", "config": to_json(config)})
    flags = shlex.split(report.command_of(tmp_path))[2:]
    assert parse("audit", flags).config == config


def test_several_runs_are_reported_beside_the_first(tmp_path):
    runs = (make_run(tmp_path / "dp"), make_run(tmp_path / "plain", private=False))
    found = report.write_reports(report.Config(runs=runs), None, print)
    assert found["report"] == str(tmp_path / "report" / "report.html")
    assert "Where they differ" in (tmp_path / "report" / "report.md").read_text()
    cards = json.loads((tmp_path / "report" / "card.json").read_text())["runs"]
    assert [card["name"] for card in cards] == ["dp", "plain"]
    assert cards[1]["guarantee"]["epsilon"] == "inf"
    assert "not share" not in report.show(found)


def test_without_a_word_the_newest_run_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "only")
    found = report.write_reports(report.Config(), None, print)
    assert found["report"] == "runs/only/report.html"
