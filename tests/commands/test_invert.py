"""sfumato invert: what a run leaves, what the attack may see, and each way to attack."""

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from contents import summaries
from inversions import MADE, attack, learn, same, scores_of, task, tiny
from planted import replace_everywhere
from safetensors.torch import load_file
from whole_runs import fixtures

from sfumato.attacks import gan_training
from sfumato.cli import main
from sfumato.commands.invert import command as invert
from sfumato.commands.invert import stages as invert_stages
from sfumato.commands.invert.command import PRESETS
from sfumato.commands.invert.context import make_context, open_access
from sfumato.commands.invert.score import four_sets
from sfumato.runs import Run, open_run
from sfumato.setting_groups import leaves
from sfumato.settings.invert import Invert
from sfumato.settings.train import Training
from sfumato.training.fit import TrainState

STAGES = Invert.stage_names()

SEEN_BY_ATTACKERS = MADE[1:4]


settings, finished = fixtures(tiny, attack)


def done_of(out, stage):
    return out / "private/stages" / stage / "done.json"


def test_a_run_leaves_guesses_of_every_class_and_private_scores(finished):
    kept = load_file(finished / "private/stages/latent/guesses.safetensors")
    assert kept["images"].shape == (6, 1, 16, 16)
    assert kept["labels"].tolist() == [0, 0, 1, 1, 2, 2]
    assert 0 <= kept["images"].min() <= kept["images"].max() <= 1
    scores = scores_of(finished)
    assert (scores["classes"], scores["guesses"], scores["method"]) == (3, 6, "plg")
    assert scores["attack_accuracy"] == scores["majority"]["top1"]["mean"]
    assert set(scores["judges"]) == {"group-cnn-small"}
    assert {path.name for path in (finished / "private").iterdir()} == {
        "judges", "members.npz", "findings.json", "scores.json", "guesses.png", "stages"
    }  # fmt: skip


def test_nothing_outside_private_tells_how_well_it_went(finished):
    outside = [
        path for path in finished.rglob("*")
        if path.is_file() and "private" not in path.relative_to(finished).parts
    ]  # fmt: skip
    assert not [path for path in outside if path.suffix in (".png", ".npz")]
    texts = {path: path.read_text() for path in outside if path.suffix != ".safetensors"}
    assert str(finished) not in summaries(finished)
    assert {"done.json", "log.txt"} <= {path.name for path in texts}
    for word in ("accuracy", "top1", "floor", "member_gap", 'loss":'):
        assert not [path for path, text in texts.items() if word in text
                    and path.name != "config.json"], word  # fmt: skip


def test_a_judge_stays_private_and_its_classes_begin_with_those_of_the_target(settings, tmp_path):
    with open_run(settings, verb="invert", out=tmp_path / "run") as run:
        context = make_context(settings, run)
    lessons = invert_stages.judging_images(context)
    assert lessons.classes == ("0", "1", "2", "5", "6", "7")
    some = invert_stages.judges_training_images(context)
    assert 60 < some.sum() < 120  # of 180: the others are shown to the judges
    assert len(lessons) == len(context.others) + some.sum()
    assert lessons.labels.bincount()[:3].tolist() == [30, 30, 30]
    place = lessons.classes.index("6")
    shown = lessons.pixels[lessons.labels == place]
    assert torch.equal(shown, context.public.pixels[some & (context.public.labels == 1)])


def test_images_that_judges_are_shown_were_learnt_by_none_of_them(finished, settings):
    with open_run(settings, verb="invert", out=finished) as run:
        context = make_context(settings, run)
        pixels, labels = four_sets(context)
    lessons = {image.numpy().tobytes() for image in invert_stages.judging_images(context).pixels}
    shown = (pixels.public * 255).round().to(torch.uint8)
    assert len(shown) == len(labels.public) > 9
    assert not [image for image in shown if image.numpy().tobytes() in lessons]


def hashes(images):
    return {hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images.pixels}


@pytest.mark.parametrize("given", [False, True])
def test_no_image_is_in_two_of_the_four_sets(settings, tmp_path, given):
    config = replace(settings, data="digits@0-4", public="digits@5-9", image_size=16)
    if given:
        target = learn(task("digits@0-4", image_size=16, steps=1), tmp_path / "target")
        config = replace(config, target=str(target))
    with open_run(config, verb="invert", out=tmp_path / "run") as run:
        context = make_context(config, run)
    sets = [
        hashes(some) for some in (context.members, context.others, context.held_out, context.public)
    ]
    sizes = [2000, 250, 250, 2000] if given else [1000, 1000, 500, 2000]
    assert [len(some) for some in sets] == sizes
    assert len(set.union(*sets)) == sum(sizes)
    assert not context.public.private
    assert context.members.private


def test_stages_one_by_one_are_the_whole(settings, finished, tmp_path, capsys):
    out = tmp_path / "run"
    for number, name in enumerate(STAGES):
        found = attack(replace(settings, stage=name), out)
        assert found["stage"] == name
        assert f"stage {name} of" in invert.show(found) or "pictures" in invert.show(found)
        done = [other for other in STAGES if done_of(out, other).exists()]
        assert done == list(STAGES[: number + 1])
    assert not (out / "done.json").exists()
    attack(settings, out)
    assert all(same(out, finished).values())


def named(wanted):
    return lambda run, name, *_: name == wanted


def learning(optimizer):
    return lambda train_state: (
        train_state.step == 1 and type(train_state.optimizer).__name__ == optimizer
    )


CUTS = {
    "in the target": (TrainState, "advance", learning("Adam")),
    "in the judge": (TrainState, "advance", learning("AdamW")),
    "in the selection": (Run, "save_tensors", named("selection.safetensors")),
    "in the prior": (gan_training, "run_iteration", lambda gan, *_: gan.step == 3),
    "before the prior's end": (Run, "save_tensors", named("model.safetensors")),
    "in the search": (Run, "save_tensors", named("guesses.safetensors")),
    "in the score": (Run, "write_json", named("private/scores.json")),
}


def cut(monkeypatch, config, out, where, name, when):
    """Run until `where.name` is called with what `when` accepts, and end there."""
    real = getattr(where, name)

    def dies(*arguments, **others):
        if when(*arguments):
            raise KeyboardInterrupt
        return real(*arguments, **others)

    with monkeypatch.context() as patched:
        replace_everywhere(patched, where, name, dies)
        with pytest.raises(KeyboardInterrupt):
            attack(config, out)


def test_a_run_cut_in_every_stage_ends_like_an_undisturbed_one(
    settings, finished, tmp_path, monkeypatch
):
    out, reached = tmp_path / "run", []
    for where, name, when in CUTS.values():
        cut(monkeypatch, settings, out, where, name, when)
        reached.append(sum(done_of(out, stage).exists() for stage in STAGES))
    assert reached == [0, 1, 2, 3, 3, 4, 5]
    attack(settings, out)
    assert all(same(out, finished).values()), same(out, finished)


def test_a_generator_that_had_lost_patience_does_not_go_on_after_a_cut(
    settings, tmp_path, monkeypatch
):
    config = replace(settings, gan=replace(settings.gan, iterations=40, look_every=1, patience=1))
    attack(replace(config, stage="latent"), tmp_path / "whole")
    steps = json.loads(done_of(tmp_path / "whole", "prior").read_text())["iterations"]
    assert steps < 40
    attack(replace(config, stage="select"), tmp_path / "cut")
    cut(monkeypatch, config, tmp_path / "cut", Run, "save_tensors", named("model.safetensors"))
    replace_everywhere(monkeypatch, gan_training, "run_iteration", None)
    attack(replace(config, stage="latent"), tmp_path / "cut")
    assert all(same(tmp_path / "cut", tmp_path / "whole", SEEN_BY_ATTACKERS).values())


def test_a_finished_run_says_so_and_stays_as_it_is(finished, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stopped:
        main(["invert", "--out", str(finished)])
    assert stopped.value.code == 0
    heard = capsys.readouterr()
    assert "finished already" in heard.err
    assert "guesses.png: training images above" in heard.out
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_the_attack_reads_no_private_image(settings, finished, tmp_path):
    """Once a target is trained, its images can burn: the attacker's work is the same."""
    (tmp_path / "burnt").mkdir()
    config = tiny(tmp_path / "burnt")
    attack(replace(config, stage="judge"), tmp_path / "run")
    generator = np.random.default_rng(3)
    with np.load(config.data) as kept:
        arrays = dict(kept)
    for name in ("x_train", "x_test"):
        arrays[name] = generator.integers(0, 256, arrays[name].shape, dtype=np.uint8)
    np.savez(config.data, **arrays)
    (tmp_path / "run/private/members.npz").unlink()
    attack(replace(config, stage="latent"), tmp_path / "run")
    assert all(same(tmp_path / "run", finished, MADE[:4]).values())
    attack(config, tmp_path / "run")  # the score is the owner's, and does look
    assert scores_of(tmp_path / "run")["judges"] != scores_of(finished)["judges"]


def test_nothing_that_came_of_the_target_lies_outside_private(finished):
    # What is said of images that nobody may see is not for release: it has no ledger.
    assert {path.name for path in finished.iterdir()} - {".lock"} == {
        "config.json", "log.txt", "done.json", "private"
    }  # fmt: skip


def test_an_attacker_gets_answers_and_no_weights(settings, tmp_path):
    with open_run(settings, verb="invert", out=tmp_path / "run") as run:
        context = make_context(settings, run)
        invert.attack_target(context, "target")
    access = open_access(context)
    granted = {name for name in dir(access) if not name.startswith("_")}
    assert granted == {"answers", "asked", "classes", "device", "logits", "shape"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound_and_can_be_swept(name):
    config = PRESETS[name]()
    assert config.mode == "non-private"
    assert replace(config, sweep=True).train.mode == "non-private"
    assert leaves(Training).keys() < leaves(type(config)).keys()


@pytest.mark.slow  # the demo runs it too, and looks at the same numbers
def test_digits_are_inverted_in_a_minute(tmp_path, capsys):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        main(["invert", "--preset", "digits-cpu", "--out", str(out), "--json"])
    assert stopped.value.code == 0
    heard = capsys.readouterr()
    assert "attack accuracy (private)" in heard.err
    assert "accuracy" not in heard.out
    scores = scores_of(out)
    judge = scores["judges"]["group-cnn"]
    assert judge["top1"]["mean"] >= 0.5
    assert judge["floor_top1"]["mean"] < 0.1
    assert judge["held_out_top1"]["mean"] > 0.8
    assert scores["target_test_accuracy"] > 0.9
    assert (out / "private" / "guesses.png").stat().st_size > 10_000
    shutil.rmtree(out)
