"""The demo, end to end: what it writes, what it promises, and that it can be resumed."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sfumato.cli import main
from sfumato.privacy.ledger import Ledger
from sfumato.recipes import demo
from sfumato.runs import open_run, read_lines


def run_demo(out, **changes):
    config = demo.Config(**changes)
    with open_run(config, verb="demo", out=out) as run:
        return demo.run(config, run)


def test_the_demo_leaves_a_complete_run(tmp_path, capsys):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--preset", "digits-cpu", "--out", str(out), "--json"])
    assert stopped.value.code == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((out / "done.json").read_text())
    assert 0.99 < summary["epsilon"] <= 1
    assert summary["not_for_release"] == []
    with Image.open(out / "means.png") as picture:
        assert picture.width > 800
    scores = json.loads((out / "private" / "scores.json").read_text())
    assert scores["test_accuracy"] > 0.7
    assert {p.name for p in (out / "private").iterdir()} == {"scores.json", "comparison.png"}
    ledger = Ledger.from_records(read_lines(out / "ledger.jsonl"))
    assert ledger.epsilon() == summary["epsilon"]
    with pytest.raises(SystemExit):
        main(["account", "--ledger", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["epsilon"] == summary["epsilon"]


def test_the_released_means_have_the_noise_that_was_promised(tmp_path):
    # Border pixels of digits are black: what is there in the released mean is noise.
    run_demo(tmp_path / "run", epsilon=4.0, secure=True)
    means = load_file(tmp_path / "run" / "means.safetensors")["means"]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    border = torch.cat([means[..., 0, :].flatten(), means[..., :, 0].flatten()])
    seen = border[border > 0].square().mean().sqrt()
    # Clipping shrinks the typical image to about 0.85 of its size, and its count with it.
    expected = plan["noise_multiplier"] * plan["max_norm"] / 400
    assert 0.9 * expected < float(seen) < 1.5 * expected


def test_a_fixed_seed_repeats_and_is_marked_not_for_release(tmp_path):
    summary = run_demo(tmp_path / "one", noise_seed=3)
    run_demo(tmp_path / "two", noise_seed=3)
    run_demo(tmp_path / "free")
    one, two, free = (
        (tmp_path / name / "means.safetensors").read_bytes() for name in ("one", "two", "free")
    )
    assert one == two != free
    assert "fixed seed" in summary["not_for_release"][0]
    assert "NOT FOR RELEASE" in demo.show(summary)


def test_a_demo_cut_after_its_release_does_not_pay_twice(tmp_path):
    out = tmp_path / "run"
    first = run_demo(out)
    released = (out / "means.safetensors").read_bytes()
    (out / "done.json").unlink()
    records = read_lines(out / "ledger.jsonl")
    # The secret is gone with the finished run, so put a run that was cut there instead.
    assert not (out / "private" / "secret.key").exists()
    (out / "private" / "secret.key").write_bytes(b"k" * 32)
    second = run_demo(out)
    assert read_lines(out / "ledger.jsonl") == records
    assert second["epsilon"] == first["epsilon"]
    assert (out / "means.safetensors").read_bytes() != released
