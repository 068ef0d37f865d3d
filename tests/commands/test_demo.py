"""The demo, end to end: what it leaves, what it guarantees, and the page that tells it."""

import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from contents import summaries
from cuts import cut_in
from PIL import Image

from sfumato.cli import main
from sfumato.commands.demo import command as demo
from sfumato.commands.demo.page import attack_verdict
from sfumato.commands.invert import command as invert
from sfumato.commands.reconstruct import command as reconstruct
from sfumato.commands.release import command as release
from sfumato.errors import ConfigError
from sfumato.files import read_json, read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.results import Finding
from sfumato.runs import Run, open_run
from sfumato.settings import demo as demo_settings


def run_demo(out, **changes):
    config = demo.Config(**changes)
    with open_run(config, verb="demo", out=out) as run:
        return demo.run(config, run)


def less(patch, name, **changes):
    """A chapter of the demo with smaller settings."""
    usual = getattr(demo.Config, name)
    patch.setattr(demo.Config, name, lambda *given: replace(usual(*given), **changes))


@pytest.fixture(scope="module", name="short")
def a_short_demo_that_was_cut(tmp_path_factory):
    """The same chapters, hardly trained; cut, and then gone on with."""
    heads = replace(
        reconstruct.PRESETS["digits-private"](), steps=2, stats_heads=64, trials=64, width=8
    )
    asked = invert.PRESETS["digits-cpu"]()
    asked = replace(
        asked, epochs=0.2, judge_epochs=1, gan=replace(asked.gan, iterations=2, look_every=1),
        search=replace(asked.search, z_steps=1),
    )  # fmt: skip
    matching = replace(release.PRESETS["digits-cpu"]().matching, k=2)
    out = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_settings, "STEPS", 2)
        patch.setattr(demo_settings, "CANARIES", 200)
        patch.setitem(reconstruct.PRESETS, "digits-private", lambda: heads)
        patch.setitem(invert.PRESETS, "digits-cpu", lambda: asked)
        less(patch, "few_plain", steps=2)
        less(patch, "sharing", public_images=200, student_epochs=0.1, matching=matching)
        with cut_in("sfumato.commands.audit.finished:audit_run", 2):
            run_demo(out)
        made = out / "stages/train/done.json"
        before = made.stat().st_mtime_ns
        paid = read_lines(out / "stages/train/ledger.jsonl")
        summary = run_demo(out, open_page=False)
    assert made.stat().st_mtime_ns == before, "what was finished is not made again"
    assert read_lines(out / "stages/train/ledger.jsonl") == paid, "and not paid for again"
    assert Path(summary["page"]).is_file()
    assert Run(out).summary == summary
    return out


@pytest.fixture(scope="module", name="whole")
def a_whole_demo(tmp_path_factory):
    """`make demo`, as it is."""
    out = tmp_path_factory.mktemp("demo") / "run"
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--preset", "digits-cpu", "--out", str(out), "--json"])
    assert stopped.value.code == 0
    return out


def scores(place):
    return read_json(place / "private" / "scores.json")


@pytest.mark.full
def test_private_networks_are_nearly_as_good_as_the_plain_one(whole):
    private, plain = scores(whole / "stages/train"), scores(whole / "private/plain")
    assert 0.93 < private["test_accuracy"] < plain["test_accuracy"] + 0.02
    assert scores(whole / "stages/release")["test_accuracy"] > 0.9


@pytest.mark.full
def test_members_of_few_digits_are_told_without_privacy_and_not_with_it(whole):
    plain, private = (
        next(
            attack["auc"]
            for attack in read_json(whole / f"private/members_{name}/private/audit.json")["attacks"]
            if attack["name"] == "loss"
        )
        for name in ("plain", "private")
    )
    assert plain[1] > 0.52  # the lower end of the interval
    # Noise is fresh in every run, and 100 digits leave an AUC with a deviation of about 0.04.
    assert private[0] < plain[0]
    assert private[1] < 0.58


@pytest.mark.full
def test_digits_are_stolen_without_noise_and_not_with_it(whole):
    plain, private = (
        [float(cell.split()[0].replace("∞", "inf")) for cell in line.strip("| \n").split(" | ")[1:]]
        for line in (whole / "private/stolen/private/study.md").read_text().splitlines()[2:]
    )
    assert plain[2] > 0.8  # AUC
    assert private[2] < 0.65
    assert private[3] < private[4] + 0.02  # TPR at 1 % FPR, and what no attack can exceed


@pytest.mark.full
def test_a_class_is_read_out_of_a_network(whole):
    """By the preset `digits-cpu` of sfumato invert, whole."""
    found = scores(whole / "private/inverted")
    majority, judge = found["majority"], found["judges"]["group-cnn"]
    assert majority["top1"]["mean"] > 0.4 > 10 * majority["floor_top1"]["mean"]
    assert judge["top1"]["mean"] >= 0.5
    assert judge["floor_top1"]["mean"] < 0.1
    assert judge["held_out_top1"]["mean"] > 0.8
    assert found["target_test_accuracy"] > 0.9
    assert (whole / "private/inverted/private/guesses.png").stat().st_size > 10_000


@pytest.mark.full
def test_what_is_proved_is_more_than_half_of_what_is_guaranteed_and_not_more(whole):
    found = read_json(whole / "private/audited/private/audit.json")
    guaranteed = found["promise"]["epsilon"]
    assert guaranteed / 2 < max(bound["epsilon"] for bound in found["bounds"]) <= guaranteed
    assert all(bound["kept"] for bound in found["bounds"])
    assert all(check["passed"] for check in found["checks"])
    plain = read_json(whole / "private/members_plain/private/audit.json")
    assert plain["promise"] is None


def test_all_that_may_be_shared_costs_what_was_guaranteed(short):
    summary = read_json(short / "done.json")
    assert 2.95 < summary["epsilon"] <= 3
    assert summary["not_for_release"] == []
    assert str(short) not in summaries(short)
    ledger = Ledger.from_records(read_lines(short / "stages/release/ledger.jsonl"))
    assert ledger.epsilon() == summary["epsilon"]
    assert {release.stage for release in ledger.releases} == {"train", "moments", "card"}
    assert {path.name for path in (short / "stages").iterdir()} == {"train", "release"}
    with pytest.raises(SystemExit) as stopped:
        main(["release", "verify", str(short / "stages/release/bundle")])
    assert stopped.value.code == 0


def test_the_page_has_this_runs_numbers_and_needs_nothing_else(short):
    page = (short / "private/demo.html").read_text()
    accuracy = scores(short / "stages/train")["test_accuracy"]
    assert f"{accuracy:.3f}" in page
    assert "Private. Do not share this page." in page
    told = re.sub(r"<[^>]*>", " ", page)
    for place in re.finditer(r"at most \d\.\d\d|epsilon \d\.\d\d|ε ≤ \d\.\d\d", told):
        assert "δ = 1e-05" in told[place.end() : place.end() + 20], told[place.start() :][:80]
    pictures = re.findall(r'<img src="([^"]{40})', page)
    assert len(pictures) == 3
    assert all(picture.startswith("data:image/png;base64,") for picture in pictures)
    assert not re.search(r'(src|href)="(https?:)?//', page)
    links = re.findall(r'<a href="([^"#]+)"', page)
    assert len(links) == 6
    for link in links:
        assert (short / "private" / unquote(link)).is_file(), link
    with Image.open(short / "stages/release/pictures.png") as picture:
        assert picture.width > 400


def test_nothing_open_lies_about_what_is_private(short):
    for path in short.rglob("report.html"):
        assert "private" in path.relative_to(short).parts


@pytest.mark.parametrize(
    ("auc", "words"),
    [
        ((0.94, 0.93, 0.95), "better than guessing"),
        ((0.508, 0.5002, 0.516), "hardly better than guessing"),
        ((0.51, 0.48, 0.54), "no better than guessing"),
        (None, "no better than guessing"),
    ],
)
def test_how_much_better_than_guessing_an_attack_is(auc, words):
    assert attack_verdict(Finding(kind="attack", name="loss", value=auc)) == words


@pytest.mark.parametrize(("screen", "opened"), [("", 0), (":0", 1)])
def test_the_page_is_opened_where_there_is_a_screen(screen, opened, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("webbrowser.open", asked.append)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", screen)
    demo.show_page(tmp_path / "demo.html")
    assert len(asked) == opened


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_a_demo_without_a_guarantee_is_refused(epsilon):
    with pytest.raises(ConfigError, match="releases what it makes"):
        demo.Config(epsilon=epsilon)
