"""What sfumato reconstruct takes and refuses, and how a study is told."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders import save_folder
from reconstructions import TINY, attack

from sfumato.attacks.heads import HeadRecipe
from sfumato.commands.reconstruct.context import make_context
from sfumato.commands.reconstruct.evaluate import at_most
from sfumato.commands.reconstruct.study import table_of
from sfumato.data.images import Images
from sfumato.data.overlap import overlap
from sfumato.errors import DataError, SfumatoError
from sfumato.runs import Run


def test_a_study_has_a_row_for_each_value(tmp_path):
    attack(replace(TINY, vary="class_size=1,2"), tmp_path / "run")
    table = (tmp_path / "run" / "private" / "study.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table] == ["| class_size", "| ---", "| 1", "| 2"]
    assert (tmp_path / "run" / "private" / "study.png").exists()


def test_a_study_rounds_guarantees_up_and_proofs_down():
    scores = {"accuracy_of_heads": 0.5, "auc": 0.5, "tpr_at_1_percent_fpr": 0.01}
    scores["tpr_at_1_percent_fpr_interval"] = (0.0, 0.02)
    guaranteed = {**scores, "privacy": {"epsilon": 1.401, "epsilon_proved": 0.996}}
    nothing = {**scores, "privacy": {"epsilon_proved": 2.789}}
    titles, _, *rows = table_of("noise_multiplier", {"7": guaranteed, "0": nothing}).splitlines()
    assert titles.count("epsilon") == titles.count("at delta 1e-05") == 2
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [(row[2], row[-1]) for row in cells] == [("1.41", "0.99"), ("∞", "2.78")]


def test_a_bound_below_one_is_not_rounded_to_none():
    assert [at_most(tpr) for tpr in (0.1, 0.0921, 0.9996, 0.99999996, 1.0)] == [
        "0.100", "0.093", "0.9996", "0.99999996", "1"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bound": 0.5, "head": HeadRecipe(max_norm=1.0, noise_multiplier=1.0)}, "leave"),
        ({"bound": 2.0, "head": HeadRecipe(max_norm=1.0)}, "between"),
        ({"head": HeadRecipe(hidden=4, positive=(1,))}, "published"),
        ({"vary": "colour=red"}, "class_size"),
        ({"vary": "epochs=many"}, "not a number"),
        ({"vary": "noise_multiplier=1"}, "max_norm"),
        ({"vary": "class_size=1,2", "stage": "train"}, "study is whole"),
        ({"bound": 0.1, "head": HeadRecipe()}, "--max-norm"),
        ({"images": 15}, "Take 20"),
        ({"head": HeadRecipe(classes=3)}, "the data has 10"),
        ({"image_size": 30, "vary": "class_size=1,2"}, "28, 32 or 64"),
        ({"image_size": 30}, "28, 32 or 64"),
        ({"trials": 1}, "--trials"),
        ({"base_data": "digits", "weights": Path("w.pt")}, "--base-data"),
        ({"steps": 0}, "at least 1"),
        ({"gate": 0.99}, "--base-epochs"),
        ({"data": "nowhere"}, "known name"),
        ({"image_size": 100_000}, "--image-size"),
        ({"feature_size": 100_000}, "--feature-size"),
    ],
)
def test_bad_input_is_named(tmp_path, changes, message):
    with pytest.raises(SfumatoError, match=message):
        attack(replace(TINY, **changes), tmp_path / "run")


def test_the_gate_does_not_judge_a_base_by_the_noise_of_its_heads(tmp_path):
    head = replace(TINY.head, rate=0.5, max_norm=4.0, noise_multiplier=50.0)
    config = replace(TINY, head=head, base_epochs=1, base_share=0.4, gate=0.25, stage="base")
    assert attack(config, tmp_path / "run")["accuracy_of_heads"] > 0.25


def test_one_picture_a_head_is_judged_by_all_its_images(tmp_path):
    head = HeadRecipe(hidden=4, positive=(1, 3), lr=0.1)
    config = replace(TINY, head=head, decoder="published", conditional=False, width=4, trials=15)
    attack(config, tmp_path / "run")
    scores = json.loads((tmp_path / "run/private/scores.json").read_text())
    assert scores["statistic"] == "error, nearest of 10"
    assert scores["trials"] == 15


def test_colour_images_in_a_folder(tmp_path):
    for seed, split in enumerate(("train", "test")):
        save_folder(noise(60, seed), tmp_path / "data" / split)
    attack(replace(TINY, data=str(tmp_path / "data"), trials=8), tmp_path / "run")
    assert (tmp_path / "run" / "private" / "gallery.png").exists()


def noise(count, seed):
    """Colour images of three classes, none like another."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, 32, 32)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % 3
    return Images(
        pixels=pixels, labels=labels, classes=("a", "b", "c"), name="noise", private=False
    )


@pytest.mark.parametrize("known", ["train", "base_data"])
def test_targets_that_the_attacker_has_are_left_out_and_many_are_refused(tmp_path, known):
    said, train, test = [], noise(60, 0), noise(300, 1)
    config = replace(TINY, data=str(tmp_path / "data"))
    if known == "base_data":
        config = replace(config, base_data=str(tmp_path / "base"))
        save_folder(train, tmp_path / "data" / "train")
    has = tmp_path / ("data" if known == "train" else "base") / "train"
    save_folder(test, tmp_path / "data" / "test")
    for count in (3, 4):  # of 300: a hundredth, and more
        shutil.rmtree(has, ignore_errors=True)
        pixels = torch.cat([test.pixels[100 : 100 + count], train.pixels[count:]])
        labels = torch.cat([test.labels[100 : 100 + count], train.labels[count:]])
        save_folder(replace(train, pixels=pixels, labels=labels), has)
        run = Run(tmp_path, said.append)
        if count == 3:
            context = make_context(config, run)
            assert len(context.targets) == 297
            assert not len(overlap(context.targets, context.own))
            assert said == ["the attacker has 3 of the test images: these are left out"]
        else:
            with pytest.raises(DataError, match="4 of the 300 images under attack"):
                make_context(config, run)
