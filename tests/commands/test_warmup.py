"""sfumato warmup, end to end on tiny images: what stages leave, guarantees, resuming."""

import json
import shutil
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from contents import summaries
from cuts import cut_in
from planted import replace_everywhere
from samples import few
from warmups import MADE, same, scores_of, tiny, warm
from whole_runs import fixtures

from sfumato.cli import main
from sfumato.commands.load_model import load_model
from sfumato.commands.train import command as train
from sfumato.commands.warmup import classifier as warmup_classifier
from sfumato.commands.warmup import command as warmup
from sfumato.commands.warmup import generator as warmup_generator
from sfumato.commands.warmup.context import make_context
from sfumato.commands.warmup.watch import check_for_copies
from sfumato.data.augment import Augmentation
from sfumato.data.load import load_images
from sfumato.diffusion import generator, image_shards, sampler
from sfumato.errors import ConfigError, RunError
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.runs import Run, open_run
from sfumato.settings.warmup import PRESETS, Warmup
from sfumato.training import plain
from sfumato.training.progress import progress

STAGES = Warmup.stage_names()

settings, finished = fixtures(tiny, warm)


def test_the_ledger_speaks_of_the_private_rest_alone(finished, settings):
    ledger = Ledger.from_records(read_lines(finished / "stages/train/ledger.jsonl"))
    assert ledger.header.data.endswith("-without-30%")
    assert {release.stage for release in ledger.releases} == {"train"}
    assert ledger.releases[0].rate == pytest.approx(40 / 126)
    done = json.loads((finished / "done.json").read_text())
    assert done["epsilon"] == pytest.approx(ledger.epsilon())
    assert done["public_images"] == 54
    assert str(finished) not in summaries(finished)
    public = np.load(finished / "stages/split/public.npz")
    assert np.bincount(public["y_train"]).tolist() == [18, 18, 18]


def test_what_is_made_before_the_private_stage_does_not_depend_on_a_private_image(
    finished, settings, tmp_path
):
    with open_run(settings, verb="warmup", out=tmp_path / "look") as run:
        context = make_context(settings, run)
    known = {image.numpy().tobytes() for image in context.public.pixels}
    arrays = dict(np.load(settings.data))
    generator = np.random.default_rng(0)
    for name in ("x_train", "x_test"):
        for place, image in enumerate(arrays[name]):
            if image.tobytes() not in known:
                arrays[name][place] = generator.integers(0, 256, image.shape, dtype=np.uint8)
    np.savez(tmp_path / "other.npz", **arrays)
    warm(replace(settings, data=str(tmp_path / "other.npz")), tmp_path / "run")
    equal = same(tmp_path / "run", finished)
    assert all(equal[name] for name in MADE[:4])
    assert not equal["stages/train/model.safetensors"]


def test_a_warm_up_is_not_believed_when_its_ledger_lost_a_line(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    file = run / "stages/train/ledger.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    for given in (run, file.parent):
        with pytest.raises(RunError):
            load_model(given)
    for command in (["report", run, "--out", tmp_path], ["account", "--ledger", file]):
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in command])
        assert stopped.value.code == 3


def test_the_ledger_tells_public_weights_from_the_model_of_the_same_name(finished):
    ledger = Ledger.from_records(read_lines(finished / "stages/train/ledger.jsonl"))
    start = "the weights that training began with (stages/warmup/model.safetensors)"
    assert ledger.header.public.endswith(f", and {start}")
    assert (finished / "stages/train/model.safetensors").exists()


def test_its_classifiers_are_loaded_and_reach_what_was_scored(finished, settings):
    test = load_images(settings.data, "test")
    for place, name in (("", "dp"), ("stages/train", "dp"), ("stages/warmup", "warmup")):
        trained = load_model(finished / place)
        right = trained.logits(test).argmax(dim=1) == test.labels
        assert right.double().mean().item() == pytest.approx(scores_of(finished)[name])
        assert (trained.guarantee is None) == (name == "warmup")


def test_the_last_words_name_what_was_drawn_and_not_looks_that_may_be_rejected(finished, tmp_path):
    summary = json.loads((finished / "done.json").read_text())
    told = warmup.show({**summary, "run": str(finished)})
    assert (
        f"drawn     {finished}/stages/sample/images.npz; pictures in stages/sample/samples" in told
    )
    assert list((finished / "stages/sample/samples").glob("*.png"))
    assert "pictures" not in warmup.show({**summary, "run": str(tmp_path)})


def test_drawn_images_keep_their_labels_and_every_class_has_its_share(finished):
    drawn = load_images(str(finished / "stages/sample/images.npz"), "train", private=False)
    assert drawn.labels.bincount().tolist() == [10, 10, 10]
    assert drawn.shape == (1, 16, 16)
    assert len(drawn.pixels.flatten(1).unique(dim=0)) == 30
    done = json.loads((finished / "stages/sample/done.json").read_text())
    assert 0 <= done["copies"] <= 1
    assert not list((finished / "stages/sample").glob("piece-*"))


def test_copies_are_said_beside_those_of_held_out_images(finished):
    (line,) = (finished / "stages/sample/log.txt").read_text().splitlines()
    done = json.loads((finished / "stages/sample/done.json").read_text())
    assert line.endswith(
        f"copies among 30 drawn images: {done['copies']:.1%} (of held-out images "
        f"{done['copies_among_held_out']:.1%}); held-out loss of the generator "
        f"{json.loads((finished / 'stages/generator/done.json').read_text())['held_out_loss']:.4f}"
    )


def test_drawn_copies_are_said_aloud(finished, settings):
    said = []
    held_out, trained_on = warmup_generator.split_public(make_context(settings, None))
    found = check_for_copies(
        trained_on, trained_on, held_out, finished / "stages/generator", said.append
    )
    assert found["copies"] == 1
    assert said[-1].startswith("copies among 43 drawn images: 100.0% (of held-out images ")
    assert "WARNING: they replay public images" in said[-1]


def test_every_look_leaves_a_picture_and_a_line_of_numbers(finished):
    pictures = sorted((finished / "stages/generator/samples").glob("*.png"))
    assert [path.stem.lstrip("0") for path in pictures] == ["32", "64", "96"]
    lines = read_lines(finished / "stages/generator/metrics.jsonl")
    assert [line["images"] for line in lines] == [32, 64, 96]
    assert all({"held_out_loss", "copies", "held_out_copies"} <= line.keys() for line in lines)
    done = json.loads((finished / "stages/generator/done.json").read_text())
    best = min(lines, key=lambda line: line["held_out_loss"])
    assert (done["images_seen"], done["images_at_best"]) == (96, best["images"])
    assert done["held_out_loss"] == best["held_out_loss"]


def test_stages_one_by_one_are_the_whole(settings, finished, tmp_path, capsys):
    out = tmp_path / "run"
    for number, name in enumerate(STAGES):
        found = warm(replace(settings, stage=name), out)
        assert found["stage"] == name
        assert f"stage {name} of" in warmup.show(found)
        done = [other for other in STAGES if (out / f"stages/{other}/done.json").exists()]
        assert done == list(STAGES[: number + 1])
    assert all(same(out, finished).values())


CUTS = [
    ("sfumato.diffusion.generator:accumulate_gradient", 5),
    ("sfumato.diffusion.sampler:draw_images", 1),
    ("sfumato.commands.warmup.watch:check_for_copies", 0),
    ("sfumato.training.sharpness:sharp_step", 0),
    ("sfumato.training.fit:TrainState.advance", 9),
]
"""In the order of the stages."""


def test_a_run_that_was_cut_in_every_stage_ends_the_same(settings, finished, tmp_path, monkeypatch):
    replace_everywhere(monkeypatch, image_shards, "piece_size", lambda _: 13)
    for name, after in CUTS:
        with cut_in(name, after):
            warm(settings, tmp_path / "run")
    warm(settings, tmp_path / "run")
    assert all(same(tmp_path / "run", finished).values())


def test_a_guide_that_was_cut_draws_no_image_again(settings, tmp_path, monkeypatch):
    replace_everywhere(monkeypatch, image_shards, "piece_size", lambda _: 13)
    drawn, draw_images = [], sampler.draw_images
    monkeypatch.setattr(
        warmup_generator,
        "draw_images",
        lambda *a, **k: drawn.append(len(a[2])) or draw_images(*a, **k),
    )
    config = replace(settings, guide_weight=2.0, guide_epochs=1.0, stage="guide")
    with cut_in("sfumato.diffusion.discriminator_guidance:telling_loss", 0):
        warm(config, tmp_path / "run")
    assert drawn == [13] * 4, "training has 43 public images"
    warm(config, tmp_path / "run")
    assert len(drawn) == 4
    assert not list((tmp_path / "run/stages/guide").glob("piece-*"))


def test_a_stage_killed_before_its_summary_draws_nothing_again(settings, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run/done.json").unlink()
    (tmp_path / "run/stages/sample/done.json").unlink()
    (tmp_path / "run/stages/sample/piece-0000000-0000009.npy").touch()
    with pytest.MonkeyPatch.context() as patch:
        replace_everywhere(patch, sampler, "draw_images", None)
        warm(replace(settings, stage="sample"), tmp_path / "run")
    found = {path.name for path in (tmp_path / "run/stages/sample").iterdir()}
    assert found == {"done.json", "images.npz", "log.txt", "samples"}
    sampled = ("stages/sample/done.json", "stages/sample/images.npz")
    assert all(same(tmp_path / "run", finished, sampled).values())


def test_controls_are_scored_and_stay_private(settings, finished, tmp_path):
    warm(replace(settings, controls=True), tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    controls = {"warmup_on_public_images_alone", "dp_from_public_images_alone", "dp_from_scratch"}
    assert set(scores) == {"warmup", "dp", *controls, "test_images", "fidelity"}
    outside = [p for p in (tmp_path / "run").rglob("*") if "private" not in p.parts and p.is_file()]
    for path in outside:
        assert b"accuracy" not in path.read_bytes(), path


@pytest.mark.parametrize("stage", ["split", "generator"])
def test_stages_of_public_images_say_that_nothing_is_guaranteed(finished, stage):
    done = json.loads((finished / f"stages/{stage}/done.json").read_text())
    told = warmup.show({**done, "stage": stage, "run": str(finished)})
    assert "nothing is guaranteed about the public images" in told


def test_whoever_wants_a_generator_alone_needs_no_epsilon(settings, tmp_path):
    warm(replace(settings, epsilon=None, stage="sample"), tmp_path / "run")
    assert (tmp_path / "run/stages/sample/images.npz").exists()
    with pytest.raises(ConfigError, match="neither of --epsilon"):
        replace(settings, epsilon=None)


def test_a_guarantee_about_people_takes_all_images_of_one_to_the_same_part(settings, tmp_path):
    with np.load(settings.data) as arrays:
        people = {
            f"people_{part}": np.arange(len(arrays[f"y_{part}"])) // 2 for part in ("train", "test")
        }
        np.savez(tmp_path / "people.npz", **dict(arrays), **people)
    config = replace(settings, data=str(tmp_path / "people.npz"), unit="person", batch_size=20)
    warm(config, tmp_path / "run")
    header = read_lines(tmp_path / "run/stages/train/ledger.jsonl")[0]
    assert '"unit": "person"' in json.dumps(header)
    # How many people there are is public, and how many images they have is not.
    told = json.loads((tmp_path / "run/stages/split/done.json").read_text())
    assert told["private"] == 90 - 27
    with open_run(config, verb="warmup", out=tmp_path / "run") as run:
        context = make_context(config, run)
    images = {image.numpy().tobytes() for image in context.public.pixels}
    with np.load(settings.data) as arrays:
        known = np.array([image.tobytes() in images for image in arrays["x_train"]])
    assert (known[0::2] == known[1::2]).all()


@few("extender", [("dope",), ("mirror",), ("weight-multiplicity",)])
def test_an_extender_looks_at_drawn_images(settings, finished, tmp_path, extender):
    shutil.copytree(finished, tmp_path / "run")
    for name in ("stages/train", "stages/evaluate"):
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run/done.json").unlink()
    config = replace(settings, extender=extender)
    warm(config, tmp_path / "run")
    equal = same(tmp_path / "run", finished)
    assert equal["stages/warmup/model.safetensors"]
    assert not equal["stages/train/model.safetensors"]
    header = read_lines(tmp_path / "run/stages/train/ledger.jsonl")[0]
    assert "the images of drawn" in json.dumps(header)


def test_guidance_bends_what_is_drawn(settings, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "progress", partial(progress, seconds=0.0))
    config, told = replace(settings, guide_weight=2.0, guide_epochs=1.0, stage="sample"), []
    with open_run(config, verb="warmup", out=tmp_path / "run", say=told.append) as run:
        warmup.run(config, run)
    after = told[told.index("stage guide") :]
    assert any("step 1/1" in line for line in after), "the guide says how far it is"
    assert same(tmp_path / "run", finished, MADE[:3]) == {
        MADE[0]: True, MADE[1]: True, MADE[2]: False
    }  # fmt: skip


@pytest.mark.full
def test_the_miniature_on_digits_warms_up_and_learns_privately(tmp_path):
    warm(PRESETS["digits-cpu"](), tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    assert scores["warmup"] > 0.7
    assert scores["dp"] > scores["warmup"]
    drawn = json.loads((tmp_path / "run/stages/sample/done.json").read_text())
    assert drawn["copies"] < 0.05


def test_the_command_line_names_each_stage(settings, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", "split", "--preset", "digits-cpu", "--out", str(tmp_path / "run")])
    assert stopped.value.code == 0
    assert "stage split of" in capsys.readouterr().out
    assert Run(tmp_path / "run").stage("split").finished


def test_ctrl_c_loses_no_step_of_the_generator(settings, finished, tmp_path, monkeypatch):
    learn, taken = generator.accumulate_gradient, []

    def press(*arguments):
        learn(*arguments)
        taken.append(len(taken))
        if len(taken) == 1:
            signal.raise_signal(signal.SIGINT)

    replace_everywhere(monkeypatch, generator, "accumulate_gradient", press)
    with pytest.raises(KeyboardInterrupt):
        warm(settings, tmp_path / "run")
    assert len(taken) == 1
    warm(replace(settings, stage="generator"), tmp_path / "run")
    assert len(taken) == settings.diffusion.steps
    assert same(tmp_path / "run", finished, MADE[:2]) == dict.fromkeys(MADE[:2], True)


def test_without_a_generator_the_warm_up_has_the_public_images_alone(
    settings, finished, tmp_path, monkeypatch
):
    seen = []
    prepare = train.prepare_classifier

    def noted(config, images, *others):
        seen.append(images.name)
        return prepare(config, images, *others)

    monkeypatch.setattr(train, "prepare_classifier", noted)
    warm(replace(settings, number=0, controls=True), tmp_path / "run")
    assert seen[1] == "digits-train-public-30%"  # the first is built to see that it can be
    made = {folder.name for folder in (tmp_path / "run/stages").iterdir()}
    assert made == {"split", "warmup", "train", "evaluate"}
    assert scores_of(tmp_path / "run").keys() == {"warmup", "dp", "dp_from_scratch", "test_images"}
    summary = json.loads((tmp_path / "run/done.json").read_text())
    assert "drawn" not in warmup.show({**summary, "run": "run"})
    assert "drawn" in warmup.show(json.loads((finished / "done.json").read_text()))
    assert same(tmp_path / "run", finished, MADE[:1]) == {MADE[0]: True}


def test_public_images_are_shown_as_often_and_changed_as_much_as_asked(
    settings, tmp_path, monkeypatch
):
    seen = {}

    def look(model, inputs, rho, compiled):
        seen.update(images=inputs.images, moves=inputs.augmentation)

    monkeypatch.setattr(
        warmup_classifier, "drawn_images", lambda context: context.public.select([3])
    )
    monkeypatch.setattr("sfumato.commands.warmup.classifier.sharp_step", look)
    monkeypatch.setattr(
        "sfumato.commands.warmup.classifier.train_plainly", lambda model, *_, **__: model
    )
    changes = {"warm_repeats": 3, "warm_colour": 0.2, "warm_affine": 0.1}
    run = Run(tmp_path, print)
    context = make_context(replace(settings, **changes), run)
    warmup_classifier.warm_up(context, run)
    public = context.public.pixels
    assert torch.equal(seen["images"].pixels, torch.cat([public[3:4], public, public, public]))
    moves = Augmentation(crop=1, flip=settings.flip, cutout=4, colour=0.2, affine=0.1)
    assert seen["moves"] == moves
