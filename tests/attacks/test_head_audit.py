"""Heads with and without one image: the right law, independent, and close to what is allowed."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from sfumato.attacks.batched_heads import train_primal
from sfumato.attacks.head_audit import add_lone_image, lone_trials
from sfumato.attacks.head_randomness import BLOCK, HeadRandomness, draw_chance
from sfumato.attacks.heads import HeadRecipe, labels_of
from sfumato.errors import ConfigError, DataError

COMMAND = HeadRecipe(classes=3, max_norm=2.0, noise_multiplier=4.0, epochs=16)


def scores(recipe, heads, present, seed=0, d=4):
    features = torch.randn(recipe.images, d, generator=torch.Generator().manual_seed(1))
    x = add_lone_image(features, recipe)
    trials = lone_trials(recipe, x, labels_of(recipe), heads=heads, present=present, seed=seed)
    return torch.cat(list(trials)).double().numpy(), x


def test_the_lone_image_shares_no_coordinate_with_any_other():
    _, x = scores(COMMAND, 1, True)
    assert torch.equal(x[:-1, -1], torch.zeros(2))
    assert torch.equal(x[-1, :-1], torch.zeros(4))


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_head_without_the_image_is_one_that_was_never_given_it(rate):
    recipe = HeadRecipe(
        classes=3, rate=rate, epochs=4, lr=0.5, max_norm=2.0, noise_multiplier=1e-9, init_std=0.01
    )
    found, x = scores(recipe, 3, present=False)
    chance = draw_chance(recipe, x.shape[1], 0, range(0, 1), x)
    masks = None if chance.masks is None else chance.masks[:, :, :-1]
    # By hand: two images in place of three, and the divisor of three.
    small = x[:-1].expand(BLOCK, 2, -1)
    quiet = HeadRandomness(chance.start, masks, chance.normals)
    pair = _divided_by(recipe)
    weights = train_primal(pair, small, labels_of(recipe)[:-1], quiet)
    logits = weights[:, :15].unflatten(1, (3, 5)) @ x[-1] + weights[:, 15:]
    expected = (logits[:, 2] - logits.mean(1))[:3].double().numpy()
    assert np.allclose(found, expected, atol=1e-5)


def _divided_by(recipe):
    """The same recipe with its divisor, for any set of people, and no noise."""

    class Fixed(HeadRecipe):
        divisor = recipe.divisor

    return Fixed(
        classes=3, rate=recipe.rate, epochs=recipe.epochs, lr=recipe.lr, max_norm=recipe.max_norm,
        init_std=recipe.init_std,
    )  # fmt: skip


def test_scores_are_nearly_those_of_the_best_test_there_is():
    # All images in each step: the best test tells apart two Gaussians sqrt(T)/sigma = 1 apart.
    inside, _ = scores(COMMAND, 4000, True)
    outside, _ = scores(COMMAND, 4000, False)
    distance = (inside.mean() - outside.mean()) / outside.std()
    assert 0.85 < distance < math.sqrt(16) / 4 + 0.1
    assert len(set(inside) | set(outside)) == 8000
    assert abs(np.corrcoef(inside, outside)[0, 1]) < 0.1  # no noise is used twice


def test_with_much_noise_nothing_is_left_to_see():
    loud = HeadRecipe(classes=3, max_norm=2.0, noise_multiplier=1000.0, epochs=16)
    inside, outside = scores(loud, 2000, True)[0], scores(loud, 2000, False)[0]
    better = (inside[:, None] > outside).mean()
    assert abs(better - 0.5) < norm.isf(1e-4) / math.sqrt(6 * 2000)


def test_so_many_heads_come_as_were_asked_for_and_the_first_are_always_the_same():
    many, few = scores(COMMAND, 300, True)[0], scores(COMMAND, 10, True)[0]
    assert len(many) == 300
    assert np.array_equal(many[:10], few)


def test_heads_of_two_layers_and_other_numbers_of_images_are_refused():
    recipe = HeadRecipe(classes=3, hidden=4, positive=(1,))
    with pytest.raises(ConfigError, match="linear heads"):
        list(
            lone_trials(recipe, torch.zeros(3, 2), labels_of(recipe), heads=1, present=True, seed=0)
        )
    with pytest.raises(DataError, match="has 3 images, and these are 2"):
        add_lone_image(torch.zeros(2, 4), COMMAND)
