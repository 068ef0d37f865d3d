"""What sfumato release refuses, before it spends anything; and what it marks as not for release."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from releases import clouds, digits, guaranteeing, ledger_of, make, moved, tiny

from sfumato.cli import main
from sfumato.commands.release import command as release
from sfumato.commands.release.command import Config
from sfumato.errors import ConfigError, DataError, PrivacyError, SfumatoError
from sfumato.sharing.bundle import verify_bundle
from sfumato.sharing.feature_matching import Matching


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"))


def spent(out):
    """Every ledger line under a run that pays for something."""
    return [line for path in out.rglob("*.jsonl") for line in path.read_text().splitlines()
            if '"event"' in line]  # fmt: skip


def refused(config, out, kind, message):
    with pytest.raises(kind, match=message):
        make(config, out)
    assert not spent(out)


def objections(folder, words):
    """A bundle that says of itself why nobody may have it, and fails its check for that."""
    verdict = verify_bundle(folder)
    assert not verdict.ok
    assert any(words in problem for problem in verdict.problems)
    assert any(words in reason for reason in verdict.card.not_for_release)
    assert "NOT FOR RELEASE" in (folder / "card.md").read_text()
    return verdict.card


def test_plain_training_guarantees_nothing_everywhere(settings, tmp_path, capsys):
    out = tmp_path / "run"
    summary = make(replace(settings, mode="non-private", noise_multiplier=None), out)
    assert summary["epsilon"] == "inf"
    assert "none: epsilon is infinite" in release.show(summary)
    assert release.show(summary).count("NOT FOR RELEASE") == 3
    assert json.loads((out / "done.json").read_text())["epsilon"] == "inf"
    assert math.isinf(ledger_of(out).epsilon())
    assert math.isinf(objections(out / "bundle", 'stage "moments" released exact values').epsilon)
    with pytest.raises(SystemExit) as stopped:
        main(["release", "verify", str(out / "bundle")])
    assert stopped.value.code == 2
    heard = capsys.readouterr().err
    assert "epsilon is infinite" in heard
    assert "not for release" in heard


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": math.inf, "noise_multiplier": None}, 'stage "train" released exact values'),
        ({"moments_noise": 0.0}, 'stage "moments" released exact values'),
    ],
)
def test_exact_statistics_cannot_be_released_by_accident(settings, tmp_path, changes, words):
    make(replace(settings, stage="match", **changes), tmp_path / "run")
    assert math.isinf(ledger_of(tmp_path / "run").epsilon())
    assert math.isinf(objections(tmp_path / "run" / "bundle", words).epsilon)


def test_noise_that_can_be_replayed_is_not_for_release(settings, tmp_path):
    make(replace(settings, stage="match", noise_seed=5), tmp_path / "run")
    card = objections(tmp_path / "run" / "bundle", "came from a fixed seed")
    assert math.isfinite(card.epsilon)


def saved(folder, images):
    return str(images.save_npz(folder / "public.npz", images))


def test_public_images_that_are_also_private_are_refused(settings, tmp_path):
    public = saved(tmp_path, digits("train").select([7, 8, 9, 90, 91, 92, 170, 171]))
    refused(replace(settings, public=public), tmp_path / "run", PrivacyError, "8 images are both")


def test_images_of_another_size_or_colour_are_refused(settings, tmp_path):
    out = tmp_path / "run"
    small = replace(settings, public=saved(tmp_path, clouds(size=20)))
    refused(small, out, DataError, "Give --image-size N")
    coloured = replace(settings, public=saved(tmp_path, clouds(channels=3)))
    refused(coloured, out, DataError, "Give --grey")
    make(replace(coloured, grey=True, stage="teacher"), out)  # the remedy helps, in the same place


def test_a_teacher_without_normalisation_has_no_statistics(settings, tmp_path):
    plain = replace(settings, model="tanh-cnn")
    refused(plain, tmp_path / "run", ConfigError, '"tanh-cnn" has no normalisation layer')
    make(moved(plain, 0, stage="moments"), tmp_path / "run")


def test_too_few_images_to_compare_are_refused(settings, tmp_path):
    few = replace(settings, public_images=5)
    refused(few, tmp_path / "run", DataError, "has 5 images, and at least 6 are needed")
    make(moved(replace(settings, public_images=7), 0), tmp_path / "run")
    assert (tmp_path / "run" / "pictures.png").exists()


def test_what_cannot_be_done_is_named_before_anything_is_spent(settings, tmp_path):
    for changes, message in [
        ({"student": "resnet81"}, "Did you mean"),
        ({"model": "resnet81"}, "Did you mean"),
        ({"public": "cloud"}, "neither a file"),
        ({"data": "digit"}, 'Did you mean "digits"'),
        ({"delta": 0.1}, "not below 1/240"),
        ({"batch_size": 300, "epsilon": 2.0, "noise_multiplier": None}, "at most 240"),
        ({"epsilon": 1.0, "noise_multiplier": None, "moments_noise": 0.1}, "Raise it, or spend"),
        ({"moments_noise": 0.01}, "too small to be priced"),
        ({"unit": "person"}, "nobody knows who"),
        ({"teacher": Path("nowhere"), "noise_multiplier": None, "epsilon": 1.0}, "no finished run"),
    ]:
        refused(replace(settings, **changes), tmp_path / "run", SfumatoError, message)
    # Nothing stands in the way of the right command.
    make(replace(settings, stage="teacher", steps=1), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moments_share": 0.0}, "between 0 and 1"),
        ({"moments_share": 1.0}, "between 0 and 1"),
        ({"moments_share": 0.1, "moments_noise": 9.0}, "give one"),
        ({"moments_share": 0.1, "teacher": Path("run")}, "all that is left"),
        ({"moments_share": 0.1, "epsilon": None, "noise_multiplier": 1.0}, "--moments-share div"),
        ({"moments_noise": 9.0, "epsilon": math.inf}, "statistics are exact"),
        ({"moments_noise": 9.0, "epsilon": None, "mode": "non-private"}, "statistics are exact"),
        ({"moments_noise": -1.0}, "at least 0"),
        ({"moments_noise": math.nan}, "at least 0"),
        ({"moments_noise": math.inf}, "finite"),
        ({"moments_slack": 0.0}, "above 0"),
        ({"moments_slack": math.inf}, "finite"),
        ({"temperature": math.inf}, "finite"),
        ({"student_epochs": math.inf}, "finite"),
        ({"student_lr": math.inf}, "finite"),
        ({"temperature": 0.0}, "above 0"),
        ({"student_epochs": 0.0}, "above 0"),
        ({"student_batch": 0}, "at least 1"),
        ({"public_images": 0}, "at least 1"),
        ({"epsilon": None}, "neither of --epsilon"),
        ({"noise_multiplier": 1.0}, "both of --epsilon"),
        ({"mode": "non-private"}, "leave --epsilon out"),
        ({"teacher": Path("run"), "epsilon": None}, "what may the statistics cost"),
        ({"teacher": Path("run"), "noise_multiplier": 1.0}, "brings its own noise"),
        ({"teacher": Path("run"), "mode": "non-private"}, "leave --mode out"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Config(**{"epsilon": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": -1}, "k=-1 must be at least 0"),
        ({"match_batch": 0}, "at least 1"),
        ({"match_lr": 0.0}, "above 0"),
        ({"match_lr": math.inf}, "finite"),
        ({"statistics_weight": math.nan}, "statistics_weight=nan must be at least 0"),
        ({"tv_weight": -1.0}, "tv_weight=-1 must be at least 0"),
    ],
)
def test_matching_that_means_nothing_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Matching(**changes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epsilon", "3", "--k", "-1"], "k=-1"),
        (["wander", "--epsilon", "3"], "wander"),
        (["--stage", "wander", "--epsilon", "3"], "wander"),
        (["verify", "nowhere"], "there is no folder nowhere"),
        (["verify"], "--verify"),
    ],
)
def test_words_that_mean_nothing_end_with_code_two(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["release", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_ledger_that_costs_more_than_was_guaranteed_releases_nothing(
    settings, tmp_path, monkeypatch
):
    from sfumato.commands.release import stages as release_stages

    config = guaranteeing(settings, 2.0, stage="match")
    real = release_stages.one_release

    def cheaper(config, size, noise, max_norm=1.0):
        return real(config, size, noise / 3, max_norm)

    monkeypatch.setattr(release_stages, "one_release", cheaper)
    with pytest.raises(PrivacyError, match="above the 2 that was guaranteed"):
        make(config, tmp_path / "run")
    assert not (tmp_path / "run" / "bundle").exists()


def test_a_mistyped_stage_is_told_what_there_is(capsys):
    with pytest.raises(SystemExit) as end:
        main(["release", "matching", "--epsilon", "3"])
    assert end.value.code == 2
    assert 'has no "matching". Did you mean "match"?' in capsys.readouterr().err


def test_public_images_that_are_test_images_are_refused(tmp_path, settings):
    train, test = digits("train"), digits("test")
    train.save_npz(tmp_path / "private.npz", test)
    test.save_npz(tmp_path / "public.npz")
    files = {"data": str(tmp_path / "private.npz"), "public": str(tmp_path / "public.npz")}
    refused(replace(settings, **files), tmp_path / "run", PrivacyError, "are both in")
