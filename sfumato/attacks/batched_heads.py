"""Many heads trained side by side: batched products, no autograd, every recipe.

The gradient of a head is small enough to write down. With residual r_i = softmax - one-hot, an
example's gradient is r_i (x) [x_i, 1], so its norm is |r_i| sqrt(|x_i|^2 + 1). Clipping rescales
residuals, Poisson sampling zeroes them, and no example's gradient is ever formed. Two layers have
a hidden residual delta_i and an output residual e_i: the squares of both layers' norms add up.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.attacks.head_randomness import HeadRandomness
from sfumato.attacks.heads import HeadRecipe, split_layers, targets_of

BETAS, ADAM_FLOOR = (0.9, 0.999), 1e-8
"""Adam's usual settings, those of torch.optim."""


@torch.no_grad()
def train_primal(
    recipe: HeadRecipe,
    x: Float[Tensor, "m n d"],
    labels: Int[Tensor, " n"],
    chance: HeadRandomness,
) -> Float[Tensor, "m p"]:
    """Heads trained by `recipe`, the k-th on features `x[k]`, whose classes are `labels`.

    Guarantee: in exact arithmetic, each is what torch.optim's SGD or Adam makes of the gradient
    (sum of the clipped gradients of those present + noise_multiplier * max_norm * normals) /
    `recipe.divisor`; weight decay is added to that. An empty batch is a step of noise alone.
    """
    weights = chance.start.clone()
    targets = _targets(recipe, labels, x)
    squares = x.square().sum(-1) + 1
    moments = _Moments(torch.zeros_like(weights), torch.zeros_like(weights))
    deviation = recipe.noise_multiplier * (recipe.max_norm or 0.0)
    gradient = torch.empty_like(weights)
    for step in range(recipe.steps):
        present = None if chance.masks is None else chance.masks[:, step]
        _write_sum(gradient, weights, recipe, x, targets, squares, present)
        if deviation:
            gradient.add_(chance.normals((weights.shape[1],)), alpha=deviation)
        gradient.div_(recipe.divisor).add_(weights, alpha=recipe.weight_decay)
        if recipe.optimizer == "adam":
            gradient = _adam(gradient, moments, step + 1)
        weights.sub_(gradient, alpha=recipe.lr)
    return weights


@dataclass(frozen=True)
class _Moments:
    first: Tensor
    second: Tensor


def _adam(gradient: Tensor, moments: _Moments, step: int) -> Tensor:
    """The direction of Adam (Kingma & Ba 2015, algorithm 1)."""
    moments.first.lerp_(gradient, 1 - BETAS[0])
    moments.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    scale = moments.second.sqrt().div_(math.sqrt(1 - BETAS[1] ** step)).add_(ADAM_FLOOR)
    return (moments.first / scale).div_(1 - BETAS[0] ** step)


def _targets(
    recipe: HeadRecipe, labels: Int[Tensor, " n"], x: Float[Tensor, "m n d"]
) -> Float[Tensor, "n outputs"]:
    targets = targets_of(recipe, labels.to(x.device))
    rows = targets[:, None] if recipe.hidden else F.one_hot(targets, recipe.classes)
    return rows.to(x.dtype)


def _write_sum(
    gradient: Float[Tensor, "m p"],
    weights: Float[Tensor, "m p"],
    recipe: HeadRecipe,
    x: Float[Tensor, "m n d"],
    targets: Float[Tensor, "n outputs"],
    squares: Float[Tensor, "m n"],
    present: Tensor | None,
) -> None:
    """The sum of clipped gradients of those present, written to `gradient`."""
    layers = split_layers(weights, recipe, x.shape[2])
    places = split_layers(gradient, recipe, x.shape[2])
    weight, bias = layers[0]
    values = torch.baddbmm(bias[:, None], x, weight.mT)
    if not recipe.hidden:
        residual = values.softmax(-1) - targets
        residuals, inputs = [residual], [x]
        norms = residual.square().sum(-1) * squares
    else:
        (top, shift), active = layers[1], values > 0
        values = values * active
        error = torch.baddbmm(shift[:, None], values, top.mT).sigmoid() - targets
        delta = error * top * active
        residuals, inputs = [delta, error], [x, values]
        norms = delta.square().sum(-1) * squares
        norms = norms + error[..., 0].square() * (values.square().sum(-1) + 1)
    factors = head_clip_factors(norms, recipe.max_norm, present)
    for (slope, level), residual, values in zip(places, residuals, inputs, strict=True):
        kept = residual if factors is None else residual * factors[..., None]
        slope.copy_(kept.mT @ values)
        level.copy_(kept.sum(1))


def head_clip_factors(
    squares: Float[Tensor, "*shape"], max_norm: float | None, present: Tensor | None
) -> Float[Tensor, "*shape"] | None:
    """What each example's gradient is multiplied by, from its squared norm; None: nothing.

    Guarantee: 0 for who is not present, otherwise at most 1, and the product's norm is at most
    `max_norm`. A gradient of zero is left alone.
    """
    if max_norm is None:
        return None if present is None else present.to(squares.dtype)
    # 1/0 is infinite, and 1 after the clamp.
    factors = squares.rsqrt().mul_(max_norm).clamp_(max=1.0)
    return factors if present is None else factors.mul_(present)
