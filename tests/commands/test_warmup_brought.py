"""sfumato warmup with public images of one's own, and with samples made elsewhere."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from inversions import save
from warmups import same, scores_of, tiny, warm

from sfumato.cli import main
from sfumato.commands.warmup import command as warmup
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.files import read_lines

MADE = ("stages/generator/model.safetensors", "stages/sample/images.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place with digits in two halves, one of them to be public, and samples of a generator."""
    folder = tmp_path_factory.mktemp("brought")
    with np.load(save(folder / "all.npz", "0-2")) as file:
        arrays = dict(file)
    for name, part in (("private", slice(0, None, 2)), ("public", slice(1, None, 2))):
        own = {key: arrays[key][part] for key in ("x_train", "y_train")}
        test = {key: arrays[key][part] for key in ("x_test", "y_test")}
        np.savez(folder / f"{name}.npz", **own, **test, classes=arrays["classes"])
    rng = np.random.default_rng(3)
    labels = np.arange(24) % 3
    samples = rng.integers(0, 256, (24, 16, 16), dtype=np.uint8)
    np.savez(folder / "made.npz", samples=samples, label=np.eye(3)[labels])
    return folder


@pytest.fixture
def settings(folder):
    config = tiny(folder)
    changes = {"data": str(folder / "private.npz"), "public_share": None, "batch_size": 30}
    return replace(config, public_images=str(folder / "public.npz"), **changes)


def test_with_public_images_of_ones_own_all_of_the_data_is_private(settings, tmp_path, capsys):
    warm(settings, tmp_path / "run")
    header, release = read_lines(tmp_path / "run/stages/train/ledger.jsonl")[:2]
    assert '"data": "private-train"' in json.dumps(header)
    assert "the images of public-train (90, brought)" in json.dumps(header)
    assert '"rate": 0.3333' in json.dumps(release)
    done = json.loads((tmp_path / "run/done.json").read_text())
    assert "90 images of public-train: nothing is guaranteed" in warmup.show({**done, "run": "r"})
    public = np.load(tmp_path / "run/stages/split/public.npz")["x_train"]
    assert (public == np.load(settings.public_images)["x_train"]).all()


def spoil(folder, how):
    """A file of public images with something wrong with it."""
    with np.load(folder / "public.npz") as file:
        arrays = dict(file)
    if how == "classes":
        arrays["classes"] = np.array(["1", "0", "2"])
    elif how == "class gone":
        kept = arrays["y_train"] != 1
        arrays |= {"x_train": arrays["x_train"][kept], "y_train": arrays["y_train"][kept]}
    elif how == "shape":
        arrays |= {key: arrays[key][:, :12, :12] for key in ("x_train", "x_test")}
    else:
        with np.load(folder / "private.npz") as file:
            arrays["x_train"][7] = file[how][5]
    return arrays


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("classes", DataError, r"the classes of \"bad-train\" are 1, 0, 2, and those of"),
        ("class gone", DataError, r"has no image of class \"1\""),
        ("shape", DataError, "--image-size"),
        ("x_train", PrivacyError, r"1 image is both in \"private-train\", which is private \(at 5"),
        ("x_test", PrivacyError, r"1 image is both in \"private-test\""),
    ],
)
def test_public_images_that_do_not_fit_are_refused(settings, folder, tmp_path, how, kind, words):
    np.savez(tmp_path / "bad.npz", **spoil(folder, how))
    with pytest.raises(kind, match=words):
        warm(replace(settings, public_images=str(tmp_path / "bad.npz")), tmp_path / "run")
    assert not (tmp_path / "run/stages").exists()


def test_too_few_public_images_are_said_before_anything(settings, tmp_path):
    few = replace(settings, diffusion=replace(settings.diffusion, gen_held_out=0.001))
    with pytest.raises(DataError, match="bring more by --public-images"):
        warm(few, tmp_path / "run")


def test_samples_take_the_place_of_a_generator(settings, folder, tmp_path):
    config = replace(settings, samples=folder / "made.npz", controls=True, extender="mirror")
    warm(config, tmp_path / "run")
    stages = {path.name for path in (tmp_path / "run/stages").iterdir()}
    assert stages == {"split", "sample", "warmup", "train", "evaluate"}
    with np.load(tmp_path / "run/stages/sample/images.npz") as kept:
        assert (kept["x_train"] == np.load(folder / "made.npz")["samples"]).all()
        assert kept["y_train"].tolist() == [0, 1, 2] * 8
    warmed = json.loads((tmp_path / "run/stages/warmup/done.json").read_text())
    assert warmed["images"] == 24 + 90
    header = read_lines(tmp_path / "run/stages/train/ledger.jsonl")[0]
    assert "and of made.npz (made elsewhere)" in json.dumps(header)
    done = json.loads((tmp_path / "run/done.json").read_text())
    told = warmup.show({**done, "run": "r"})
    assert f"samples   24 images of {folder / 'made.npz'}" in told
    assert "stages/generator" not in told
    assert {"warmup", "dp", "warmup_on_public_images_alone"} <= scores_of(tmp_path / "run").keys()
    alone = tmp_path / "run/stages/evaluate/private/public-alone/done.json"
    assert alone.exists()


def test_samples_may_come_after_a_generator(settings, folder, tmp_path):
    out = tmp_path / "run"
    warm(replace(settings, stage="generator"), out)
    before = shutil.copytree(out, tmp_path / "before")
    warm(replace(settings, samples=folder / "made.npz", stage="sample"), out)
    assert same(out, before, MADE[:1]) == {MADE[0]: True}
    done = json.loads((out / "stages/sample/done.json").read_text())
    assert (done["drawn"], done["samples"]) == (24, str(folder / "made.npz"))
    assert "nothing is guaranteed" in done["promise"]


@pytest.mark.parametrize(
    ("arrays", "kind", "words"),
    [
        ({"label": None}, DataError, "has no labels"),
        ({"samples": np.zeros((24, 8, 8), np.uint8)}, DataError, r"images of \(1, 8, 8\)"),
        ({"label": np.arange(24) % 4}, DataError, "has a label 3"),
        ({"copy": True}, PrivacyError, r"1 image is both in \"private-train\""),
    ],
)
def test_samples_that_do_not_fit_are_refused(settings, folder, tmp_path, arrays, kind, words):
    with np.load(folder / "made.npz") as file:
        given = {**file, **arrays}
    if given.pop("copy", False):
        given["samples"][4] = np.load(settings.data)["x_train"][9]
    given = {name: array for name, array in given.items() if array is not None}
    np.savez(tmp_path / "bad.npz", **given)
    with pytest.raises(kind, match=words):
        warm(replace(settings, samples=tmp_path / "bad.npz"), tmp_path / "run")
    assert not (tmp_path / "run/stages").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "generator"}, "no stage generator"), ({"stage": "guide"}, "no stage guide"),
        ({"number": 0}, "--samples: .*--number 0"), ({"guide_weight": 1.0}, "--guide-weight"),
        ({"denoiser": "nets:small"}, "--denoiser"),
    ],
)  # fmt: skip
def test_what_is_about_drawing_is_refused_beside_samples(settings, changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(settings, samples=Path("made.npz"), **changes)


def test_one_answer_is_given_to_which_images_are_public(settings, folder, capsys):
    with pytest.raises(ConfigError, match="--public-share and --public-images are two answers"):
        replace(settings, public_share=0.1)
    words = ["warmup", "split", "--preset", "digits-cpu", "--public-share", "None"]
    words += ["--data", settings.data, "--public-images", settings.public_images]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--out", str(folder / "split")])
    assert stopped.value.code == 0
    assert "public  90" in capsys.readouterr().out
