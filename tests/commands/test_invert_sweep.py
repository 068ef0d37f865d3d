"""sfumato invert sweep: targets with different guarantees, each beside its control."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from contents import content, summaries
from inversions import attack, digits, scores_of, tiny
from people import portraits
from PIL import Image

from sfumato.attacks.gan_state import GanSettings
from sfumato.commands.invert import sweep as invert_sweep
from sfumato.commands.invert.context import make_context, same_images
from sfumato.commands.invert.sweep import CAUTION, LADDER, match_accuracy, targets, train_control
from sfumato.errors import SfumatoError
from sfumato.runs import Run

SMALL = {"sweep": True, "epsilons": ("inf", "clip", "8"), "seeds": 1, "steps": 12}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"), **SMALL)


@pytest.fixture(scope="module")
def swept(settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "sweep"
    return out, attack(settings, out)


def test_every_target_is_attacked_and_the_private_one_has_a_control(swept):
    out, summary = swept
    rows = scores_of(out)["rows"]
    assert [row["target"] for row in rows] == [
        "not private", "clipped, no noise", "example-level", "example-level"
    ]  # fmt: skip
    assert [row["control"] for row in rows] == [False, False, False, True]
    spent = [float(row["epsilon"]) for row in rows]
    assert spent[:2] == [math.inf, math.inf]
    assert 7.5 < spent[2] == spent[3] <= 8
    assert summary["targets"] == 4
    folders = {path.name for path in (out / "private" / "sweep").iterdir()}
    assert folders == {"inf-0", "clip-0", "8-0", "8-0-control"}
    assert all((out / "private/sweep" / name / "private/guesses.png").exists() for name in folders)


def test_a_sweep_says_in_its_table_what_example_level_privacy_does_not_guarantee(swept):
    out, summary = swept
    text = (out / "private" / "sweep.md").read_text()
    assert CAUTION in text
    assert CAUTION in summary["text"]
    for cell in ("| not private | inf |", "| clipped, no noise | inf |", "| example-level |",
                 "| example-level (control) | inf, stopped as"):  # fmt: skip
        assert text.count(cell) == 1, cell
    assert (out / "private" / "sweep.png").stat().st_size > 10_000


def test_what_a_sweep_found_is_only_in_private(swept):
    out, _ = swept
    outside = [
        path for path in out.rglob("*")
        if path.is_file() and "private" not in path.relative_to(out).parts
    ]  # fmt: skip
    assert {path.name for path in outside} == {"config.json", "done.json", "log.txt", ".lock"}
    assert not any("accuracy" in (out / name).read_text() for name in ("done.json", "log.txt"))
    assert str(out) not in summaries(out)


def test_all_targets_are_judged_by_the_same_judges_and_learn_the_same_images(swept):
    out, _ = swept
    judges = [path.parent for path in out.rglob("judges/*/done.json")]
    assert judges == [out / "private/judges/group-cnn-small"]
    files = list((out / "private/sweep").glob("*/private/members.npz"))
    assert len({path.read_bytes() for path in files}) == 1
    assert len(files) == 4


def test_a_sweep_that_was_cut_goes_on_with_what_is_missing(settings, swept, tmp_path, monkeypatch):
    out, attacked, real = tmp_path / "run", [], invert_sweep.attack_one

    def stop(name, *arguments, **others):
        attacked.append(name)
        if name == "8-0-control":
            plain = arguments[1]
            assert (plain.lr, plain.optimizer, plain.clip) == (config.lr, "adam", config.clip)
        if name == "8-0" and attacked.count(name) == 1:
            raise KeyboardInterrupt
        return real(name, *arguments, **others)

    config = replace(settings, noise_seed=1)
    monkeypatch.setattr(invert_sweep, "attack_one", stop)
    with pytest.raises(KeyboardInterrupt):
        attack(config, out)
    kept = out / "private/sweep/clip-0/private/stages/latent/guesses.safetensors"
    time = kept.stat().st_mtime_ns
    attack(config, out)
    assert kept.stat().st_mtime_ns == time
    assert scores_of(out) == scores_of(swept[0])
    assert (out / "private/sweep.md").read_text() == (swept[0] / "private/sweep.md").read_text()


def test_private_targets_learn_by_their_own_rate_and_controls_by_that_of_the_others(settings):
    found = {name: config for name, _, config in targets(replace(settings, lr=0.01))}
    assert found["inf-0"].lr == 0.01
    assert found["inf-0"].mode == "non-private"
    assert (found["8-0"].lr, found["8-0"].optimizer) == (settings.private_lr, "sgd")
    assert (found["8-0"].epsilon, found["8-0"].noise_multiplier) == (8.0, None)
    assert (found["clip-0"].epsilon, found["clip-0"].noise_multiplier) == (None, 0.0)
    several = [name for name, _, _ in targets(replace(settings, seeds=2, units=("person",)))]
    assert several[:2] == ["inf-person-0", "inf-person-1"]


def test_a_control_is_stopped_where_it_is_as_accurate(settings, tmp_path):
    """Far above chance, so that a control that learns nothing would be seen."""
    config = replace(settings, sweep=False, mode="non-private", noise_seed=None)
    base = make_context(config, Run(tmp_path))
    found = match_accuracy(config, 0.8, base)
    assert found.noise_seed == found.seed  # or the one attacked would be another
    assert (found.lr, found.optimizer, found.mode) == (config.lr, config.optimizer, "non-private")
    accuracy = scores_of(train_control(config, found.steps, base).path)["test_accuracy"]
    assert abs(accuracy - 0.8) < 0.1
    tried = {int(path.name.split("-")[1]) for path in (tmp_path / "private/ladder").iterdir()}
    assert {steps for steps in LADDER if steps <= max(tried)} <= tried


def test_the_control_that_is_attacked_is_the_one_that_was_tried(swept):
    out, _ = swept
    row = scores_of(out)["rows"][-1]
    control = out / "private/sweep/8-0-control/private/stages/target"
    steps = json.loads((control / "done.json").read_text())["steps"]
    tried = out / f"private/ladder/0-{steps}"
    assert content(tried / "model.safetensors") == content(control / "model.safetensors")
    assert row["test_accuracy"] == pytest.approx(scores_of(tried)["test_accuracy"])


def test_what_one_target_is_refused_for_stops_the_sweep_at_its_start(settings, tmp_path):
    for changes, message in (
        ({"units": ("example", "person")}, "nobody knows who"),
        ({"delta": 0.1}, "not below 1/90"),
        ({"judges": ("scnm",)}, "Did you mean"),
        ({"n": 999}, "--n 999"),
    ):
        with pytest.raises(SfumatoError, match=message):
            attack(replace(settings, **changes), tmp_path / "run")
        assert not list(tmp_path.rglob("*.safetensors"))
    attack(replace(settings, epsilons=("inf",), steps=1), tmp_path / "run")  # the place is free


def test_people_are_guaranteed_to_where_they_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(invert_sweep, "LADDER", (2, 4))  # nothing can be learned from noise
    faces, test = portraits(60, 12), portraits(30, 6, seed=1)
    faces.save_npz(tmp_path / "faces.npz", test)
    public = digits("5-7", "train", 20)
    pixels = torch.nn.functional.pad(public.pixels, (-2, -2, -2, -2))
    replace(public, pixels=pixels).save_npz(tmp_path / "others.npz")
    config = tiny(
        tmp_path, sweep=True, epsilons=("8",), seeds=1, units=("person",), steps=3,
        batch_size=5, gan=GanSettings(iterations=2, gan_width=4, latent=8), judge_share=0.4,
        delta=1e-3,
    )  # fmt: skip
    files = {"data": str(tmp_path / "faces.npz"), "public": str(tmp_path / "others.npz")}
    attack(replace(config, **files), tmp_path / "run")
    rows = scores_of(tmp_path / "run")["rows"]
    kinds = [(row["target"], row["control"]) for row in rows]
    assert kinds == [("person-level", False), ("person-level", True)]
    place = tmp_path / "run/private/sweep/8-person-0/private"
    header = (place / "stages/target/ledger.jsonl").read_text().splitlines()[0]
    assert '"unit": "person"' in header
    with np.load(place / "members.npz") as kept:
        assert len(np.unique(kept["people_train"])) < 12


def test_all_targets_of_a_sweep_learn_the_same_images_and_no_judge_knows_them(tmp_path):
    """In folders, people are read only where a guarantee is about them: that must part nothing."""
    images = portraits()
    base = tmp_path / "faces"
    for split, count in (("train", 6), ("test", 2)):
        for who in range(12):
            folder = base / split / str(who % 2) / f"person{who}"
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = images.pixels[(who * 7 + k) % len(images)].clone()
                pixels[0, 0, 0] = who * 10 + k  # no two are alike
                Image.fromarray(pixels[0].numpy()).save(folder / f"{k}.png")
    config = tiny(
        tmp_path, data=str(base), sweep=True, epsilons=("8",), seeds=1, people="folder",
        unit="person", units=("example", "person"), batch_size=5, delta=1e-3, image_size=16,
    )  # fmt: skip
    context = make_context(config, Run(tmp_path / "run"))
    members = {image.numpy().tobytes() for image in context.members.pixels}
    assert not members & {image.numpy().tobytes() for image in context.others.pixels}
    for _, _, settings in targets(config):
        other = same_images(context, settings, Run(tmp_path / "run"))
        assert {image.numpy().tobytes() for image in other.members.pixels} == members
