"""A function that trains, called again and again: memory is found, noise is not taken for it."""

import math

import pytest
import torch
from audits import noise_images
from torch import nn

import sfumato
from sfumato.attacks.retraining_audit import (
    audit_trainer,
    run_trial,
    set_canary_aside,
    split_trials,
)
from sfumato.errors import ConfigError, DataError


def pictures(count=30):
    return noise_images(count, size=2)


def memoriser(strength):
    """Says of an image it was given its label, `strength` times as loud as the noise of a run."""

    def train(images):
        noise = torch.randn(3)

        def answer(pixels):
            x = pixels[0] * 255
            same = [int(y) for p, y in zip(images.pixels, images.labels, strict=True)
                    if torch.equal(p.float(), x)]  # fmt: skip
            logits = noise.clone()
            for label in same:
                logits[label] += strength
            return logits[None]

        return answer

    return train


def test_a_trainer_that_remembers_is_caught():
    bound = sfumato.audit_trainer(memoriser(30.0), pictures(), runs=100)
    assert 1.8 < bound.epsilon < 2.6  # all of 50 against all of 50
    assert bound.confidence == 0.95
    assert bound.relation == "add-or-remove"
    assert "fresh chance" in bound.assumes


def test_a_trainer_that_ignores_the_image_is_not():
    found = [audit_trainer(memoriser(0.0), pictures(), runs=40, seed=s).epsilon for s in range(20)]
    assert sum(value > 0 for value in found) <= 4  # at most 5 % of bounds are wrong; here 20


def test_the_canary_is_one_of_the_images_with_a_label_that_is_not_its_own():
    images = pictures()
    rest, canary = set_canary_aside(images, seed=3)
    assert len(rest) == 29
    (place,) = [i for i in range(30) if torch.equal(images.pixels[i], canary.pixels[0])]
    assert int(canary.labels[0]) != int(images.labels[place])
    seen = []

    def train(data):
        seen.append(len(data))
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    scores = [run_trial(train, rest, canary, number, seed=0) for number in (0, 1, 2, 0)]
    assert seen == [29, 30, 29, 29]
    assert scores[0] == scores[3] != scores[2]  # a trial is a function of its number


def test_runs_that_are_all_the_same_prove_nothing_and_say_why():
    def train(images):
        torch.manual_seed(0)
        return memoriser(30.0)(images)

    calls = []
    with pytest.raises(DataError, match="fresh one in each call"):
        audit_trainer(lambda images: calls.append(1) or train(images), pictures(), runs=200)
    assert len(calls) == 10


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (3, "gave a int"),
        (lambda _: torch.zeros(1, 2), r"\(1, 2\) for one image"),
        (lambda _: "cat", "str for one image"),
    ],
)
def test_what_is_no_model_is_named(made, message):
    with pytest.raises(DataError, match=message):
        audit_trainer(lambda _: made, pictures(), runs=20)


def broken(_):
    return lambda _: torch.full((1, 3), torch.nan)


def test_a_model_that_broke_is_a_trial_that_says_no():
    rest, canary = set_canary_aside(pictures(), 0)
    found = run_trial(broken, rest, canary, 1, 0)
    assert math.isnan(found)
    assert split_trials({1: found, 0: 2.0, 3: 1.0}) == ([-math.inf, 1.0], [2.0])


def test_models_that_all_broke_are_not_taken_for_equal_ones():
    calls = []
    with pytest.raises(DataError, match="all 2 calls so far answered NaN"):
        audit_trainer(lambda images: calls.append(1) or broken(images), pictures(), runs=20)
    assert len(calls) == 2


@pytest.mark.parametrize("runs", [0, 10, 21])
def test_too_few_or_unpaired_runs_are_refused(runs):
    with pytest.raises(ConfigError, match="even number"):
        audit_trainer(memoriser(1.0), pictures(), runs=runs)
