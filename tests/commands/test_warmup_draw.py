"""sfumato warmup sample --run: images from a generator that is there, without what it was trained
on."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from finished import forge
from planted import replace_everywhere
from warmups import tiny, warm

from sfumato.cli import main
from sfumato.commands.warmup import watch as warmup_watch
from sfumato.config import to_json
from sfumato.data.load import load_images
from sfumato.diffusion import image_shards, sampler
from sfumato.diffusion.stored_generator import read_stored
from sfumato.privacy.budget import make_plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import poisson_batches
from sfumato.privacy.session_key import SessionKey
from sfumato.reporting.words import round_up

QUICK = ("--solver", "dpm", "--sample-steps", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a generator and a guide, whose images are gone."""
    folder = tmp_path_factory.mktemp("drawn")
    guided = {"guide_weight": 1.0, "guide_epochs": 1.0}
    warm(replace(tiny(folder), epsilon=None, stage="guide", **guided), folder / "run")
    (folder / "digits.npz").unlink()
    return folder / "run"


@pytest.fixture
def call(capsys):
    def told(*words):
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        streams = capsys.readouterr()
        return stopped.value.code, streams.out + streams.err

    return told


@pytest.fixture
def draw(call, run):
    def told(out, *words, number=30, run=run):
        flags = ("--run", run, "--number", number, "--out", out)
        return call("warmup", "draw", *flags, *QUICK, *words)

    return told


def test_the_file_is_a_data_set_with_its_labels_and_class_names(draw, tmp_path):
    code, told = draw(tmp_path / "images.npz")
    assert code == 0, told
    assert "nothing is guaranteed about the public images" in told
    train, test = (
        load_images(tmp_path / "images.npz", split, private=False) for split in ("train", "test")
    )
    assert train.labels.tolist() == [0, 1, 2] * 10
    assert test.labels.tolist() == [0, 1, 2]
    assert train.classes == ("0", "1", "2")
    assert train.shape == test.shape == (1, 16, 16)
    pixels = np.concatenate([train.pixels.numpy(), test.pixels.numpy()])
    assert len(np.unique(pixels.reshape(33, -1), axis=0)) == 33


def test_copies_and_held_out_loss_are_said_with_the_images(draw, run, tmp_path):
    loss = json.loads((run / "stages/generator/done.json").read_text())["held_out_loss"]
    for _ in range(2):  # also of a file that is there
        code, told = draw(tmp_path / "images.npz")
        assert code == 0, told
        assert "copies among 30 drawn images: 0.0% (of held-out images" in told
        assert f"held-out loss of the generator {loss:.4f}" in told
    trained_on = np.load(run / "stages/split/public.npz")["x_train"]
    replayed = replace(load_images(tmp_path / "images.npz", "train", private=False),
                       pixels=torch.from_numpy(trained_on[:30, None]))  # fmt: skip
    heard = []
    replayed.save_npz(tmp_path / "replayed.npz")
    warmup_watch.watch_file(tmp_path / "replayed.npz", run, read_stored(run / "stages/generator"),
                            heard.append)  # fmt: skip
    assert "WARNING: they replay public images" in heard[0]


def test_a_run_whose_public_images_are_gone_is_drawn_from_all_the_same(draw, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/stages/split")
    code, told = draw(tmp_path / "images.npz", run=tmp_path / "run")
    assert code == 0, told
    assert "copies" not in told


def test_whoever_gives_a_stage_is_told_the_run(draw, run, tmp_path):
    code, told = draw(tmp_path / "images.npz", run=run / "stages/generator")
    assert code == 2
    assert f"Its run is {run}: give that." in " ".join(told.split())


def test_it_draws_what_the_stage_draws(draw, run, tmp_path):
    settings = replace(tiny(tmp_path), epsilon=None, stage="sample")
    warm(settings, tmp_path / "run")
    draw(tmp_path / "images.npz", run=tmp_path / "run")
    draw(tmp_path / "other.npz")
    wanted = np.load(tmp_path / "run/stages/sample/images.npz")
    for name in ("images.npz", "other.npz"):
        found = np.load(tmp_path / name)
        assert all((found[key] == wanted[key]).all() for key in ("x_train", "y_train"))


def test_what_is_drawn_trains_and_extends(draw, call, tmp_path):
    draw(tmp_path / "images.npz", number=120)
    flags = ("--model", "group-cnn-small", "--steps", "2", "--batch-size", "20", "--epsilon", "8")
    flags = (*flags, "--device", "cpu")
    images = ("train", "--data", tmp_path / "images.npz", *flags)
    code, told = call(*images, "--out", tmp_path / "one")
    assert code == 0, told
    drawn = ("--extender-images", tmp_path / "images.npz")
    dope = ("--extender", "dope", *drawn, "--public-batch-size", "9")
    code, told = call(
        "train", "--data", "digits@0-2", "--image-size", "16", *flags, *dope, "--out",
        tmp_path / "two",
    )  # fmt: skip
    assert code == 0, told


def test_a_guide_bends_what_is_drawn_and_a_seed_draws_others(draw, tmp_path):
    for name, flags in (("a", ()), ("b", ("--guide-weight", 2)), ("c", ("--seed", 1))):
        code, told = draw(tmp_path / f"{name}.npz", *flags)
        assert code == 0, told
    plain, bent, other = (np.load(tmp_path / f"{name}.npz")["x_train"] for name in "abc")
    assert (plain != bent).any()
    assert not {image.tobytes() for image in plain} & {image.tobytes() for image in other}
    draw(tmp_path / "fewer.npz", number=10)
    assert (np.load(tmp_path / "fewer.npz")["x_train"] == plain[:10]).all()


@pytest.mark.parametrize("after", [0, 2, 3, 4])
def test_a_command_that_was_cut_goes_on(draw, tmp_path, monkeypatch, after):
    draw(tmp_path / "whole.npz")
    replace_everywhere(monkeypatch, image_shards, "piece_size", lambda _: 13)
    original, calls = sampler.draw_images, []

    def cut(*arguments, **options):
        calls.append(0)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    replace_everywhere(monkeypatch, sampler, "draw_images", cut)
    out = tmp_path / "images.npz"
    code, told = draw(out)
    assert (code, out.exists()) == ((130, False) if after < 4 else (0, True)), told
    code, told = draw(out)
    assert code == 0, told
    assert len(calls) == (5 if after < 4 else 4)
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"images.npz", "whole.npz"}


def test_a_finished_file_is_not_drawn_again_nor_overwritten(draw, tmp_path, monkeypatch):
    out = tmp_path / "images.npz"
    draw(out)
    before = out.stat()
    code, told = draw(out)
    assert (code, out.stat().st_mtime_ns) == (0, before.st_mtime_ns)
    assert "drawn already" in told
    (tmp_path / "images.npz.parts/train").mkdir(parents=True)  # killed before they were removed
    draw(out)
    assert list(tmp_path.iterdir()) == [out]
    for flags in (("--seed", 1), ("--sample-steps", 5), ("--guide-weight", 1)):
        code, told = draw(out, *flags)
        assert code == 2
        assert "drawn with other settings" in told
        assert flags[0][2:].replace("-", "_") in told
    for name, content in (("mine.npz", b"mine"), ("note.npz", None)):
        if content is None:
            np.savez(tmp_path / name, note=np.array("mine"))
        else:
            (tmp_path / name).write_bytes(content)
        code, told = draw(tmp_path / name)
        assert code == 2
        assert "was not drawn by this command" in told
    assert out.stat().st_mtime_ns == before.st_mtime_ns


def test_pieces_of_other_settings_are_not_mixed_in(draw, tmp_path, monkeypatch):
    def cut(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sfumato.commands.warmup.draw.save_npz_pieces", cut)
        assert draw(tmp_path / "images.npz")[0] == 130
    code, told = draw(tmp_path / "images.npz", "--seed", 4)
    assert code == 2
    assert "images.npz.parts was drawn with other settings" in told
    assert draw(tmp_path / "images.npz")[0] == 0


def with_ledger(run, folder, seed=None):
    """The same run, as if its generator were trained on private images."""
    shutil.copytree(run, folder)
    place = folder / "stages/generator"
    secret = SessionKey.draw() if seed is None else SessionKey.from_seed(seed)
    ledger = Ledger(LedgerHeader(data="scans", delta=1e-5, fixed_seed=secret.fixed))
    plan = make_plan(size=1000, batch_size=100, steps=3, noise_multiplier=1.0)
    list(poisson_batches(plan, 1000, ledger, secret, stage="generator", chunk_size=100))
    lines = [json.dumps(to_json(record)) + "\n" for record in ledger.records()]
    forge(place, ledger="".join(lines))
    blueprint = json.loads((place / "generator.json").read_text())
    (place / "generator.json").write_text(json.dumps({**blueprint, "ledger": True}))
    return ledger.epsilon()


def test_a_private_generator_says_what_is_guaranteed(draw, run, tmp_path):
    epsilon = with_ledger(run, tmp_path / "run", seed=3)
    code, told = draw(tmp_path / "images.npz", run=tmp_path / "run")
    assert code == 0, told
    assert f"epsilon {round_up(epsilon)}, delta 1e-05, for each example of scans" in told
    assert "NOT FOR RELEASE" in told
    assert "nothing is guaranteed" not in told
    with np.load(tmp_path / "images.npz") as file:
        assert json.loads(str(file["note"]))["epsilon"] == epsilon
    (tmp_path / "run/stages/generator/ledger.jsonl").unlink()
    code, told = draw(tmp_path / "more.npz", run=tmp_path / "run")
    assert code == 2
    assert "ledger.jsonl is gone" in told


def spoilt(folder, run, how):
    """The run, after something happened to it."""
    if how is None:
        return run
    shutil.copytree(run, folder)
    if how == "verb":
        record = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**record, "verb": "train"}))
    else:
        shutil.rmtree(folder / how) if (folder / how).is_dir() else (folder / how).unlink()
    return folder


@pytest.mark.parametrize(
    ("how", "out", "flags", "message"),
    [
        ("config.json", "a.npz", (), "is no run directory"),
        ("verb", "a.npz", (), "is a run of sfumato train: one of sfumato warmup is wanted"),
        ("stages/generator", "a.npz", (), "has no finished generator. sfumato warmup generator"),
        ("stages/generator/done.json", "a.npz", (), "has no finished generator"),
        ("stages/generator/generator.json", "a.npz", (), "Train the generator again"),
        ("stages/guide", "a.npz", ("--guide-weight", 1), "has no trained guide"),
        (None, None, (), "there is no --out. Give FILE.npz"),
        (None, "a", (), "Give FILE.npz"),
        (None, "a.npz", (), None),
        (None, "a.npz", ("--data", "mnist"), "--data is for sfumato warmup, not for"),
        (None, "a.npz", ("--gen-width", 8), "--gen-width is for sfumato warmup, not for"),
        (None, "a.npz", ("--preset", "digits-cpu"), "sfumato warmup draw has no preset"),
        (None, "a.npz", ("--sample-steps", 1), "at least 2"),
        (None, "a.npz", ("--number", 2), "--number 2 is less than an image of each of 3 classes"),
        (None, "a.npz", ("--number", 0), "number=0 must be at least 1"),
    ],
)
def test_mistakes_are_named(call, run, tmp_path, how, out, flags, message):
    place = spoilt(tmp_path / "run", run, how)
    where = () if out is None else ("--out", tmp_path / out)
    words = ("--run", place, "--number", 6, *QUICK, *where, *flags)
    code, told = call("warmup", "sample", *words)
    assert code == (0 if message is None else 2), told
    if message is not None:
        assert message in told
        assert not (tmp_path / "a.npz").exists()


@pytest.mark.parametrize("stage", ["generator", "train", None])
def test_a_run_is_drawn_from_and_nothing_else(call, run, stage):
    words = [stage] if stage else []
    code, told = call("warmup", *words, "--run", run, "--out", "a.npz", "--epsilon", 3)
    assert code == 2
    assert "is for sfumato warmup" in told


def test_nothing_in_the_run_is_touched(draw, run, tmp_path):
    def state():
        return {path: path.stat().st_mtime_ns for path in run.rglob("*")}

    before = state()
    draw(tmp_path / "images.npz")
    assert state() == before
