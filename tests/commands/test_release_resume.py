"""A release that is cut anywhere goes on to the same bundle and pays for nothing twice."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bundles import digest
from contents import content
from planted import replace_everywhere
from releases import guaranteeing, ledger_of, make, scores_of, stages_of, tiny

from sfumato.commands.release import evaluate as release_evaluate
from sfumato.commands.release import stages as release_stages
from sfumato.files import read_json
from sfumato.metrics import quality
from sfumato.privacy import noise
from sfumato.runs import Run
from sfumato.settings.release import ReleaseSettings
from sfumato.sharing import bundle, feature_matching
from sfumato.sharing import moments as synth_moments
from sfumato.sharing.bundle import verify_bundle
from sfumato.training.fit import TrainState

STAGES = ReleaseSettings.stage_names()

SAME = (
    "bundle/images.npz", "bundle/soft_labels.npz", "stages/moments/moments.safetensors",
    "stages/match/near_copies.json", "stages/student/model.safetensors", "private/scores.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Noise that repeats, so that two runs can be compared."""
    return tiny(tmp_path_factory.mktemp("sets"), noise_seed=4)


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    make(settings, out)
    return out


def require_same(out, other):
    for name in SAME:
        assert content(out / name) == content(other / name), name
    # Tags are keyed by the ledger's id, which every run draws for itself.
    one, two = (
        [replace(release, ledger="", tag="") for release in ledger_of(folder).releases]
        for folder in (out, other)
    )
    assert one == two
    assert read_json(out / "done.json")["epsilon"] == read_json(other / "done.json")["epsilon"]


def cut(monkeypatch, config, out, where, name, *, when=lambda *_: True, after=False):
    """Run until `where.name` is called with what `when` accepts, and end there."""
    real = getattr(where, name)

    def dies(*arguments, **others):
        if not when(*arguments):
            return real(*arguments, **others)
        if after:
            real(*arguments, **others)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        replace_everywhere(patched, where, name, dies)
        with pytest.raises(KeyboardInterrupt):
            make(config, out)


def file(wanted):
    return lambda run, name, *_: name == wanted


def stage(wanted):
    return lambda run, *_: run.path.name == wanted


def is_there(name):
    return lambda path, *_: path.name == name and path.exists()


CUTS = {
    "in the teacher": (TrainState, "advance", lambda train_state: train_state.step == 2, False),
    "before the teacher's end": (Run, "finish", stage("teacher"), False),
    "before the sums": (synth_moments, "sum_moments", lambda *_: True, False),
    "before they are paid": (noise, "privatize", lambda *_: True, False),
    "when they are paid": (Run, "save_tensors", file("moments.safetensors"), False),
    "when they are saved": (Run, "finish", stage("moments"), False),
    "when the stage has ended": (Run, "finish", stage("moments"), True),
    "in the matching": (feature_matching, "move_batch", lambda *a: a[7].initial_seed() == 1, False),
    "before the count is paid": (noise, "privatize", lambda *_: True, False),
    "when it is paid": (Run, "write_json", file("near_copies.json"), False),
    "when it is saved": (Run, "write_json", file("near_copies.json"), True),
    "in the bundle": (bundle, "markdown", lambda *_: True, False),
    "before the end of match": (Run, "finish", stage("match"), False),
    "in the student": (TrainState, "advance", lambda train_state: train_state.step == 1, False),
    "in the evaluation": (release_evaluate, "membership", lambda *_: True, False),
    "at the very end": (Run, "finish", stage("run"), False),
}


def test_a_run_cut_in_every_stage_ends_like_an_undisturbed_one(
    settings, undisturbed, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    for where, name, when, after in CUTS.values():
        cut(monkeypatch, settings, out, where, name, when=when, after=after)
    make(settings, out)
    require_same(out, undisturbed)
    assert not (out / "private" / "secret.key").exists()


@pytest.mark.parametrize(
    ("stage", "where", "name", "when"),
    [
        ("moments", Run, "save_tensors", file("moments.safetensors")),
        ("card", Run, "write_json", file("near_copies.json")),
    ],
)
def test_what_was_charged_and_not_saved_is_the_same_release_again(
    settings, tmp_path, monkeypatch, stage, where, name, when
):
    config = guaranteeing(settings, 2.0, noise_seed=None, stage="match")
    given, real = [], noise.privatize

    def listen(*arguments, **others):
        result = real(*arguments, **others)
        given.extend([result] if others["stage"] == stage else [])
        return result

    replace_everywhere(monkeypatch, noise, "privatize", listen)
    cut(monkeypatch, config, tmp_path / "run", where, name, when=when)
    paid = ledger_of(tmp_path / "run").releases
    assert paid[-1].stage == stage
    make(config, tmp_path / "run")
    # The secret of the run makes the noise, so that nobody sees the sums under two kinds of it.
    one, other = given
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert ledger_of(tmp_path / "run").releases[: len(paid)] == paid
    assert stages_of(tmp_path / "run") == {"train": 5, "moments": 1, "card": 1}
    assert ledger_of(tmp_path / "run").epsilon() <= 2
    assert verify_bundle(tmp_path / "run" / "bundle").ok


def test_what_was_added_up_and_paid_is_not_added_up_again(settings, tmp_path, monkeypatch):
    # On a GPU another sum would differ in its last digits, and be another release.
    config, out = replace(settings, noise_seed=None, stage="match"), tmp_path / "run"
    cut(monkeypatch, config, out, Run, "save_tensors", when=file("moments.safetensors"))
    replace_everywhere(monkeypatch, synth_moments, "sum_moments", None)
    cut(monkeypatch, config, out, Run, "write_json", when=file("near_copies.json"))
    real = quality.nearest_distances

    def all_near(of, among, itself=False):
        return real(of, among, itself=itself) if itself else torch.zeros(len(of))

    replace_everywhere(monkeypatch, quality, "nearest_distances", all_near)
    make(config, out)
    assert stages_of(out) == {"train": 5, "moments": 1, "card": 1}


def test_a_release_whose_sums_changed_after_it_was_paid_pays_again(settings, tmp_path, monkeypatch):
    config, out = replace(settings, noise_seed=None, stage="moments"), tmp_path / "run"
    cut(monkeypatch, config, out, Run, "save_tensors", when=file("moments.safetensors"))
    (out / "stages/moments/private/sums.safetensors").unlink()
    real = synth_moments.sum_moments
    replace_everywhere(monkeypatch, synth_moments, "sum_moments", lambda *a: real(*a) + 1e-9)
    make(config, out)
    assert stages_of(out) == {"train": 5, "moments": 2}


@pytest.mark.parametrize("exact", ["sums.safetensors", "count.json", "secret.key"])
def test_exact_numbers_are_gone_even_after_a_kill_when_they_were_to_go(
    settings, tmp_path, monkeypatch, exact
):
    config, out = replace(settings, noise_seed=None), tmp_path / "run"
    cut(monkeypatch, config, out, Path, "unlink", when=is_there(exact))
    assert list(out.rglob(exact))
    make(config, out)
    assert not list(out.rglob(exact))


def test_exact_numbers_that_an_earlier_version_left_go_on_the_next_start(
    undisturbed, settings, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    left = [
        out / "stages/moments/private/sums.safetensors",
        out / "stages/match/private/count.json",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    make(settings, out)
    assert not any(path.exists() for path in left)


def test_stages_one_by_one_are_the_whole(settings, undisturbed, tmp_path):
    out = tmp_path / "run"
    for number, name in enumerate(STAGES):
        assert make(replace(settings, stage=name), out)["stage"] == name
        done = [other for other in STAGES if (out / "stages" / other / "done.json").exists()]
        assert done == list(STAGES[: number + 1])
    make(settings, out)
    require_same(out, undisturbed)


def test_a_stage_that_is_done_is_not_done_again(settings, undisturbed, monkeypatch):
    for name in ("near_copies", "released_images"):
        monkeypatch.delattr(release_stages, name)
    before = digest(undisturbed / "bundle" / "card.json")
    assert make(replace(settings, stage="match"), undisturbed)["images"] == 60
    assert digest(undisturbed / "bundle" / "card.json") == before


def test_other_settings_in_the_same_place_are_refused_by_name(settings, undisturbed):
    with pytest.raises(Exception, match=r"config\.k: 2 -> 3"):
        make(replace(settings, matching=replace(settings.matching, k=3)), undisturbed)


def test_evaluation_again_gives_the_same_scores(settings, undisturbed):
    before = scores_of(undisturbed)
    make(replace(settings, stage="evaluate"), undisturbed)
    assert scores_of(undisturbed) == before


def test_a_run_done_stage_by_stage_is_finished_and_throws_its_secret_away(settings, tmp_path):
    out = tmp_path / "run"
    for stage in STAGES:
        assert not (out / "done.json").exists()
        assert make(replace(settings, noise_seed=None, stage=stage), out)["stage"] == stage
    assert (out / "done.json").exists()
    assert not list(out.rglob("secret.key"))
