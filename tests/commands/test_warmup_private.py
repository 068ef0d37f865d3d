"""sfumato warmup --private: a generator under a ledger, and what it may not be combined with."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contents import content
from cuts import cut_in
from warmups import scores_of, tiny, warm
from whole_runs import fixtures

from sfumato.cli import main
from sfumato.commands.warmup import command as warmup
from sfumato.commands.warmup import generator as warmup_generator
from sfumato.commands.warmup.context import make_context
from sfumato.data.arrays import read_npz_note
from sfumato.data.load import load_images
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.runs import open_run
from sfumato.settings.diffusion import Diffusion
from sfumato.settings.warmup import PRESETS, PRIVATE_STAGES

NETWORK = Diffusion(gen_width=8, gen_multipliers=(1,), gen_blocks=1, gen_looks=3)


def privately(folder, **changes):
    """Settings of a private generator that takes seconds."""
    private = {"private": True, "optimizer": "adam", "lr": 1e-3, "augmult": 2, "ema": 0.5}
    own = {"public_share": None, "crop": 0, "diffusion": NETWORK}
    return tiny(folder, **{**private, **own, **changes})


settings, finished = fixtures(privately, warm)


def test_the_ledger_of_the_generator_speaks_of_all_images(finished):
    ledger = Ledger.from_records(read_lines(finished / "stages/generator/ledger.jsonl"))
    assert ledger.header.data.endswith("digits-train")
    assert [release.stage for release in ledger.releases] == ["train"] * 3
    assert ledger.releases[0].rate == pytest.approx(40 / 180)
    assert ledger.epsilon() <= 8.0
    done = json.loads((finished / "done.json").read_text())
    assert done["epsilon"] == pytest.approx(ledger.epsilon())
    assert done["public_images"] == 0
    assert "epsilon 8" in warmup.show({**done, "run": str(finished)})


def test_nothing_but_the_generator_and_the_score_reads_an_image(settings, finished, tmp_path):
    arrays = dict(np.load(settings.data))
    arrays["x_train"] = 255 - arrays["x_train"]
    np.savez(tmp_path / "digits.npz", **arrays)
    out = tmp_path / "run"
    out.mkdir()
    changed = replace(settings, data=str(tmp_path / "digits.npz"), stage="warmup")
    warm(replace(changed, stage="generator"), out)
    weights = "stages/generator/model.safetensors"
    assert content(out / weights) != content(finished / weights)
    for name in ("model.safetensors", "ledger.jsonl", "done.json"):
        shutil.copy(finished / "stages/generator" / name, out / "stages/generator")
    warm(changed, out)
    for name in ("stages/sample/images.npz", "stages/warmup/model.safetensors"):
        assert content(out / name) == content(finished / name)


def test_a_private_generator_that_was_cut_goes_on_and_pays_once(settings, finished, tmp_path):
    out, weights = tmp_path / "run", "stages/generator/model.safetensors"
    with cut_in("sfumato.training.noisy_gradient:privatize", 2):
        warm(settings, out)
    assert not (out / weights).exists()
    warm(settings, out)
    assert content(out / weights) == content(finished / weights)
    ledger = Ledger.from_records(read_lines(out / "stages/generator/ledger.jsonl"))
    assert ledger.epsilon() <= 8.0


def test_a_private_generator_keeps_the_settings_of_training(settings, finished):
    with pytest.raises(RunError, match=r"config\.lr: .* \(the stage generator has used it\)"):
        open_run(replace(settings, lr=0.1), verb="warmup", out=finished)


def test_pictures_on_the_way_change_nothing(settings, finished, tmp_path):
    once = replace(settings, diffusion=replace(settings.diffusion, gen_looks=1), stage="generator")
    warm(once, tmp_path / "run")
    assert len(list((tmp_path / "run/stages/generator/samples").iterdir())) == 1
    for name in ("model.safetensors", "metrics.jsonl"):
        name = f"stages/generator/{name}"
        assert content(tmp_path / "run" / name) == content(finished / name)


def test_stages_one_by_one_are_the_whole(settings, finished, tmp_path):
    for name in PRIVATE_STAGES:
        assert warm(replace(settings, stage=name), tmp_path / "run")["stage"] == name
    for name in ("stages/generator/model.safetensors", "stages/sample/images.npz"):
        assert content(tmp_path / "run" / name) == content(finished / name)
    assert scores_of(tmp_path / "run") == scores_of(finished)


def test_drawn_images_say_what_is_guaranteed_about_them(finished):
    note = json.loads(read_npz_note(finished / "stages/sample/images.npz") or "")
    done = json.loads((finished / "stages/sample/done.json").read_text())
    assert note["epsilon"] == done["epsilon"] <= 8.0
    assert note["not_for_release"]  # the seed of the noise is known


def test_from_a_generator_whose_ledger_was_cut_nothing_is_drawn(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "run")
    ledger = tmp_path / "run/stages/generator/ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    words = ["--run", tmp_path / "run", "--number", "4", "--out", tmp_path / "drawn.npz"]
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", "sample", *map(str, words)])
    assert stopped.value.code == 3
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "drawn.npz").exists()


def test_drawn_images_are_no_longer_private_and_pictures_of_them_are_there(finished):
    drawn = load_images(str(finished / "stages/sample/images.npz"), "train", private=False)
    assert drawn.labels.bincount().tolist() == [10, 10, 10]
    pictures = sorted(path.stem for path in (finished / "stages/generator/samples").glob("*.png"))
    assert [int(name) for name in pictures] == [40, 80, 120], "about this many images were seen"
    assert set(scores_of(finished)) == {"drawn", "test_images", "fidelity"}


def test_private_images_do_not_reach_the_public_generator(settings, tmp_path):
    with open_run(settings, verb="warmup", out=tmp_path / "run") as run:
        context = make_context(settings, run)
        with pytest.raises(PrivacyError, match="adds no noise"):
            warmup_generator.split_public(replace(context, public=context.private))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "split"}, "no stage split"),
        ({"stage": "train"}, "no stage train"),
        ({"mode": "non-private", "epsilon": None}, "--private keeps a guarantee"),
        ({"train_only": "head"}, "^--train-only: without meaning"),
        ({"guide_weight": 1.0}, "^--guide-weight: without meaning"),
        ({"warm_repeats": 2}, "^--warm-repeats: without meaning"),
        ({"controls": True}, "^--controls: without meaning"),
        ({"extender": "dope"}, "^--extender: without meaning"),
        ({"crop": 2}, r"^--crop: without .* --crop 0"),
        ({"crop": 2, "flip": True}, "^--crop, --flip: without"),
        ({"public_share": 0.04}, "^--public-share and --private are two answers"),
        ({"public_images": "digits"}, "^--private and --public-images are two answers"),
        ({"samples": Path("a.npz")}, "^--private: .*--samples"),
        ({"diffusion": Diffusion(gen_images=900)}, "^--gen-images: without meaning"),
        ({"diffusion": Diffusion(gen_mirror=False, gen_lr=1.0)}, "^--gen-lr, --gen-mirror: with"),
        ({"epsilon": None}, "epsilon"),
        ({"epsilon": None, "stage": "generator"}, "epsilon"),
    ],
)
def test_what_a_private_generator_cannot_do_is_said(settings, changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(settings, **changes)


def test_the_preset_for_a_private_generator_draws_images_that_say_their_guarantee(tmp_path, capsys):
    words = ["warmup", "sample", "--preset", "digits-private", "--steps", "4", "--augmult", "1"]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--number", "20", "--out", str(tmp_path / "run")])
    assert stopped.value.code == 0
    note = json.loads(read_npz_note(tmp_path / "run/stages/sample/images.npz") or "")
    assert 0 < note["epsilon"] <= 10
    assert not note["not_for_release"]


@pytest.mark.slow
def test_a_classifier_learns_the_classes_from_what_the_preset_draws(tmp_path):
    warm(PRESETS["digits-private"](), tmp_path / "run")
    assert scores_of(tmp_path / "run")["drawn"] > 0.5, "chance is 0.1"


@pytest.mark.parametrize("name", [name for name in PRESETS if not PRESETS[name]().private])
@pytest.mark.parametrize("share", [(), ("--public-share", "None")])
def test_a_preset_for_public_images_is_named_as_what_does_not_fit(name, share, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", "--preset", name, "--private", *share])
    assert stopped.value.code == 2
    assert "preset" in capsys.readouterr().err


def test_flags_that_the_user_gave_are_named(capsys):
    for preset in ([], ["--preset", "digits-private"]):
        with pytest.raises(SystemExit):
            main(["warmup", *preset, "--private", "--epsilon", "10", "--gen-images", "900"])
        assert "--gen-images: without meaning" in capsys.readouterr().err
