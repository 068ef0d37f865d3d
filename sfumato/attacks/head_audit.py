"""Heads with and without one image, by the thousand: the audit of a recipe rather than of a model.

What differential privacy guarantees is about two data sets that differ in one image. So heads are
trained on both, with fresh coins and fresh noise each, and the image is chosen to be the worst
there is: its feature points where no other feature does, and its gradient is as long as the norm
bound from the first step to the last. What it leaves behind lies in one direction of the weights,
beside nothing but noise, and the score of a head is its length along that direction.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.attacks.head_randomness import BLOCK, HeadRandomness, draw_chance
from sfumato.attacks.heads import HeadRecipe, predict
from sfumato.attacks.shadow_heads import train_heads
from sfumato.errors import ConfigError, DataError


def add_lone_image(features: Float[Tensor, "n d"], recipe: HeadRecipe) -> Float[Tensor, "n d2"]:
    """The features of a head's images, the last of which is replaced by one like no other.

    There is one more coordinate, in which all others are 0. The lone image has nothing else, and is
    so long that a head that knows nothing has a gradient of twice the norm bound for it.
    """
    if len(features) != recipe.images:
        raise DataError(
            f"a head of this recipe has {recipe.images} images, and these are {len(features)}."
        )
    residual = math.sqrt(1 - 1 / recipe.classes)
    wide = torch.cat([features, features.new_zeros(len(features), 1)], 1)
    wide[-1] = 0.0
    wide[-1, -1] = 2 * (1.0 if recipe.max_norm is None else recipe.max_norm) / residual
    return wide


def lone_trials(
    recipe: HeadRecipe,
    features: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    *,
    heads: int,
    present: bool,
    seed: int,
) -> Iterator[Float[Tensor, " some"]]:
    """Scores of heads trained with the last image, or without it, some hundred at a time.

    Guarantee: heads are independent of each other, and those of the two kinds are trained by one
    and the same mechanism on neighbouring data sets (add or remove one image): the divisor is the
    public one of the recipe in both. Larger scores speak for the image's presence.
    """
    if recipe.hidden or recipe.optimizer != "sgd":
        raise ConfigError("the many-run audit is for linear heads trained by sgd.")
    for number in range(-(-heads // BLOCK)):
        count = min(BLOCK, heads - number * BLOCK)
        # Odd blocks are one kind's and even ones the other's: no noise is used twice.
        block = 2 * number + present
        chance = draw_chance(recipe, features.shape[1], seed, range(block, block + 1), features)
        if not present:
            chance = _without_last(chance, recipe)
        x = features.expand(BLOCK, *features.shape)
        weights = train_heads(recipe, x, labels, chance)
        logits = predict(weights, recipe, features[-1:])[:, 0]
        # The direction of the gradient of a head that knows nothing.
        yield (logits[:, int(labels[-1])] - logits.mean(1))[:count]


def _without_last(chance: HeadRandomness, recipe: HeadRecipe) -> HeadRandomness:
    """The same chance, but the last image is in no step."""
    masks = chance.masks
    if masks is None:
        shape = (len(chance.start), recipe.steps, recipe.images)
        masks = torch.ones(shape, dtype=torch.bool, device=chance.start.device)
    masks = masks.clone()
    masks[..., -1] = False
    return replace(chance, masks=masks)
