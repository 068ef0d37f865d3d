"""What sfumato invert can attack, by which methods, and who judges: each way on tiny images."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from inversions import (
    GAN,
    MADE,
    SEARCH,
    attack,
    digits,
    learn,
    own_net,
    same,
    scores_of,
    task,
    tiny,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from whole_runs import fixtures

from sfumato.commands.invert import command as invert
from sfumato.commands.invert import stages as invert_stages
from sfumato.commands.invert.command import PRESETS, Config
from sfumato.commands.invert.context import make_context, open_access, read_given_target
from sfumato.commands.invert.score import as_judge
from sfumato.errors import DataError
from sfumato.runs import Run, open_run
from sfumato.setting_groups import defaults
from sfumato.training.plain import inputs_of

settings, finished = fixtures(tiny, attack)


def test_a_target_that_sfumato_trained_is_attacked_as_it_is(settings, tmp_path):
    target = learn(task(settings.data, epsilon=8.0, mode="ghost_mixed"), tmp_path / "target")
    before = (target / "model.safetensors").read_bytes()
    data = defaults(Config)["data"]  # the target knows its own
    config = replace(settings, target=str(target), data=data)
    attack(config, tmp_path / "run")
    assert (target / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "run/private/stages/target/model.safetensors").exists()
    found = scores_of(tmp_path / "run")
    assert found["guesses"] == 6
    scored = json.loads((target / "private/scores.json").read_text())["test_accuracy"]
    assert found["target_test_accuracy"] == pytest.approx(scored)  # of all test images
    assert found["test_images"] == 60
    with open_run(replace(config, seed=7), verb="invert", out=tmp_path / "other") as run:
        context = make_context(config, run)
    assert (len(context.members), len(context.others), len(context.held_out)) == (180, 30, 30)


def test_a_target_of_ones_own_is_asked_with_its_own_weights_and_norms(settings, tmp_path):
    torch.manual_seed(5)
    net = own_net(3)
    with torch.no_grad():
        for _ in range(5):
            net(torch.randn(40, 1, 16, 16))  # so that BatchNorm has seen something
    save_file(net.state_dict(), tmp_path / "own.safetensors")
    config = replace(settings, target="inversions:own_net", weights=tmp_path / "own.safetensors")
    attack(config, tmp_path / "run")
    pixels = digits("5-7", "train", 60).pixels
    with torch.no_grad():
        confidence = (
            net.eval()((pixels.float() / 255 - 0.5) / 0.5).softmax(dim=1).topk(20, 0).values
        )
    kept = load_file(tmp_path / "run/private/stages/select/selection.safetensors")
    torch.testing.assert_close(kept["confidence"], confidence.T)
    assert read_given_target(config, Run(tmp_path))[0].norm == "keep"


def test_pixels_of_a_target_of_ones_own_can_be_said_and_are_missed(settings, tmp_path):
    torch.manual_seed(5)
    net, images = own_net(3), digits("0-2", "train", 60)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images.pixels.float()), images.labels)
        loss.backward()
        optimizer.step()
    save_file(net.state_dict(), tmp_path / "own.safetensors")
    config = replace(settings, target="inversions:own_net", weights=tmp_path / "own.safetensors")
    config = replace(config, stage="target")
    said = {}
    for name, pixels in (("as_usual", None), ("as_learnt", (0.0, 255.0))):
        said[name] = []
        order = replace(config, target_pixels=pixels)
        with open_run(order, verb="invert", out=tmp_path / name, say=said[name].append) as run:
            invert.run(order, run)
            context = make_context(order, run)
    assert "black is 0 and white 255. If it was trained on these, say --target-pixels 0 255." in (
        "".join(said["as_usual"])
    )
    assert "mind" not in "".join(said["as_learnt"])
    shown = context.held_out.pixels
    with torch.no_grad():
        torch.testing.assert_close(
            open_access(context).answers(shown), net.eval()(shown.float()), rtol=1e-4, atol=1e-4
        )
    assert "mind" not in (tmp_path / "as_usual/log.txt").read_text()  # it may be shared


def test_public_images_come_in_the_size_and_colours_of_the_target(settings, tmp_path):
    config = replace(settings, public="patches")
    with open_run(config, verb="invert", out=tmp_path / "run") as run:
        assert make_context(config, run).public.shape == (1, 16, 16)


def test_other_things_of_the_same_names_are_other_classes_to_judges(settings, tmp_path):
    images = replace(digits("5-7", "train", 60), classes=("0", "1", "2"))
    config = replace(settings, public=str(images.save_npz(tmp_path / "numbered.npz", images)))
    with pytest.raises(DataError, match=r"mean other things.* --other-classes; if .* the same"):
        attack(config, tmp_path / "run")
    lessons = {}
    for name in ("other_classes", "shared_classes"):
        config_said = replace(config, **{name: True})
        with open_run(config_said, verb="invert", out=tmp_path / name) as run:
            lessons[name] = invert_stages.judging_images(make_context(config_said, run))
    apart, merged = lessons["other_classes"], lessons["shared_classes"]
    assert apart.classes == ("0", "1", "2", "public 0", "public 1", "public 2")
    assert merged.classes == ("0", "1", "2")
    own = 90  # half of the private images
    assert (apart.labels[:own] < 3).all()
    assert torch.equal(apart.labels[own:], merged.labels[own:] + 3)


def test_what_a_given_target_does_not_heed_is_said(settings, tmp_path):
    target = learn(task(settings.data), tmp_path / "target")
    config = replace(settings, target=str(target), model="wrn-16-4", stage="select")
    attack(config, tmp_path / "run")
    said = (tmp_path / "run/log.txt").read_text()
    assert "ignored: --model, " in said
    assert "--batch-size" not in said  # as the target was trained
    assert "--public" not in said


def test_a_judge_looks_at_images_of_the_size_that_it_learnt():
    images = digits("0-2", "test", 4)
    net = own_net(3)
    seen = []
    net[0].register_forward_pre_hook(lambda _, tensors: seen.append(tensors[0].shape))
    large = replace(images, pixels=images.pixels.repeat_interleave(2, 2).repeat_interleave(2, 3))
    inputs = inputs_of(net, large, torch.device("cpu"))
    as_judge(net, inputs)(images.pixels.float() / 255)
    assert seen == [(12, 1, 32, 32)]


def test_faces_of_two_sources_are_framed_each_in_its_way(tmp_path):
    generator = np.random.default_rng(0)
    for source, people in (("private_faces", "ab"), ("public_faces", "cd")):
        for who in people:
            for split, count in (("train", 8), ("test", 4)):
                folder = tmp_path / source / split / who
                folder.mkdir(parents=True)
                for k in range(count):
                    face = generator.integers(0, 256, (72, 64, 3), dtype=np.uint8)
                    Image.fromarray(face).save(folder / f"{k}.png")
    config = replace(
        PRESETS["faces-vgg16"](), data=str(tmp_path / "private_faces"), device="cpu",
        public=str(tmp_path / "public_faces"), centre_crop=48, public_centre_crop=40,
        model="vgg-tiny", image_size=32, batch_size=4, epochs=None, steps=1,
        judges=("scnn",), judge_epochs=0.2, n=4, gan=GAN, search=SEARCH, noise_seed=1,
    )  # fmt: skip
    attack(config, tmp_path / "run")
    assert load_file(tmp_path / "run/private/stages/latent/guesses.safetensors")[
        "images"
    ].shape == (4, 3, 32, 32)


@pytest.mark.parametrize("method", ["gmi", "ked", "pixels"])
def test_baselines_run_in_the_same_harness(settings, finished, tmp_path, method):
    config = replace(settings, method=method)
    attack(config, tmp_path / "run")
    assert scores_of(tmp_path / "run")["method"] == method
    generator = tmp_path / "run/private/stages/prior/model.safetensors"
    assert generator.exists() == (method != "pixels")
    kept, plg = (
        load_file(out / "private/stages/latent/guesses.safetensors")["images"]
        for out in (tmp_path / "run", finished)
    )
    assert kept.shape == plg.shape
    assert not torch.equal(kept, plg)


@pytest.mark.parametrize("changes", [{"loss": "cross-entropy"}, {"loss": "poincare"},
                                     {"loss": "logit"}, {"own_unit": False}])  # fmt: skip
def test_losses_differ_in_what_they_find(settings, finished, tmp_path, changes):
    out = tmp_path / "run"
    attack(replace(settings, stage="latent", **changes), out)
    found = same(out, finished, MADE[:4])
    assert list(found.values()) == [True, True, False, False]


def test_pictures_are_cut_and_resized_once(settings, tmp_path):
    config = replace(
        settings, data="digits@0-2", public="digits@5-7", centre_crop=20, image_size=16
    )
    attack(replace(config, stage="target"), tmp_path / "run")
    with np.load(tmp_path / "run/private/members.npz") as kept:
        assert kept["x_train"].shape == (600, 16, 16)
    attack(replace(config, stage="select"), tmp_path / "run")


def test_a_judge_that_is_there_sees_images_as_it_learnt_to(settings, finished, tmp_path):
    out = tmp_path / "run"
    attack(replace(settings, stage="latent"), out)
    with open_run(settings, verb="invert", out=out) as run:
        others = invert_stages.judging_images(make_context(settings, run))
    others.save_npz(tmp_path / "lessons.npz", others.select(range(0, len(others), 9)))
    # scnn has BatchNorm, which sfumato train replaces: the judge must be built like that.
    judge = learn(task(tmp_path / "lessons.npz", model="scnn", image_size=32), tmp_path / "judge")
    config = replace(settings, judges=(), judge=(judge,), image_size=32)
    attack(config, tmp_path / "judged")
    (name,) = scores_of(tmp_path / "judged")["judges"]
    assert name == str(judge)


def test_where_a_class_is_a_person_everyone_has_images_of_everyone(settings, tmp_path):
    images, test = digits("0-2", "train", 60), digits("0-2", "test", 20)
    alone = [replace(some, people=some.labels) for some in (images, test)]
    alone[0].save_npz(tmp_path / "faces.npz", alone[1])
    config = replace(settings, data=str(tmp_path / "faces.npz"))
    with open_run(config, verb="invert", out=tmp_path / "run") as run:
        context = make_context(config, run)
        assert [len(some) for some in (context.members, context.others)] == [90, 90]
        assert context.members.people is not None
        assert set(context.others.labels.tolist()) == {0, 1, 2}
    groups = torch.arange(180) // 5  # but patients are of one side or the other
    alone = replace(images, people=groups), replace(test, people=torch.arange(60) // 5 + 36)
    alone[0].save_npz(tmp_path / "faces.npz", alone[1])
    with open_run(config, verb="invert", out=tmp_path / "run") as run:
        context = make_context(config, run)
    assert len(context.members) == 90
    assert context.members.people is not None
    assert all(int(count) == 5 for count in context.members.people.bincount())
