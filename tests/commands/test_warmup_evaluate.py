"""What sfumato warmup was worth: fidelity of drawn images, and controls."""

import json
import shutil
from dataclasses import replace

import pytest
from contents import content
from cuts import cut_in
from warmups import scores_of, tiny, warm
from whole_runs import fixtures

from sfumato.cli import main
from sfumato.commands.warmup import evaluate as warmup_evaluate
from sfumato.commands.warmup.context import make_context
from sfumato.errors import ConfigError
from sfumato.reporting.card import read_card
from sfumato.reporting.scores import findings_of
from sfumato.runs import open_run

settings, finished = fixtures(tiny, warm)
ALONE = "stages/evaluate/private/public-alone/model.safetensors"


@pytest.fixture(scope="module", name="controlled")
def a_run_with_controls(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("controlled") / "run"
    shutil.copytree(finished, out)
    words = ["warmup", "evaluate", "--out", str(out), "--controls"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 0
    return out


def test_drawn_images_are_compared_with_test_images_beside_as_many_public_ones(finished):
    found = scores_of(finished)["fidelity"]
    assert "scattering" in found.pop("features")
    assert set(found) == {"drawn", "public"}
    for part in found.values():
        assert (part["real_count"], part["made_count"]) == (60, 30)
    # A generator of six steps draws noise.
    assert found["public"]["frechet"] < found["drawn"]["frechet"]
    assert found["public"]["coverage"] > found["drawn"]["coverage"]


def test_where_more_are_drawn_they_stand_beside_private_ones(settings, finished, tmp_path):
    config = replace(settings, number=70)
    with open_run(config, verb="warmup", out=tmp_path / "run") as run:
        context = make_context(config, run)
        context.private.select(range(70)).save_npz(run.stage("sample").path / "images.npz")
        extractor = warmup_evaluate.prepare_evaluation(context)
        found = warmup_evaluate.fidelity(context, extractor)
    counts = {name: part["made_count"] for name, part in found.items() if name != "features"}
    assert counts == {"drawn": 54, "public": 54, "drawn_more": 70, "private": 70}
    told = warmup_evaluate.log_fidelity(found)
    assert "to 60 test images: 54 drawn " in told
    assert "FID" not in told


def test_distances_are_told_with_how_many_images_each_is_of():
    names = {"drawn": 400, "public": 400, "drawn_more": 3600, "private": 3600}
    found = {
        name: {"real_count": 1000, "made_count": count, "frechet": place + 0.25}
        for place, (name, count) in enumerate(names.items())
    }
    assert warmup_evaluate.log_fidelity({**found, "features": "wavelets"}) == (
        "Frechet distance to 1,000 test images: 400 drawn 0.25, 400 public 1.25, 3,600 drawn 2.25, "
        "3,600 private 3.25; lower is nearer (wavelets)"
    )


def test_too_few_images_to_compare_do_not_stop_a_run(settings, finished, tmp_path):
    with open_run(settings, verb="warmup", out=tmp_path / "run") as run:
        context = make_context(settings, run)
        context.public.select(range(0, 54, 12)).save_npz(run.stage("sample").path / "images.npz")
        extractor = warmup_evaluate.prepare_evaluation(context)
        found = warmup_evaluate.fidelity(context, extractor)
    assert found.keys() == {"features"}
    assert "too few" in warmup_evaluate.log_fidelity(found)


def test_how_good_images_are_stays_private_and_is_shown(settings, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    said = []
    config = replace(settings, stage="evaluate")
    with open_run(config, verb="warmup", out=tmp_path / "run", say=said.append) as run:
        warmup_evaluate.evaluate(make_context(config, run), run.stage("evaluate"))
    (line,) = [words for words in said if words.startswith("images (private)")]
    assert "30 drawn" in line
    assert "30 public" in line
    for path in (tmp_path / "run").rglob("*"):
        if "private" not in path.parts and path.is_file():
            assert b"rechet" not in path.read_bytes(), path


def test_each_control_is_named_before_it_runs_and_once(settings, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    said = []
    config = replace(settings, stage="evaluate", controls=True)
    with open_run(config, verb="warmup", out=tmp_path / "run", say=said.append) as run:
        context = make_context(config, run)
        warmup_evaluate.control_runs(context, run.stage("evaluate"))
        named = [words.partition(":")[0] for words in said if words.startswith("control ")]
        assert named == ["control scratch", "control public-alone", "control public-alone-dp"]
        assert said[0].startswith("control scratch: private training without")
        said.clear()
        warmup_evaluate.control_runs(context, run.stage("evaluate"))
    assert said == [], "nothing runs again"


def test_a_report_has_each_control_once_and_those_of_earlier_versions(controlled, tmp_path):
    shutil.copytree(controlled, tmp_path / "run")
    today = [rate.name for rate in findings_of(controlled).of("accuracy")]
    scores = {**scores_of(controlled), "warmup_with_width_4": 0.5}
    (tmp_path / "run/private/scores.json").write_text(json.dumps(scores))
    (tmp_path / "run/private/findings.json").unlink()
    rates = read_card(tmp_path / "run", include_private=True).private.of("accuracy")
    assert [rate.name for rate in rates][:5] == today
    names = [rate.name for rate in rates]
    assert len(names) == 6
    assert "warmup with width 4" in names
    assert "and after private training from there" in names
    assert "private training without a warm-up" in names
    assert not [name for name in names if name.startswith(("scratch", "public-alone"))]


def test_controls_that_are_done_stay(controlled, settings, tmp_path, monkeypatch):
    shutil.copytree(controlled, tmp_path / "run")
    before = scores_of(controlled)
    assert set(before) == {
        "warmup", "dp", "warmup_on_public_images_alone", "dp_from_public_images_alone",
        "dp_from_scratch", "fidelity", "test_images",
    }  # fmt: skip
    for name in (
        "sfumato.diffusion.generator.accumulate_gradient",
        "sfumato.training.fit.TrainState.advance",
    ):
        monkeypatch.setattr(name, lambda *_: pytest.fail("nothing is left to learn"))
    config = replace(settings, stage="evaluate")
    warm(replace(config, controls=True), tmp_path / "run")
    assert scores_of(tmp_path / "run") == before
    warm(config, tmp_path / "run")
    assert scores_of(tmp_path / "run") == before
    done = json.loads((tmp_path / "run/stages/evaluate/done.json").read_text())
    assert len(done["controls"]) == 3


def test_a_control_that_was_cut_ends_the_same(settings, finished, controlled, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    config = replace(settings, stage="evaluate", controls=True)
    with cut_in("sfumato.training.fit:TrainState.advance", 9):
        warm(config, tmp_path / "run")
    begun = (tmp_path / "run" / ALONE).with_name("private")
    assert (begun / "checkpoint.safetensors").exists()
    warm(config, tmp_path / "run")
    assert content(tmp_path / "run" / ALONE) == content(controlled / ALONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extractor": "resnet19"}, "Did you mean"),
        ({"extractor": "wrn-16-4"}, "Give --extractor-weights FILE"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything(settings, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        warm(replace(settings, **changes), tmp_path / "run")
    assert not (tmp_path / "run/stages").exists()
