"""What sfumato made from private images does not come back as public: weights and images."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from inversions import save
from releases import make
from releases import tiny as tiny_release
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from warmups import tiny as tiny_warmup
from warmups import warm

from sfumato.commands.origin import require_no_ledger
from sfumato.commands.train import command as train
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.files import read_json, read_lines
from sfumato.lineage import read_tensor_note
from sfumato.privacy.ledger import Ledger
from sfumato.reporting.card import read_card
from sfumato.runs import Run, open_run


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    return train.Config(
        data=save(folder / "own.npz", "0-2"), model="group-cnn-small", device="cpu", steps=3,
        epsilon=2.0, batch_size=40, lr=0.2,
    )  # fmt: skip


def go(config, out):
    with open_run(config, verb="train", out=out) as run:
        return train.run(config, run)


@pytest.fixture(scope="module")
def first(settings, tmp_path_factory):
    """A run at epsilon 2."""
    out = tmp_path_factory.mktemp("runs") / "first"
    go(settings, out)
    return out


def book(run):
    return Ledger.from_records(read_lines(run / "ledger.jsonl"))


def test_weights_that_learnt_the_same_data_bring_their_ledger_along(settings, first, tmp_path):
    config = replace(settings, weights=first / "model.safetensors", epsilon=3.0)
    summary = go(config, tmp_path / "second")
    both = book(tmp_path / "second")
    assert {release.ledger for release in both.releases} == {book(first).header.id, both.header.id}
    assert len(both.releases) == 6
    # The budget is for both, so the later steps have more noise than alone they would need.
    assert summary["epsilon"] == both.epsilon() <= 3
    assert book(first).epsilon() > 1.9
    go(replace(settings, epsilon=3.0), tmp_path / "alone")
    noise = {release.ledger: release.noise_multiplier for release in both.releases}
    alone = book(tmp_path / "alone").releases[0].noise_multiplier
    assert noise[both.header.id] > 1.05 * alone
    assert "model.safetensors" not in both.header.public


def test_a_run_with_such_weights_that_was_cut_goes_on(settings, first, tmp_path, monkeypatch):
    config = replace(settings, weights=first / "model.safetensors", epsilon=3.0)
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.training.fit.TrainState.advance", interrupt_after(1))
        with pytest.raises(KeyboardInterrupt):
            go(config, tmp_path / "run")
    go(config, tmp_path / "run")
    found = book(tmp_path / "run")
    assert len(found.releases) == 6
    assert found.epsilon() <= 3


def interrupt_after(steps):
    from sfumato.training.fit import TrainState

    real = TrainState.advance

    def advance(train_state):
        if train_state.step == steps:
            raise KeyboardInterrupt
        real(train_state)

    return advance


def test_a_budget_that_such_weights_have_spent_is_refused(settings, first, tmp_path):
    config = replace(settings, weights=first / "model.safetensors", epsilon=1.5)
    with pytest.raises(
        PrivacyError, match=r"own-train under epsilon 2 already, and --epsilon 1\.5"
    ):
        go(config, tmp_path / "run")


def test_weights_that_learnt_the_same_data_without_privacy_guarantee_nothing(settings, tmp_path):
    plain = replace(settings, mode="non-private", epsilon=None)
    go(plain, tmp_path / "plain")
    again = replace(settings, weights=tmp_path / "plain/model.safetensors")
    with pytest.raises(PrivacyError, match="own-train without privacy"):
        go(again, tmp_path / "run")
    go(replace(plain, weights=tmp_path / "plain/model.safetensors"), tmp_path / "more")


def test_weights_that_learnt_other_data_are_public_and_the_ledger_says_so(
    settings, first, tmp_path
):
    other = replace(settings, data=save(tmp_path / "other.npz", "3-5"))
    go(replace(other, weights=first / "model.safetensors"), tmp_path / "run")
    found = book(tmp_path / "run")
    assert len(found.releases) == 3
    named = f"the weights that training began with ({first.name}/model.safetensors)"
    assert found.header.public.endswith(f", and {named}")


def test_a_warm_up_on_a_share_of_the_data_is_no_start_for_all_of_it(settings, tmp_path):
    config = tiny_warmup(tmp_path, number=0, epsilon=8.0)
    warm(config, tmp_path / "warm")
    for stage in ("warmup", "train"):
        weights = tmp_path / f"warm/stages/{stage}/model.safetensors"
        if stage == "train":  # a copy is known as well
            weights = Path(shutil.copy(weights, tmp_path))
        begun = replace(settings, data=config.data, weights=weights, epsilon=20.0)
        with pytest.raises(PrivacyError, match=r"a public share of .*sfumato warmup train --out"):
            go(begun, tmp_path / "run")
        with pytest.raises(PrivacyError, match="a public share"):
            warm(replace(config, weights=weights, seed=5), tmp_path / "other")
    weights = tmp_path / "warm/stages/warmup/model.safetensors"
    other = replace(settings, weights=weights)
    assert go(other, tmp_path / "elsewhere")["epsilon"] <= 2


def without_ledger(run):
    """Make it a run on the same data that keeps none, as those of sfumato reconstruct."""
    record = read_json(run / "config.json")
    (run / "config.json").write_text(json.dumps({**record, "verb": "reconstruct"}))
    for name in ("ledger.jsonl", "model.safetensors"):
        (run / name).unlink()


@pytest.mark.parametrize("place", ["private/students", "stages/base"])
@pytest.mark.parametrize("copied", [False, True])
def test_weights_of_a_run_on_the_data_need_a_ledger(settings, first, tmp_path, place, copied):
    run = shutil.copytree(first, tmp_path / "run")
    (run / place).mkdir(parents=True)
    state = load_file(run / "model.safetensors")
    if place.startswith("stages"):
        without_ledger(run)
    weights = Run(run / place).save_tensors("net.safetensors", state)
    weights = Path(shutil.copy(weights, tmp_path)) if copied else weights
    begun = replace(settings, weights=weights, epsilon=20.0)
    with pytest.raises(PrivacyError, match="no ledger says what it cost"):
        go(begun, tmp_path / "next")
    other = replace(begun, data=save(tmp_path / "other.npz", "3-5"))
    assert go(other, tmp_path / "other")["epsilon"] <= 20


def linked(place, folder):
    (folder / "link.safetensors").symlink_to(place)
    return folder / "link.safetensors"


def copied(place, folder):
    return Path(shutil.copy(place, folder))


def copied_without_a_note(place, folder):
    """Re-saved in a folder with the ledger alone."""
    run = folder / "run"
    run.mkdir()
    shutil.copy(place.with_name("ledger.jsonl"), run)
    save_file(load_file(place), run / "model.safetensors")
    return linked(run / "model.safetensors", folder)


@pytest.mark.filterwarnings("ignore:.* cannot be checked")
@pytest.mark.parametrize("reach", [linked, copied, copied_without_a_note])
def test_weights_are_known_wherever_they_are_reached(settings, first, tmp_path, reach):
    weights = reach(first / "model.safetensors", tmp_path)
    go(replace(settings, weights=weights, epsilon=3.0), tmp_path / "second")
    assert len(book(tmp_path / "second").releases) == 6
    with pytest.raises(PrivacyError, match="own-train under epsilon 2 already"):
        go(replace(settings, weights=weights, epsilon=1.5), tmp_path / "third")


def test_data_are_known_by_a_link_to_them(settings, first, tmp_path):
    (tmp_path / "link.npz").symlink_to(settings.data)
    config = replace(settings, data=str(tmp_path / "link.npz"), epsilon=3.0)
    go(replace(config, weights=first / "model.safetensors"), tmp_path / "second")
    assert len(book(tmp_path / "second").releases) == 6


def test_data_of_another_name_are_known_by_weights_in_their_run(settings, first, tmp_path):
    shutil.copy(settings.data, tmp_path / "renamed.npz")
    config = replace(settings, data=str(tmp_path / "renamed.npz"), epsilon=3.0)
    go(replace(config, weights=first / "model.safetensors"), tmp_path / "second")
    assert len(book(tmp_path / "second").releases) == 6


def test_what_weights_began_with_is_remembered_through_other_data(settings, first, tmp_path):
    other = replace(settings, data=save(tmp_path / "other.npz", "3-5"))
    go(replace(other, weights=first / "model.safetensors"), tmp_path / "between")
    weights = shutil.move(tmp_path / "between/model.safetensors", tmp_path)
    go(replace(settings, weights=Path(weights), epsilon=3.0), tmp_path / "back")
    both = book(tmp_path / "back")
    assert {release.ledger for release in both.releases} == {book(first).header.id, both.header.id}


def test_what_weights_began_with_is_remembered_through_several_runs(settings, first, tmp_path):
    weights = first / "model.safetensors"
    for name, classes in (("other", "3-5"), ("third", "6-8"), ("fourth", "7-9")):
        data = save(tmp_path / f"{name}.npz", classes)
        go(replace(settings, data=data, weights=weights, steps=1), tmp_path / name)
        weights = Path(shutil.copy(tmp_path / name / "model.safetensors", tmp_path / f"{name}.st"))
        weights = weights.rename(weights.with_suffix(".safetensors"))
        shutil.rmtree(tmp_path / name)
    go(replace(settings, weights=weights, epsilon=3.0), tmp_path / "back")
    both = book(tmp_path / "back")
    assert {release.ledger for release in both.releases} == {book(first).header.id, both.header.id}


def test_a_start_that_no_ledger_speaks_of_is_remembered_through_other_data(
    settings, first, tmp_path
):
    run = shutil.copytree(first, tmp_path / "run")
    state = load_file(run / "model.safetensors")
    without_ledger(run)
    (run / "stages/base").mkdir(parents=True)
    weights = Run(run / "stages/base").save_tensors("net.safetensors", state)
    other = replace(settings, data=save(tmp_path / "other.npz", "3-5"), steps=1)
    go(replace(other, weights=weights), tmp_path / "between")
    shutil.rmtree(run)
    begun = replace(settings, weights=tmp_path / "between/model.safetensors", epsilon=20.0)
    with pytest.raises(PrivacyError, match="no ledger says what it cost"):
        go(begun, tmp_path / "back")


@pytest.mark.parametrize("copied", [False, True])
def test_weights_in_the_private_folder_of_a_warm_up_are_no_start(settings, first, tmp_path, copied):
    # All of the data is private there, so no share of it is in the way.
    config = tiny_warmup(tmp_path, data=settings.data, public_share=None, public_images="digits")
    with open_run(config, verb="warmup", out=tmp_path / "warm") as run:
        place = run.stage("evaluate").private / "scratch"
        place.mkdir()
        state = load_file(first / "model.safetensors")
        weights = Run(place).save_tensors("net.safetensors", state)
    weights = Path(shutil.copy(weights, tmp_path)) if copied else weights
    begun = replace(settings, weights=weights, epsilon=20.0)
    with pytest.raises(PrivacyError, match="no ledger says what it cost"):
        go(begun, tmp_path / "next")
    other = replace(begun, data=save(tmp_path / "other.npz", "3-5"), steps=1)
    assert go(other, tmp_path / "other")["epsilon"] <= 20


@pytest.mark.parametrize("place", ["private", "private/students/plain", "stages/x/private/y"])
def test_weights_in_a_private_folder_may_have_learnt_what_their_run_began_with(
    settings, first, tmp_path, place
):
    other = replace(settings, data=save(tmp_path / "other.npz", "3-5"), steps=1)
    go(replace(other, weights=first / "model.safetensors"), tmp_path / "run")
    (tmp_path / "run" / place).mkdir(parents=True, exist_ok=True)
    state = load_file(tmp_path / "run/model.safetensors")
    weights = Run(tmp_path / "run" / place).save_tensors("net.safetensors", state)
    for lying in (weights, Path(shutil.copy(weights, tmp_path))):
        with pytest.raises(PrivacyError, match="no ledger says what it cost"):
            go(replace(settings, weights=lying, epsilon=20.0), tmp_path / "back")


def test_weights_of_other_data_and_of_nobody_are_spoken_of(settings, first, tmp_path):
    other = replace(settings, data=save(tmp_path / "other.npz", "3-5"), steps=1)
    go(replace(other, weights=first / "model.safetensors"), tmp_path / "run")
    said = (tmp_path / "run/log.txt").read_text()
    assert "was trained on own-train, which is treated as other data than other-train" in said
    torch.save(load_file(first / "model.safetensors"), tmp_path / "saved.pt")
    go(replace(other, weights=tmp_path / "saved.pt"), tmp_path / "next")
    assert "saved.pt does not say what it was trained on" in (tmp_path / "next/log.txt").read_text()
    go(replace(settings, weights=first / "model.safetensors", epsilon=3.0), tmp_path / "same")
    assert "treated as other data" not in (tmp_path / "same/log.txt").read_text()


def test_a_model_says_what_it_guarantees_and_nothing_of_images(first):
    with safe_open(first / "model.safetensors", framework="pt") as file:
        notes = file.metadata()
    guarantee = json.loads(notes["promise"])
    assert guarantee["epsilon"] == book(first).epsilon()
    assert guarantee["data"] == "own-train"
    origin = read_tensor_note(first / "model.safetensors")
    assert origin is not None
    assert origin.lines == read_lines(first / "ledger.jsonl")
    assert set(json.loads(notes["sfumato"])) == {
        "verb", "data", "public_share", "private", "ledger", "start", "tensors"
    }  # fmt: skip


def test_some_classes_of_the_data_are_the_data(settings, tmp_path):
    part = replace(settings, data=f"{settings.data}@0,1", steps=1)
    go(part, tmp_path / "part")
    both = replace(settings, weights=tmp_path / "part/model.safetensors", epsilon=3.0, steps=1)
    go(replace(both, data=f"{settings.data}@1,0"), tmp_path / "both")
    assert len(book(tmp_path / "both").releases) == 2


def test_a_release_does_not_begin_with_weights_that_learnt_its_data(settings, first, tmp_path):
    config = tiny_release(
        tmp_path, data=settings.data, weights=first / "model.safetensors", epsilon=8.0,
        noise_multiplier=None,
    )  # fmt: skip
    with pytest.raises(PrivacyError, match="trained on own-train, and here it would count"):
        make(config, tmp_path / "run")


def test_steps_of_the_weights_are_not_those_of_the_plan(settings, first, tmp_path, monkeypatch):
    config = replace(settings, weights=first / "model.safetensors", epsilon=3.0)
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.training.fit.TrainState.advance", interrupt_after(1))
        with pytest.raises(KeyboardInterrupt):
            go(config, tmp_path / "run")
    log = (tmp_path / "run/log.txt").read_text()
    assert "beginning again" not in log
    card = read_card(tmp_path / "run")
    assert card.steps == (2, 3)
    assert card.guarantee.planned == pytest.approx(3.0, rel=0.01)
    assert card.guarantee.epsilon < card.guarantee.planned


def test_a_warm_up_does_not_begin_with_weights_that_learnt_its_data(settings, first, tmp_path):
    config = tiny_warmup(
        tmp_path, data=settings.data, weights=first / "model.safetensors", epsilon=8.0
    )
    with pytest.raises(PrivacyError, match="trained on own-train, and here it would count"):
        warm(config, tmp_path / "run")


@pytest.fixture
def paid(settings, tmp_path):
    """Images that were made from the private ones: drawn, with a note, and as a bundle."""
    with np.load(settings.data) as file:
        arrays = {name: 255 - file[name] if name[0] == "x" else file[name] for name in file}
    note = json.dumps({"epsilon": 9.5, "data": "own-train"})
    np.savez(tmp_path / "drawn.npz", **arrays, note=note)
    (tmp_path / "bundle").mkdir()
    np.savez(tmp_path / "bundle/images.npz", **arrays)
    return tmp_path


@pytest.mark.parametrize(
    "source", ["drawn.npz", "bundle/images.npz", "bundle", "bundle/stages/match/images.npz"]
)
def test_images_that_a_ledger_paid_for_are_not_public(settings, first, paid, source):
    (paid / "bundle/ledger.jsonl").write_bytes((first / "ledger.jsonl").read_bytes())
    (paid / "bundle/stages/match").mkdir(parents=True)
    shutil.copy(paid / "bundle/images.npz", paid / "bundle/stages/match")
    with pytest.raises(PrivacyError, match=r"made from own-train under epsilon (9\.5|2)"):
        require_no_ledger(paid / source, "own-train-without-4%")
    require_no_ledger(paid / source, "other-train")


def test_every_verb_that_takes_public_images_asks_who_paid(settings, paid, tmp_path):
    drawn = str(paid / "drawn.npz")
    with pytest.raises(PrivacyError, match=r"made from own-train under epsilon 9\.5"):
        go(replace(settings, extender="dope", extender_images=drawn), tmp_path / "train")
    release = tiny_release(tmp_path, data=settings.data, public=drawn)
    with pytest.raises(PrivacyError, match=r"made from own-train under epsilon 9\.5"):
        make(release, tmp_path / "release")
    for changes in ({"samples": Path(drawn)}, {"public_images": drawn, "public_share": None}):
        config = tiny_warmup(tmp_path, **{"data": settings.data, **changes})
        with pytest.raises(PrivacyError, match=r"made from own-train under epsilon 9\.5"):
            warm(config, tmp_path / "warmup")


def test_public_weights_before_a_private_run_are_no_reason_to_refuse_what_comes_after(
    settings, tmp_path
):
    others = replace(
        settings, data=save(tmp_path / "others.npz", "3-5"), mode="non-private", epsilon=None
    )
    go(others, tmp_path / "public")
    private = replace(settings, weights=tmp_path / "public/model.safetensors")
    go(private, tmp_path / "private")
    again = replace(settings, weights=tmp_path / "private/model.safetensors", epsilon=3.0)
    summary = go(again, tmp_path / "again")
    assert summary["epsilon"] <= 3
    assert len(book(tmp_path / "again").releases) == 6


def test_a_note_that_is_damaged_is_said_in_words(first, tmp_path):
    state = load_file(first / "model.safetensors")
    for number, note in enumerate(["{", '{"verb": 3}']):
        save_file(state, tmp_path / f"{number}.safetensors", {"sfumato": note})
        with pytest.raises(DataError, match="its note of where it comes from is damaged"):
            read_tensor_note(tmp_path / f"{number}.safetensors")


def test_weights_that_are_not_there_are_refused_before_anything_is_said_of_them(
    settings, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "sfumato.commands.train.command.load_splits", None
    )  # and before images are read
    for mode in (settings.mode, "non-private"):
        plain = {"epsilon": None} if mode == "non-private" else {}
        config = replace(settings, weights=tmp_path / "nofile.pt", mode=mode, **plain)
        with pytest.raises(ConfigError, match=r"--weights .*nofile\.pt"):
            go(config, tmp_path / mode)
    assert "public" not in "".join(capsys.readouterr())
