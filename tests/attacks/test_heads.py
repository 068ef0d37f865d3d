import json

import pytest
import torch
from one_head import network

from sfumato.attacks.heads import (
    HeadRecipe,
    accuracy_of_heads,
    class_size_for,
    parameter_name,
    predict,
)
from sfumato.config import dumps, from_json
from sfumato.errors import ConfigError, DataError
from sfumato.privacy.accounting import price

BINARY = HeadRecipe(hidden=8, positive=(1, 3, 5, 7, 9))


@pytest.mark.parametrize(
    ("recipe", "d", "parameters"),
    [
        (HeadRecipe(), 256, 2570),
        (HeadRecipe(), 1280, 12810),
        (BINARY, 256, 2065),
        (HeadRecipe(hidden=8, positive=(0, 1, 8, 9)), 1280, 10257),
    ],
)
def test_heads_have_the_published_sizes(recipe, d, parameters):
    assert recipe.num_parameters(d) == parameters


@pytest.mark.parametrize(
    ("size", "base", "each", "steps"),
    [(1, 26, 6, 32), (4, 26, 6, 50), (1, 38, 10, 48), (4, 38, 10, 78)],
)
def test_epochs_follow_the_published_rule_and_half_the_rate_is_twice_the_steps(
    size, base, each, steps
):
    recipe = HeadRecipe(class_size=size, epochs_base=base, epochs_per_image=each)
    assert recipe.steps == steps
    private = HeadRecipe(class_size=size, epochs_base=base, epochs_per_image=each, rate=0.5)
    assert (private.steps, private.divisor) == (2 * steps, 5 * size)


def test_the_accountant_prices_a_recipe_as_published():
    recipe = HeadRecipe(noise_multiplier=1.82, max_norm=4.0, rate=0.5)
    delta = recipe.images**-1.1
    assert price(recipe.mechanisms(), delta) == pytest.approx(5.0, rel=0.011)
    assert price(recipe.mechanisms(), delta, "replace") == pytest.approx(14.1, rel=0.011)


@pytest.mark.parametrize("recipe", [HeadRecipe(), BINARY])
def test_a_head_says_what_the_module_with_its_parameters_says(recipe):
    weights = torch.randn(3, recipe.num_parameters(6), dtype=torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64)
    for head, logits in zip(weights, predict(weights, recipe, x), strict=True):
        torch.testing.assert_close(logits, network(recipe, 6, head)(x).detach())


@pytest.mark.parametrize("recipe", [HeadRecipe(), BINARY])
def test_accuracy_counts_right_answers_in_groups_as_at_once(recipe, monkeypatch):
    weights, x = torch.randn(7, recipe.num_parameters(6)), torch.randn(40, 6)
    y = torch.arange(40) % 10
    found = accuracy_of_heads(weights, recipe, x, y)
    logits = predict(weights, recipe, x)
    said = logits[..., 0] > 0 if recipe.hidden else logits.argmax(-1)
    truth = y % 2 == 1 if recipe.hidden else y
    torch.testing.assert_close(found, (said == truth).float().mean(1))
    monkeypatch.setattr("sfumato.attacks.heads.LOGIT_BYTES", 1)
    assert torch.equal(accuracy_of_heads(weights, recipe, x, y), found)


def test_coordinates_have_names():
    names = [parameter_name(i, BINARY, 2) for i in (0, 3, 16, 24, 31, 32)]
    assert names[:2] == ["layer 1 weight[0, 0]", "layer 1 weight[1, 1]"]
    assert names[2:] == [
        "layer 1 bias[0]",
        "layer 2 weight[0, 0]",
        "layer 2 weight[0, 7]",
        "layer 2 bias[0]",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": 0}, "classes=0"),
        ({"classes": 1}, "at least 2 classes"),
        ({"class_size": 0}, "class_size=0"),
        ({"epochs": 0}, "raise epochs"),
        ({"lr": 0.0}, "lr=0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"init_std": -1.0}, "init_std=-1"),
        ({"hidden": -1}, "hidden=-1"),
        ({"hidden": 4}, "must name some of the classes"),
        ({"hidden": 4, "positive": (10,)}, "must name some of the classes"),
        ({"hidden": 4, "positive": tuple(range(10))}, "not all"),
        ({"hidden": 4, "positive": (1, 1)}, "twice"),
        ({"positive": (1,)}, "hidden units"),
        ({"rate": 0.0}, "rate=0"),
        ({"max_norm": 0.0}, "max_norm=0"),
        ({"noise_multiplier": 1.0}, "give max_norm"),
        ({"noise_multiplier": -1.0, "max_norm": 1.0}, "noise_multiplier=-1"),
    ],
)
def test_recipes_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        HeadRecipe(**settings)


def test_images_that_classes_cannot_share_are_refused_with_a_number_that_works():
    assert class_size_for(40, 10) == 4
    with pytest.raises(ConfigError, match="Take 40"):
        class_size_for(42, 10)
    with pytest.raises(ConfigError, match="Take 10"):
        class_size_for(3, 10)


def test_a_head_of_another_shape_is_refused_by_its_shape():
    with pytest.raises(DataError, match=r"\(1, 2569\).*2570.*10x256"):
        predict(torch.zeros(1, 2569), HeadRecipe(), torch.zeros(1, 256))


def test_a_recipe_survives_json():
    assert from_json(HeadRecipe, json.loads(dumps(BINARY))) == BINARY
