"""`sfumato train` goes on with the images that it began with, and with no others."""

import shutil
from dataclasses import replace

import pytest
from folders import save_folder
from PIL import Image

from sfumato.commands.audit import command as audit
from sfumato.commands.train import command as train
from sfumato.data.load import load_images
from sfumato.errors import DataError
from sfumato.files import read_json, read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.runs import open_run


@pytest.fixture
def scans(tmp_path):
    """Sixty digits of two classes, as files."""
    digits = load_images("digits@0,1", image_size=8)
    save_folder(digits.split(60 / len(digits))[0], tmp_path / "scans")
    return tmp_path / "scans"


@pytest.fixture
def settings(scans):
    return train.Config(
        data=str(scans), model="group-cnn-small", device="cpu", epsilon=4.0, batch_size=16, steps=3,
        norm="group",
    )  # fmt: skip


def go(config, out):
    with open_run(config, verb="train", out=out) as run:
        return train.run(config, run)


def cut(config, out, monkeypatch):
    """One step, and then Ctrl-C."""
    from sfumato.training.fit import TrainState

    real = TrainState.advance

    def advance(train_state):
        if train_state.step == 1:
            raise KeyboardInterrupt
        real(train_state)

    with monkeypatch.context() as patch:
        patch.setattr("sfumato.training.fit.TrainState.advance", advance)
        with pytest.raises(KeyboardInterrupt):
            go(config, out)


def test_where_sfumato_split_the_folder_summary_and_ledger_say_that_neighbours_are_training_parts(
    scans, settings, tmp_path
):
    for given, word in ((False, "training parts"), (True, "data sets")):
        if given:
            for part in ("train", "test"):
                shutil.copytree(scans, tmp_path / "split" / part)
        data = tmp_path / "split" if given else scans
        out = tmp_path / f"run-{given}"
        summary = go(replace(settings, data=str(data), steps=1), out)
        assert summary["neighbours"] == word
        assert ("training part" in train.show(summary)) is not given
        for unit, one in (("example", "image"), ("person", "person")):
            told = train.show({**summary, "unit": unit})
            assert (f"one more {one} may move others" in told) is not given
        header, *lines = read_lines(out / "ledger.jsonl")
        assert header["header"].pop("neighbours") == word
        older = Ledger.from_records([header, *lines])  # written before this was said
        assert older.header.neighbours == "data sets"


def add(scans):
    for name in ("a", "b"):
        Image.new("L", (8, 8), 7).save(scans / "0" / f"{name}.png")


def swap(scans):
    files = sorted((scans / "0").iterdir())
    whole = [file.read_bytes() for file in files]
    for file, other in zip(files, reversed(whole), strict=True):
        file.write_bytes(other)


def rename(scans):
    (scans / "0").rename(scans / "2")


def add_class(scans):
    shutil.copytree(scans / "0", scans / "2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add, "it had 48 images, and has 50"),
        (swap, "images, labels or people are others, or in another order"),
        (rename, "its classes were 0, 1, and are 1, 2"),
        (add_class, "its classes were 0, 1, and are 0, 1, 2"),
    ],
)
def test_a_run_does_not_go_on_with_data_that_have_changed(
    settings, scans, tmp_path, monkeypatch, change, words
):
    out = tmp_path / "run"
    cut(settings, out, monkeypatch)
    plan, kept = read_json(out / "plan.json"), shutil.copytree(scans, tmp_path / "kept")
    change(scans)
    with pytest.raises(DataError, match=f"has changed since .{words}"):
        go(settings, out)
    assert read_json(out / "plan.json") == plan
    shutil.rmtree(scans)
    kept.rename(scans)
    assert go(settings, out)["epsilon"] <= 4.0


def test_an_audit_needs_the_very_images(settings, scans, tmp_path):
    go(settings, tmp_path / "run")
    swap(scans)
    config = audit.Config(run=tmp_path / "run", shadows=0, device="cpu")
    run = open_run(config, verb="audit", out=tmp_path / "audit")
    with run, pytest.raises(DataError, match="An audit needs the very images"):
        audit.run(config, run)


def test_an_order_that_was_refused_settles_no_data(settings, scans, tmp_path):
    wrong = replace(settings, freeze=("nothing*",))
    with pytest.raises(ValueError, match="fits no parameter"):
        go(wrong, tmp_path / "run")
    add(scans)
    assert go(settings, tmp_path / "run")["epsilon"] <= 4.0
