"""sfumato release: what a run leaves, how the bundle is checked, and each way to make one."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from bundles import digest
from contents import summaries
from releases import guaranteeing, ledger_of, make, moved, scores_of, stages_of, tiny
from safetensors.torch import load_file

from sfumato.cli import main
from sfumato.commands.load_model import load_model
from sfumato.commands.release import command as release
from sfumato.commands.release.command import PRESETS, Config
from sfumato.data.load import load_images
from sfumato.errors import RunError
from sfumato.models.zoo import build_model, pixel_statistics
from sfumato.runs import Run
from sfumato.settings.release import HAIR
from sfumato.sharing.bundle import read_bundle, verify_bundle


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    make(guaranteeing(settings, 3.0), out)
    return out


def call(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    streams = capsys.readouterr()
    return stopped.value.code, streams.out, streams.err


def test_a_run_leaves_a_bundle_pictures_a_ledger_and_private_scores(finished):
    left = {path.name for path in finished.iterdir()} - {".lock"}
    assert left == {
        "bundle", "config.json", "done.json", "ledger.jsonl", "log.txt", "pictures.png", "private",
        "stages",
    }  # fmt: skip
    assert {path.name for path in (finished / "private").iterdir()} == {
        "data.json",
        "findings.json",
        "scores.json",
        "nearest.png",
    }
    assert str(finished) not in summaries(finished)
    done = Run(finished).summary
    assert 2.9 < done["epsilon"] <= 3
    assert done["epsilon"] == ledger_of(finished).epsilon()
    assert (done["images"], done["k"], done["not_for_release"]) == (60, 2, [])
    assert f"verify {finished}/bundle" in release.show(done)
    scores = scores_of(finished)
    assert {"test_accuracy", "teacher_accuracy", "quality", "membership"} <= set(scores)
    assert set(scores["quality"]) == {"features", "released", "public", "test"}


def test_the_student_is_loaded_with_the_guarantee_of_the_whole_run(finished, settings):
    trained = load_model(finished)
    test = load_images(settings.data, "test")
    right = trained.logits(test).argmax(dim=1) == test.labels
    assert right.double().mean().item() == pytest.approx(scores_of(finished)["test_accuracy"])
    assert trained.classes == test.classes == ("zero", "one", "two")
    assert trained.guarantee is not None
    assert trained.guarantee["epsilon"] == ledger_of(finished).epsilon()
    assert (
        load_model(finished / "stages/teacher").guarantee["epsilon"] < trained.guarantee["epsilon"]
    )


@pytest.mark.parametrize("place", ["", "stages/teacher"])
def test_a_release_is_not_believed_when_a_ledger_of_it_lost_a_line(finished, tmp_path, place):
    run = shutil.copytree(finished, tmp_path / "run")
    lines = (run / place / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / place / "ledger.jsonl").write_text("".join(lines[:-1]))
    for given in (run, run / place):
        with pytest.raises(RunError):
            load_model(given)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(run), "--out", str(tmp_path)])
    assert stopped.value.code == 3


def test_nothing_outside_private_was_measured_on_private_or_test_images(finished):
    texts = [
        path.read_text()
        for path in finished.rglob("*")
        if path.suffix in (".json", ".jsonl", ".txt", ".md")
        and "private" not in path.relative_to(finished).parts
    ]
    assert len(texts) > 10
    for word in ("accuracy", "auc", "nearest", "frechet", "loss", "clipped"):
        assert not any(word in text for text in texts), word
    assert not list(finished.rglob("sums.safetensors"))
    assert not list(finished.rglob("count.json"))


def test_soft_labels_are_the_teachers_answers_to_just_the_released_pixels(finished):
    images, logits, temperature, card = read_bundle(finished / "bundle")
    teacher = build_model("group-cnn-small", classes=3, shape=(1, 28, 28)).eval()
    teacher.load_state_dict(load_file(finished / "stages" / "teacher" / "model.safetensors"))
    mean, deviation = pixel_statistics(teacher, 1)
    with torch.no_grad():
        answers = teacher((images.pixels.float() / 255 - mean[0]) / deviation[0])
    torch.testing.assert_close(logits, answers, rtol=1e-4, atol=1e-4)
    assert torch.equal(images.labels, logits.argmax(dim=1))
    assert images.classes == card.classes == ("zero", "one", "two")
    assert temperature == Config(noise_multiplier=1).temperature
    assert card.moved["largest"] > 0


def test_verify_passes_a_bundle_and_names_the_file_that_was_touched(finished, tmp_path, capsys):
    shutil.copytree(finished / "bundle", tmp_path / "bundle")
    code, out, _ = call(capsys, "release", "verify", tmp_path / "bundle")
    assert code == 0
    assert "is sound: 60 images, epsilon 3.00 at delta 1e-05" in out
    code, out, _ = call(capsys, "release", "verify", tmp_path / "bundle", "--json")
    assert json.loads(out)["epsilon"] == ledger_of(finished).epsilon()
    path = tmp_path / "bundle" / "images.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, _, err = call(capsys, "release", "verify", tmp_path / "bundle")
    assert code == 2
    assert "images.npz has changed" in err
    code, _, err = call(capsys, "release", "verify", tmp_path)
    assert code == 2
    assert "its bundle is" in err


def test_a_finished_run_says_so_and_stays_as_it_is(finished, capsys):
    before = {path: digest(path) for path in finished.rglob("*") if path.is_file()}
    code, out, err = call(capsys, "release", "--out", finished)
    assert code == 0
    assert "finished already" in err
    assert "epsilon 3.00, delta 1e-05, for each example" in out
    assert {path: digest(path) for path in finished.rglob("*") if path.is_file()} == before


def test_a_finished_run_takes_controls_later(finished, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    assert call(capsys, "release", "evaluate", "--out", out, "--controls")[0] == 0
    assert set(scores_of(out)["controls"]) == {"k=0", "public-only", "real"}
    # What is released, and its ledger and bundle, know nothing of them.
    for name in ("ledger.jsonl", "bundle/card.json", "bundle/images.npz"):
        assert digest(out / name) == digest(finished / name)


def test_no_scores_go_on_the_card(finished):
    assert verify_bundle(finished / "bundle").card.scores is None


def test_png_files_carry_the_same_bundle(settings, tmp_path, capsys):
    make(replace(settings, stage="match", format="png"), tmp_path / "run")
    assert len(list((tmp_path / "run/bundle/images").glob("*.png"))) == 60
    assert call(capsys, "release", "verify", tmp_path / "run" / "bundle")[0] == 0


def test_statistics_of_each_class_are_one_release(settings, tmp_path):
    make(replace(settings, stage="match", per_class=True), tmp_path / "run")
    kept = load_file(tmp_path / "run/stages/moments/moments.safetensors")
    assert kept["means"].shape == (3, 2 * int(kept["channels"].sum()))
    assert stages_of(tmp_path / "run") == {"train": 5, "moments": 1, "card": 1}


def test_noise_from_a_cryptographic_stream_is_on_the_card(settings, tmp_path):
    make(replace(settings, stage="match", secure=True), tmp_path / "run")
    verdict = verify_bundle(tmp_path / "run" / "bundle")
    assert (verdict.ok, verdict.remarks) == (True, [])
    assert verdict.card.noise == "chacha20"


def test_without_steps_the_public_images_are_released_as_they_were(settings, tmp_path):
    from releases import clouds

    make(moved(settings, 0, stage="match", model="tanh-cnn"), tmp_path / "run")
    images, _, _, card = read_bundle(tmp_path / "run" / "bundle")
    assert torch.equal(images.pixels, clouds().pixels)
    assert card.moved == {"mean": 0.0, "largest": 0.0}


@pytest.mark.slow  # the demo runs all of it but the teacher
def test_the_preset_for_cpus_carries_digits_in_patches_of_photographs(tmp_path, capsys):
    make(PRESETS["digits-cpu"](), tmp_path / "run")
    assert scores_of(tmp_path / "run")["test_accuracy"] >= 0.75  # 0.79 to 0.88, as chance will
    assert 2.9 < ledger_of(tmp_path / "run").epsilon() <= 3
    assert call(capsys, "release", "verify", tmp_path / "run" / "bundle")[0] == 0


TABLE = {
    ("mnist", 1): (4, 128, 0.01, 1.0),
    ("mnist", 10): (14, 128, 0.01, 1.0),
    ("fashion_mnist", 1): (30, 50, 0.01, 1.2),
    ("fashion_mnist", 10): (20, 128, 0.01, 1.2),
    (HAIR, 1): (18, 128, 0.001, 1.0),
    (HAIR, 10): (22, 128, 0.001, 1.0),
    ("celeba:Male", 1): (18, 128, 0.001, 1.0),
    ("celeba:Male", 10): (22, 128, 0.001, 1.0),
    ("cifar10", 10): (12, 128, 0.001, 1.0),
    ("imagenette", 105): (57, 8, 0.001, 1.0),
}
"""Soufleri et al. 2024, Table 1: epochs, batch, learning rate and norm bound."""


def test_published_presets_have_the_published_numbers():
    found = {}
    for name, preset in PRESETS.items():
        config = preset()
        assert config.epsilon is not None, name
        assert preset.__doc__, name
        if name.startswith("published"):
            key = (config.data, config.epsilon)
            found[key] = (config.epochs, config.batch_size, config.lr, config.max_grad_norm)
            assert (config.model, config.momentum, config.delta) == ("resnet18-small", 0.9, 1e-5)
    assert found == TABLE
