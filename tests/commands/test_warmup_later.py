"""sfumato warmup: settings of later stages may come later, those of stages that began may not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuts import cut_in
from warmups import MADE, same, tiny, warm
from whole_runs import fixtures

from sfumato.cli import main
from sfumato.commands.warmup import command as warmup
from sfumato.commands.warmup.command import Config
from sfumato.errors import PrivacyError, RunError
from sfumato.runs import open_run
from sfumato.setting_groups import leaves

settings, finished = fixtures(tiny, warm)


def kept(out):
    return json.loads((out / "config.json").read_text())["config"]


@pytest.fixture
def warmed(finished, tmp_path):
    """A run that came as far as the warm-up."""
    out = shutil.copytree(finished, tmp_path / "warmed")
    (out / "done.json").unlink()
    for stage in ("train", "evaluate"):
        shutil.rmtree(out / "stages" / stage)
    return out


def test_a_generator_that_was_made_alone_serves_a_warm_up(settings, finished, tmp_path):
    out = tmp_path / "run"
    alone = {"stage": "generator", "epsilon": None, "number": 50, "warm_lr": 1.0}
    warm(replace(settings, **alone), out)
    flags = ("--epsilon", "8", "--number", "30", "--warm-lr", "0.05")
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", "--out", str(out), *flags])
    assert stopped.value.code == 0
    assert all(same(out, finished).values())
    assert kept(out) == kept(finished)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"public_share": 0.4}, r"config\.public_share: .* \(the stage split has used it\)"),
        ({"public_images": "mnist", "public_share": None}, "the stage split has used it"),
        ({"samples": Path("a.npz")}, r"config\.samples: .* \(the stage sample has used it\)"),
        ({"seed": 1}, r"config\.seed: .* \(the stage split has used it\)"),
        ({"denoiser": "nets:small"}, r"config\.denoiser: .* \(the stage generator has used it\)"),
        ({"guide_weight": 1.0}, r"config\.guide_weight: .* \(the stage guide has used it\)"),
        ({"solver": "heun"}, r"config\.solver: .* \(the stage sample has used it\)"),
        ({"warm_lr": 0.1}, r"config\.warm_lr: .* \(the stage warmup has used it\)"),
        ({"model": "wrn-16-4"}, r"config\.model: .* \(the stage warmup has used it\)"),
    ],
)
def test_a_stage_that_has_begun_keeps_its_settings(settings, warmed, change, words):
    with pytest.raises(RunError, match=words):
        warm(replace(settings, **change), warmed)
    assert kept(warmed)["epsilon"] == 8.0


def test_several_guarantees_start_from_one_warm_up(settings, finished, warmed):
    warm(replace(settings, epsilon=2.0, steps=2), warmed)
    done = json.loads((warmed / "done.json").read_text())
    assert (done["epsilon"] <= 2.0, done["steps"]) == (True, 2)
    assert same(warmed, finished, MADE[:4]) == dict.fromkeys(MADE[:4], True)
    with pytest.raises(RunError, match=r"config\.epsilon: .* \(the stage train has used it\)"):
        open_run(settings, verb="warmup", out=warmed)


def test_a_generator_that_was_killed_goes_on_and_keeps_its_settings(settings, finished, tmp_path):
    out = tmp_path / "run"
    with cut_in("sfumato.diffusion.generator:accumulate_gradient", 5):
        warm(replace(settings, warm_lr=1.0), out)
    wider = replace(settings, diffusion=replace(settings.diffusion, gen_width=16))
    with pytest.raises(RunError, match=r"gen_width: 8 -> 16 \(the stage generator has used it\)"):
        warm(wider, out)
    warm(settings, out)
    assert all(same(out, finished).values())


def test_every_setting_has_a_stage_or_may_change():
    config = Config(epsilon=1.0, public_share=0.1)
    placed = {name for names in config.read_first.values() for name in names}
    own = set(leaves(Config))
    assert own - placed - set(Config.MAY_CHANGE) == set()
    assert not placed - own


def test_an_order_that_is_refused_is_not_remembered(finished, warmed, capsys):
    before = (warmed / "config.json").read_bytes()
    for words, told in (
        (("--unit", "person"), "people"), (("--batch-size", "1000000"), "batch"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            main(["warmup", "--out", str(warmed), *words])
        assert stopped.value.code != 0
        assert told in capsys.readouterr().err
        assert (warmed / "config.json").read_bytes() == before
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", "--out", str(warmed)])
    assert stopped.value.code == 0
    assert all(same(warmed, finished).values())


def test_who_was_public_when_the_generator_learnt_is_not_private_afterwards(settings, tmp_path):
    data = tmp_path / "own.npz"
    shutil.copy(settings.data, data)
    config = replace(settings, data=str(data))
    warm(replace(config, stage="split"), tmp_path / "run")
    with np.load(data) as file:
        arrays = dict(file)
    for name in ("x_train", "y_train"):
        arrays[name] = arrays[name][1:]
    np.savez(data, **arrays)
    with pytest.raises(PrivacyError, match="others than when the stage split ran"):
        warm(config, tmp_path / "run")


def test_what_the_classifier_learns_is_shown(finished):
    assert (finished / "stages/sample/samples/000000030.png").stat().st_size > 1000


def test_how_many_private_images_are_also_public_is_for_the_screen_alone(settings, tmp_path):
    with np.load(settings.data) as file:
        arrays = dict(file)
    for name in ("x_train", "y_train"):
        arrays[name] = np.concatenate([arrays[name], arrays[name]])
    np.savez(tmp_path / "twice.npz", **arrays)
    heard, out = [], tmp_path / "run"
    config = replace(settings, data=str(tmp_path / "twice.npz"), stage="split")
    with open_run(config, verb="warmup", out=out, say=heard.append) as run:
        warmup.run(config, run)
    assert any("are also public" in line for line in heard)
    for path in out.rglob("*"):
        if path.is_file() and "private" not in path.relative_to(out).parts:
            assert b"also public" not in path.read_bytes()
