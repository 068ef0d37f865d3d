"""The demo, end to end: what it writes, what it promises, and that it can be resumed."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sfumato.cli import main
from sfumato.data.load import load_images
from sfumato.errors import RunError
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.recipes import demo, train
from sfumato.runs import open_run


@pytest.fixture(autouse=True)
def short_training(request, monkeypatch):
    """Two steps instead of two hundred, except where accuracy is the point."""
    if "accuracy" not in request.node.name:
        short = replace(train.PRESETS["digits-cpu"](), epochs=0.25)
        monkeypatch.setitem(train.PRESETS, "digits-cpu", lambda: short)
        monkeypatch.setattr(demo, "steal", lambda run: None)
        monkeypatch.setattr(demo, "invert", lambda run: None)


def run_demo(out, **changes):
    config = demo.Config(**changes)
    with open_run(config, verb="demo", out=out) as run:
        return demo.run(config, run)


def test_the_demo_leaves_a_complete_run_of_good_accuracy(tmp_path, capsys):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--preset", "digits-cpu", "--out", str(out), "--json"])
    assert stopped.value.code == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((out / "done.json").read_text())
    assert 2.95 < summary["epsilon"] <= 3
    assert summary["not_for_release"] == []
    with Image.open(out / "means.png") as picture:
        assert picture.width > 800
    scores = json.loads((out / "private" / "scores.json").read_text())
    assert scores["test_accuracy"] > 0.85
    names = {p.name for p in (out / "private").iterdir()}
    own = {"scores.json", "comparison.png", "metrics.jsonl"}
    assert names == {*own, "stolen.png", "stolen.md", "reconstruct", "inverted.png", "invert"}
    assert not (
        out / "stages"
    ).exists()  # what comes from private images without noise is in private/
    found = json.loads((out / "private/invert/private/scores.json").read_text())["majority"]
    assert found["top1"]["mean"] > 0.4 > 10 * found["floor_top1"]["mean"]
    plain, private = (
        [float(cell.split()[0]) for cell in line.strip("| \n").split(" | ")[1:]]
        for line in (out / "private" / "stolen.md").read_text().splitlines()[2:]
    )
    assert plain[2] > 0.8  # AUC: digits are stolen
    assert private[2] < 0.65  # and not, with noise
    assert private[3] < private[4] + 0.02  # TPR at 1 % FPR, and what no attack can exceed
    ledger = Ledger.from_records(read_lines(out / "ledger.jsonl"))
    assert {event.stage for event in ledger.events} == {"means", "train"}
    assert ledger.epsilon() == summary["epsilon"]
    with pytest.raises(SystemExit):
        main(["account", "--ledger", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["epsilon"] == summary["epsilon"]


def test_the_released_means_have_the_noise_that_was_promised(tmp_path):
    # Border pixels of digits are black: what is there in the released mean is noise.
    run_demo(tmp_path / "run", secure=True, means_noise=4.0)
    means = load_file(tmp_path / "run" / "means.safetensors")["means"]
    border = torch.cat([means[..., 0, :].flatten(), means[..., :, 0].flatten()])
    seen = border[border > 0].square().mean().sqrt()
    # Clipping shrinks the typical image to about 0.85 of its size, and its count with it.
    expected = 4.0 * 9.0 / 400
    assert 0.9 * expected < float(seen) < 1.5 * expected


def test_a_fixed_seed_repeats_and_is_marked_not_for_release(tmp_path):
    summary = run_demo(tmp_path / "one", noise_seed=3)
    run_demo(tmp_path / "two", noise_seed=3)
    run_demo(tmp_path / "free")
    for name in ("means.safetensors", "model.safetensors"):
        one, two, free = ((tmp_path / run / name).read_bytes() for run in ("one", "two", "free"))
        assert one == two != free
    assert "fixed seed" in summary["not_for_release"][0]
    assert "NOT FOR RELEASE" in demo.show(summary)


def cut_after_its_release(out, **changes):
    """A demo whose process died just before it was finished."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sfumato.runs.Run.finish", lambda *_: {"cut": True})
        run_demo(out, **changes)
    return (out / "means.safetensors").read_bytes(), read_lines(out / "ledger.jsonl")


def test_a_demo_cut_after_its_release_releases_the_same_and_pays_once(tmp_path):
    released, records = cut_after_its_release(tmp_path / "run")
    run_demo(tmp_path / "run")
    assert read_lines(tmp_path / "run" / "ledger.jsonl") == records
    assert (tmp_path / "run" / "means.safetensors").read_bytes() == released


def test_a_demo_that_lost_its_secret_is_refused(tmp_path):
    cut_after_its_release(tmp_path / "run")
    (tmp_path / "run" / "private" / "secret.key").unlink()
    with pytest.raises(RunError, match="unpaid release"):
        run_demo(tmp_path / "run")


def test_data_that_changed_in_between_is_not_released_under_the_same_noise(tmp_path):
    images = load_images("digits", "test", private=False)
    path = images.save_npz(tmp_path / "mine.npz", images)
    cut_after_its_release(tmp_path / "run", data=str(path))
    images.pixels[:] = 255 - images.pixels
    images.save_npz(tmp_path / "mine.npz", images)
    summary = run_demo(tmp_path / "run", data=str(path))
    ledger = Ledger.from_records(read_lines(tmp_path / "run" / "ledger.jsonl"))
    assert [event.stage for event in ledger.events].count("means") == 2
    assert summary["epsilon"] > 3, "another release pays, and the ledger says so"
