"""The model that an attack or a release is about: what its own directory says of it."""

import shutil

import pytest
from pages import make_run, plant, write

from sfumato.commands.invert import command as invert
from sfumato.commands.release import command as release
from sfumato.config import to_json
from sfumato.reporting import words
from sfumato.reporting.card import read_card
from sfumato.reporting.render import render_page


def attack_on(path, **settings):
    path.mkdir()
    config = invert.Config(mode="non-private", **settings)
    write(path / "config.json", {"verb": "invert", "config": to_json(config)})
    write(path / "done.json", {"data": "digits-train"})
    return path


def test_the_page_of_an_attack_on_a_run_tells_of_that_run(tmp_path):
    target = make_run(tmp_path / "dp", model="group-cnn-small", lr=0.125)
    card = read_card(attack_on(tmp_path / "attack", target=str(target), seed=7, batch_size=64))
    assert words.model_of(card) == "group-cnn-small"
    told = {name: card.settings[name] for name in ("model", "lr", "batch_size", "seed")}
    assert told == {"model": "group-cnn-small", "lr": 0.125, "batch_size": 100, "seed": 7}
    number, about = words.guarantee_words(card)
    assert number == f"ε ≤ {words.round_up(read_card(target).guarantee.epsilon)}"
    assert about == (
        "guaranteed by the target, at δ = 1e-05, for one image added or removed. The attack itself "
        "guarantees nothing."
    )
    assert "tanh-cnn" not in render_page([card], [tmp_path])
    assert about in render_page([card, read_card(target)], [tmp_path, tmp_path])


def test_of_a_network_from_elsewhere_only_what_is_known_is_said(tmp_path):
    given = {"target": "my_net:net", "weights": tmp_path / "a.pt", "data": "faces"}
    card = read_card(attack_on(tmp_path / "attack", **given))
    assert words.model_of(card) == card.settings["model"] == "my_net:net"
    assert card.settings["data"] == "faces"
    assert "lr" not in card.settings
    assert words.guarantee_words(card)[0] == "not known"


def test_a_target_that_was_trained_for_the_attack_shows_its_guarantee_when_asked(tmp_path):
    path = attack_on(tmp_path / "attack")
    assert words.guarantee_words(read_card(path))[0] == "none"
    config = invert.Config(epsilon=3.0, epochs=1, model="scnn")
    write(path / "config.json", {"verb": "invert", "config": to_json(config)})
    target = make_run(tmp_path / "target")
    (path / "private" / "stages").mkdir(parents=True)
    shutil.move(target, path / "private" / "stages" / "target")
    assert words.guarantee_words(read_card(path))[0] == "not shown"
    card = read_card(path, include_private=True)
    assert words.guarantee_words(card)[0].startswith("ε ≤ ")
    assert "attack itself guarantees nothing" in words.guarantee_words(card)[1]
    assert words.model_of(card) == "scnn"


def test_a_target_in_the_private_part_of_another_run_is_not_looked_into(tmp_path):
    plant(make_run(tmp_path / "run"))
    target = make_run(tmp_path / "run" / "private" / "control", model="scnn")
    path = attack_on(tmp_path / "attack", target=str(target))
    assert words.guarantee_words(read_card(path))[0] == "not shown"
    assert words.model_of(read_card(path, include_private=True)) == "scnn"


@pytest.mark.parametrize("given", [True, False])
def test_a_release_lists_how_its_teacher_was_trained(tmp_path, given):
    teacher = make_run(tmp_path / "dp", model="group-cnn-small", lr=0.125)
    config = release.Config(epsilon=4.0, teacher=teacher if given else None, epochs=1)
    path = tmp_path / "release"
    path.mkdir()
    write(path / "config.json", {"verb": "release", "config": to_json(config)})
    settings = read_card(path).settings
    assert settings["epsilon"] == 4.0
    assert (settings["model"], settings["lr"]) == (
        ("group-cnn-small", 0.125) if given else (config.model, config.lr)
    )
