"""A generator stops when it brings nothing better, and weights that copy are not kept."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from cuts import cut_in

from sfumato.data.images import Images
from sfumato.diffusion import generator
from sfumato.diffusion.generator import new_denoiser, new_train_state, train_generator
from sfumato.diffusion.generator_data import (
    SHOWN,
    GeneratorData,
    copies_too_much,
    evaluate_denoiser,
    score_of,
)
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.runs import Run
from sfumato.settings.diffusion import Diffusion
from sfumato.training.progress import progress

CPU = torch.device("cpu")


def grey(values, spread=0.0, seed=0):
    """Images of 8 pixels a side, each of one grey, or nearly so."""
    change = torch.randn(len(values), 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    found = torch.tensor(values)[:, None, None, None] + spread * change
    return found.round().clamp(0, 255).to(torch.uint8)


def images_of(pixels, labels, name="public", private=False):
    return Images(
        pixels=pixels, labels=torch.tensor(labels), classes=("dark", "bright"), name=name,
        private=private,
    )  # fmt: skip


def generator_data_of(dark, bright, held_out, held_out_labels):
    """Dark images under one label and bright ones under the other."""
    trained_on = images_of(torch.cat([dark, bright]), [0] * len(dark) + [1] * len(bright))
    return GeneratorData(trained_on, images_of(held_out, held_out_labels), CPU)


NEVER_BETTER = generator_data_of(
    grey([60] * 20, 20), grey([120] * 20, 20), grey([200, 30] * 10, 20, seed=1), [0, 1] * 10
)
"""What is trained here makes the held-out images ever harder to denoise."""
ONE_BY_HEART = generator_data_of(
    grey([0] * 20), grey([160] * 20, 40), grey([160] * 20, 40, seed=1), [1] * 20
)
"""What is trained here helps the held-out images, and all samples of one class are one image."""
ALL_BY_HEART = generator_data_of(grey([0]), grey([255]), grey([90, 165] * 10), [0, 1] * 10)


def train(data, folder, **changes):
    settings = Diffusion(
        **{
            "gen_width": 8, "gen_multipliers": (1,), "gen_blocks": 1, "gen_dropout": 0.0,
            "gen_images": 320, "gen_batch": 16, "gen_lr": 1e-2, "gen_ramp": 16, "gen_moves": 0.0,
            "gen_half_life": 16, "gen_looks": 10, "gen_patience": 0, **changes,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    train_state = new_train_state(new_denoiser(settings, (1, 8, 8), 2), settings, CPU)
    told = []
    made = train_generator(train_state, data, settings, Run(folder, told.append))
    return train_state, made, "\n".join(told)


def test_a_batch_in_pieces_is_learnt_from_as_a_whole_one_is(tmp_path, monkeypatch):
    changes = {"gen_batch": 48, "gen_images": 96, "gen_moves": 0.5}
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    whole, _, _ = train(NEVER_BETTER, tmp_path / "whole", **changes)
    monkeypatch.setattr(generator, "AT_ONCE", 20)
    pieces, _, _ = train(NEVER_BETTER, tmp_path / "pieces", **changes)
    one, other = (train_state.denoiser.state_dict() for train_state in (whole, pieces))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=1e-5, msg=name)


def test_a_batch_of_more_than_all_images_is_refused():
    with pytest.raises(ConfigError, match=r"gen_batch=512 is more than .* gen_images=100"):
        Diffusion(gen_images=100)


def test_a_gpu_that_is_too_small_is_said_in_words(monkeypatch, tmp_path):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generator, "accumulate_gradient", full)
    with pytest.raises(ConfigError, match=r"--gen-batch 16 and --gen-width 8\. Lower one"):
        train(NEVER_BETTER, tmp_path)


def losses(train_state):
    return [found["held_out_loss"] for found in train_state.looks]


def test_patience_stops_it_early_and_the_best_weights_are_kept(tmp_path):
    train_state, made, log = train(NEVER_BETTER, tmp_path, gen_patience=3)
    assert [found["images"] for found in train_state.looks] == [32, 64, 96, 128]
    assert (
        min(losses(train_state)) == losses(train_state)[0] == train_state.best_look["held_out_loss"]
    )
    assert (
        "stopped after 128 images: 3 looks brought nothing better than the weights after 32," in log
    )
    found, _ = evaluate_denoiser(made, NEVER_BETTER, torch.float32)
    assert found["held_out_loss"] == pytest.approx(train_state.best_look["held_out_loss"])


def test_copies_stop_it_early_though_held_out_images_are_denoised_better(tmp_path):
    slowly = {"gen_batch": 32, "gen_images": 1600, "gen_lr": 5e-3, "gen_half_life": 100}
    train_state, made, log = train(ONE_BY_HEART, tmp_path, gen_patience=2, gen_looks=5, **slowly)
    judged = list(map(copies_too_much, train_state.looks))
    assert judged in ([False, True, True], [False, False, True, True])
    assert losses(train_state) == sorted(losses(train_state), reverse=True), (
        "by the loss it would go on"
    )
    assert train_state.best_look is train_state.looks[-3]
    assert log.count("too many, so it learns by heart, and this look does not count") == 2
    assert f"stopped after {train_state.looks[-1]['images']} images" in log
    assert "WARNING" not in log
    found, shown = evaluate_denoiser(made, ONE_BY_HEART, torch.float32)
    assert not copies_too_much(found)
    assert len(shown) == 2 * SHOWN


def test_if_every_look_copies_the_fewest_copies_are_kept_and_that_is_said(tmp_path):
    train_state, made, log = train(ALL_BY_HEART, tmp_path, gen_looks=5)
    assert all(map(copies_too_much, train_state.looks))
    copies = [found["copies"] for found in train_state.looks]
    assert train_state.best_look["copies"] == min(copies)
    assert train_state.best_look["held_out_loss"] > min(losses(train_state))
    assert "WARNING: this generator COPIES the images it was trained on, at every look" in log
    assert "after 64 images" in log
    found, _ = evaluate_denoiser(made, ALL_BY_HEART, torch.float32)
    assert found["copies"] == min(copies)


def test_private_images_are_in_no_album():
    fine = images_of(grey([0, 255]), [0, 1])
    secret = images_of(grey([0, 255]), [0, 1], "faces", private=True)
    for trained_on, unseen in ((secret, fine), (fine, secret)):
        with pytest.raises(PrivacyError, match='training a generator would read "faces"'):
            GeneratorData(trained_on, unseen, CPU)


def test_what_is_held_out_must_be_like_what_is_learnt():
    fine = images_of(grey([0, 255]), [0, 1])
    for other in (replace(fine, classes=("a", "b")), replace(fine, pixels=fine.pixels[..., :6])):
        with pytest.raises(DataError, match="differ in size or classes"):
            GeneratorData(fine, other, CPU)
    with pytest.raises(DataError, match='"public" is empty'):
        GeneratorData(fine, fine.select([]), CPU)


def test_what_copies_is_worth_less_than_what_does_not():
    def seen(loss, copies, held_out=0.0):
        return {"held_out_loss": loss, "copies": copies, "held_out_copies": held_out}

    order = [seen(0.5, 0.9), seen(0.1, 0.2), seen(0.9, 0.1), seen(0.8, 0.5, 0.45), seen(0.7, 0.0)]
    assert sorted(order, key=score_of) == order
    assert [copies_too_much(found) for found in order] == [True, True, False, False, False]


def test_it_says_how_far_it_is_and_where_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "progress", partial(progress, seconds=0.0))
    with cut_in("sfumato.diffusion.generator:accumulate_gradient", 5):
        train(ALL_BY_HEART, tmp_path, gen_looks=5)
    _, _, told = train(ALL_BY_HEART, tmp_path, gen_looks=5)
    assert told.startswith("going on after 64 images\n")
    assert re.search(r"\nstep 5/20  \d+ s left  \d\S* images/s\n", told)
