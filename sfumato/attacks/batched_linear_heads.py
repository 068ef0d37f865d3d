"""Linear heads by their logits: the numbers of `batched_heads`, many times faster.

A linear head under SGD never leaves W_0 + span of its N inputs + noise. So it is enough to follow
its logits L (K x N) and the coefficients A (K x N) of its inputs. With G = X X^T + 1 (the 1 is
the bias), a = 1 - lr * weight_decay, B the divisor, D_t the clipped residuals of those present and
Z_t the noise of step t, of deviation sigma * C:

    L_0 = W_0 X~^T    L <- a L - (lr/B) (D_t G + Z_t X~^T)    A <- a A + D_t
    W_T = a^T W_0 - (lr/B) (A X~ + sum_t a^(T-1-t) Z_t)

Of the noise only Z_t X~^T matters on the way, and one sum at the end: N K normals a step instead
of d K. Letters: m heads, n inputs, k classes, d features, t steps.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from sfumato.attacks.batched_heads import head_clip_factors
from sfumato.attacks.head_randomness import HeadRandomness, Normals
from sfumato.attacks.heads import HeadRecipe, split_layers


@dataclass(frozen=True)
class Noise:
    """What the dual needs of the noise of all steps, before it is scaled to its deviation."""

    seen: Float[Tensor, "m t k n"]
    """Z_t X~^T: what the inputs see of each step's noise."""
    total: Float[Tensor, "m p"]
    """sum_t a^(T-1-t) Z_t."""


def can_use_dual(recipe: HeadRecipe) -> bool:
    """Whether the dual gives the heads of this recipe: linear ones, by SGD."""
    return not recipe.hidden and recipe.optimizer == "sgd"


@torch.no_grad()
def train_dual(
    recipe: HeadRecipe,
    x: Float[Tensor, "m n d"],
    labels: Int[Tensor, " n"],
    chance: HeadRandomness,
) -> Float[Tensor, "m p"]:
    """What `train_primal` returns, for recipes that `can_use_dual`.

    Guarantee: without noise the same numbers, but for rounding; with noise the same distribution,
    from N K (T + 1) + P normals a head in place of P T.
    """
    noise = draw_noise(recipe, x, chance.normals) if recipe.noise_multiplier else None
    return run_recursion(recipe, x, labels, chance.start, chance.masks, noise)


@torch.no_grad()
def run_recursion(
    recipe: HeadRecipe,
    x: Float[Tensor, "m n d"],
    labels: Int[Tensor, " n"],
    start: Float[Tensor, "m p"],
    masks: Bool[Tensor, "m t n"] | None,
    noise: Noise | None,
) -> Float[Tensor, "m p"]:
    """The recursion itself, with chance given.

    Guarantee: with `gather_noise` of the primal's noise these are the primal's heads, but for
    rounding. The means and duplicates of inputs need no care here: G is never inverted.
    """
    assert can_use_dual(recipe)
    (weight, bias), *_ = split_layers(start, recipe, x.shape[2])
    gram = _gram(x)
    squares = gram.diagonal(dim1=1, dim2=2)[:, None]
    target = F.one_hot(labels.to(x.device), recipe.classes).mT.to(x.dtype)
    logits = weight @ x.mT + bias[..., None]
    residual, sums = torch.empty_like(logits), torch.zeros_like(logits)
    keep, pace = 1 - recipe.lr * recipe.weight_decay, -recipe.lr / recipe.divisor
    scale = recipe.noise_multiplier * (recipe.max_norm or 0.0)
    for step in range(recipe.steps):
        _softmax(logits, residual)
        residual.sub_(target)
        present = None if masks is None else masks[:, step, None]
        if recipe.max_norm is not None or present is not None:
            norms = residual.square().sum(1, keepdim=True).mul_(squares)
            factors = head_clip_factors(norms, recipe.max_norm, present)
            assert factors is not None
            residual.mul_(factors)
        torch.baddbmm(logits, residual, gram, beta=keep, alpha=pace, out=logits)
        torch.add(residual, sums, alpha=keep, out=sums)
        if noise is not None:
            logits.add_(noise.seen[:, step], alpha=pace * scale)
    weights = start * keep**recipe.steps
    if noise is not None:
        weights.add_(noise.total, alpha=pace * scale)
    return _add_inputs(weights, sums.mul_(pace), recipe, x)


@torch.no_grad()
def draw_noise(recipe: HeadRecipe, x: Float[Tensor, "m n d"], normals: Normals) -> Noise:
    """Noise with the distribution that `gather_noise` gives, drawn without the steps.

    With G = C C^T, Z_t X~^T is xi_t C^T for standard normals xi_t. They fix the part of the total
    that lies in the span of the inputs, (sum_t a^(T-1-t) xi_t) C^-1 X~; the rest is one Gaussian
    of variance sum_t a^(2t), less its own part in that span. C and that span are found in float64,
    so that directions in which inputs hardly differ keep their noise.
    """
    m, n, _ = x.shape
    wide = x.double()
    factor = _factor(wide)
    ways = normals((recipe.steps, recipe.classes, n))
    seen = ways.view(m, -1, n) @ factor.mT.to(x.dtype)
    decay = _decay(recipe, x)
    along = (decay @ ways.flatten(2)).view(m, recipe.classes, n).double()
    free = normals((recipe.num_parameters(x.shape[2]),)).mul_(decay.norm())
    (weight, bias), *_ = split_layers(free, recipe, x.shape[2])
    # Inputs see (free X~^T) of the free Gaussian: its coefficients in the span are that G^-1.
    across = (weight @ x.mT + bias[..., None]).double()
    across = torch.linalg.solve_triangular(factor, across.mT, upper=False).mT
    coefficients = torch.linalg.solve_triangular(factor.mT, (along - across).mT, upper=True).mT
    total = _add_inputs(free, coefficients, recipe, wide)
    return Noise(seen.view_as(ways), total)


@torch.no_grad()
def gather_noise(
    recipe: HeadRecipe, x: Float[Tensor, "m n d"], steps: Float[Tensor, "t m p"]
) -> Noise:
    """What the dual needs to know of the noise that the primal adds, before its deviation."""
    seen = []
    for normals in steps:
        (weight, bias), *_ = split_layers(normals, recipe, x.shape[2])
        seen.append(weight @ x.mT + bias[..., None])
    return Noise(torch.stack(seen, 1), torch.einsum("t,tmp->mp", _decay(recipe, x), steps))


def _gram(x: Float[Tensor, "m n d"]) -> Float[Tensor, "m n n"]:
    return (x @ x.mT).add_(1)


def _factor(x: Float64[Tensor, "m n d"]) -> Float64[Tensor, "m n n"]:
    """The Cholesky factor of G, with a ridge just above rounding.

    Duplicate inputs, or more inputs than features, make G singular. Where it is, coefficients are
    large, and cancel to as many digits as float64 has beyond the ridge.
    """
    gram = _gram(x)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    share = 4 * x.shape[1] * torch.finfo(torch.float64).eps
    diagonal.add_(share * diagonal.mean(1, keepdim=True))
    return torch.linalg.cholesky(gram)


def _decay(recipe: HeadRecipe, x: Tensor) -> Float[Tensor, " t"]:
    """a^(T-1-t): what is left at the end of what step t brought."""
    ages = torch.arange(recipe.steps - 1, -1, -1, device=x.device, dtype=x.dtype)
    return (1 - recipe.lr * recipe.weight_decay) ** ages


def _add_inputs(
    weights: Float[Tensor, "m p"],
    coefficients: Float[Tensor, "m k n"],
    recipe: HeadRecipe,
    x: Float[Tensor, "m n d"],
) -> Float[Tensor, "m p"]:
    """The same weights, with inputs added to them by their coefficients."""
    (weight, bias), *_ = split_layers(weights, recipe, x.shape[2])
    weight.add_(coefficients @ x)
    bias.add_(coefficients.sum(-1))
    return weights


def _softmax(logits: Float[Tensor, "m k n"], out: Float[Tensor, "m k n"]) -> None:
    """Over classes. torch's own is one kernel on a GPU, and slow on a CPU over so few."""
    if logits.device.type != "cpu":
        torch.softmax(logits, 1, out=out)
        return
    torch.sub(logits, logits.amax(1, keepdim=True), out=out)
    out.exp_()
    out.div_(out.sum(1, keepdim=True))
