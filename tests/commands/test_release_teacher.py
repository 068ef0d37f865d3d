"""sfumato release --teacher RUN: a teacher that sfumato train has made, and what it cost."""

import json
import shutil
from dataclasses import replace

import pytest
from releases import clouds, digits, ledger_of, make, moved, stages_of, tiny

from sfumato.commands.train import command as train
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.files import read_json
from sfumato.runs import open_run
from sfumato.sharing.bundle import verify_bundle


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"), noise_multiplier=3.0)


def learn(config, out):
    with open_run(config, verb="train", out=out) as run:
        train.run(config, run)
    return out


@pytest.fixture(scope="module")
def teacher(settings, tmp_path_factory):
    return learn(settings.train.alone, tmp_path_factory.mktemp("runs") / "teacher")


def with_teacher(settings, teacher, epsilon=3.0, **changes):
    changes = {"data": "digits", "stage": "match", **changes}
    return replace(settings, teacher=teacher, epsilon=epsilon, noise_multiplier=None, **changes)


def test_the_release_inherits_every_line_of_its_teacher(settings, teacher, tmp_path):
    make(with_teacher(settings, teacher, stage="student"), tmp_path / "run")
    ledger, lines = ledger_of(tmp_path / "run"), set(ledger_of(teacher).releases)
    assert len(lines) == 5
    assert lines <= set(ledger.releases)
    assert stages_of(tmp_path / "run") == {"train": 5, "moments": 1, "card": 1}
    assert 0.97 * 3 <= ledger.epsilon() <= 3
    assert verify_bundle(tmp_path / "run" / "bundle").ok
    made = read_json(tmp_path / "run/stages/teacher/done.json")
    assert made["teacher"] == "teacher", "its name, and not where it lies"


def test_what_a_teacher_that_is_there_does_not_heed_is_said(settings, teacher, tmp_path):
    used = with_teacher(settings, teacher, delta=1e-6, stage="moments")
    make(used, tmp_path / "used")
    assert "ignored:" not in (tmp_path / "used/log.txt").read_text()
    make(replace(used, lr=9.0, augmult=2), tmp_path / "run")
    assert f"{teacher} is as it was trained; ignored: --lr, --augmult" in (
        (tmp_path / "run/log.txt").read_text()
    )


def test_without_matching_a_teacher_costs_what_it_cost_and_the_card(settings, teacher, tmp_path):
    make(with_teacher(moved(settings, 0), teacher), tmp_path / "run")
    assert stages_of(tmp_path / "run") == {"train": 5, "card": 1}
    before = ledger_of(teacher).epsilon()
    assert before < ledger_of(tmp_path / "run").epsilon() < 1.05 * before


def test_noise_for_the_statistics_alone_can_be_chosen(settings, teacher, tmp_path):
    config = with_teacher(settings, teacher, epsilon=None, moments_noise=6.0, stage="moments")
    make(config, tmp_path / "run")
    noises = {e.stage: e.noise_multiplier for e in ledger_of(tmp_path / "run").releases}
    assert noises == {"train": 3.0, "moments": 6.0}


def test_the_guarantee_has_the_teachers_relation_and_the_delta_asked_for(settings, tmp_path):
    config = replace(settings.train.alone, relation="replace")
    other = learn(config, tmp_path / "teacher")
    make(with_teacher(settings, other, epsilon=8.0, delta=1e-6), tmp_path / "run")
    ledger = ledger_of(tmp_path / "run")
    assert (ledger.header.relation, ledger.header.delta) == ("replace", 1e-6)
    assert 0.97 * 8 <= ledger.epsilon() <= 8
    assert verify_bundle(tmp_path / "run" / "bundle").ok


def test_a_teacher_whose_noise_can_be_replayed_spoils_the_release(settings, tmp_path):
    seeded = learn(replace(settings.train.alone, noise_seed=1), tmp_path / "teacher")
    make(with_teacher(settings, seeded), tmp_path / "run")
    verdict = verify_bundle(tmp_path / "run" / "bundle")
    assert any("whose noise came from a fixed seed" in problem for problem in verdict.problems)


def test_public_images_are_made_like_those_the_teacher_knows(settings, teacher, tmp_path):
    large = clouds(size=40, channels=3)
    public = str(large.save_npz(tmp_path / "clouds.npz", large))
    config = with_teacher(settings, teacher, public=public)
    with pytest.raises(Exception, match=r"--image-size N and --grey"):
        make(config, tmp_path / "run")
    make(replace(config, image_size=28, grey=True), tmp_path / "run")


def lose_ledger(run):
    (run / "ledger.jsonl").unlink()


def lose_lines(run):
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:3]))


def lose_all_lines(run):
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text(lines[0])


def lose_end(run):
    (run / "done.json").unlink()


def change_verb(run):
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**record, "verb": "reconstruct"}))


@pytest.mark.parametrize(
    ("damage", "changes", "kind", "message"),
    [
        (lose_ledger, {}, RunError, "there is no ledger"),
        (lose_lines, {}, RunError, "2 of the 5 steps"),
        (lose_all_lines, {}, RunError, "0 of the 5 steps"),
        (lose_end, {}, RunError, "no finished run of sfumato train: done.json is missing"),
        (change_verb, {}, RunError, "a run of sfumato reconstruct: one of sfumato train"),
        (None, {"data": "mnist"}, ConfigError, 'not "mnist"'),
        (None, {"epsilon": 0.2}, ConfigError, "with the teacher .* is spent"),
        (None, {"epsilon": 3.0, "moments_noise": 0.5}, ConfigError, "after the teacher at least"),
        (None, {"secure": True}, ConfigError, "came from philox"),
    ],
)
def test_a_teacher_that_cannot_be_released_from_is_refused(
    settings, teacher, tmp_path, damage, changes, kind, message
):
    other = tmp_path / "teacher"
    shutil.copytree(teacher, other)
    if damage is not None:
        damage(other)
    with pytest.raises(kind, match=message):
        make(with_teacher(settings, other, **changes), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("ledger.jsonl"))


def test_a_teacher_trained_without_privacy_keeps_no_guarantee(settings, tmp_path):
    plain = replace(settings.train.alone, mode="non-private", noise_multiplier=None)
    other = learn(plain, tmp_path / "teacher")
    with pytest.raises(ConfigError, match="with the teacher inf is spent"):
        make(with_teacher(settings, other), tmp_path / "run")
    make(with_teacher(settings, other, epsilon=None, moments_noise=9.0), tmp_path / "run")
    assert not verify_bundle(tmp_path / "run" / "bundle").ok


def test_a_public_set_with_the_teachers_images_is_refused(settings, teacher, tmp_path):
    same = digits("train")
    public = str(same.save_npz(tmp_path / "same.npz", same))
    with pytest.raises(PrivacyError, match="240 images are both"):
        make(with_teacher(settings, teacher, public=public), tmp_path / "run")
