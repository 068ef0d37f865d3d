"""Was this image one of those the model was trained on? Scores of four attacks, larger for "yes".

All of them look at one number: the log-odds phi = ln(p_y / (1 - p_y)) that a model gives an image's
own class. The loss attack takes it as it is. The others ask how unusual it is for this very image,
and learn that from shadow models, of which some had the image and some did not: LiRA by a Gaussian
fitted to each side (Carlini et al. 2022), RMIA by a comparison with images that no model was
trained on (Zarifzadeh et al. 2024). Letters: m shadow models, n images under attack, z images of a
population.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from sfumato.errors import DataError

ENOUGH = 32
"""Shadow models on one side from which an image has a variance of its own; below, all share one."""
LEAST_VARIANCE = 1e-6
"""Shadow models that all say the same still leave some room for another."""
OFFLINE_SHARE = 0.3
"""RMIA's `a`, as published for CIFAR-10. It is fixed: to choose it on the target would be to peek.
"""


def log_odds(
    logits: Float[Tensor, "*m n classes"], labels: Int[Tensor, " n"]
) -> Float64[Tensor, "*m n"]:
    """phi = ln(p_y / (1 - p_y)), without ever forming p_y: finite also where p_y rounds to 1."""
    values = logits.double()
    places = labels.to(values.device).expand(values.shape[:-1])[..., None]
    own = values.gather(-1, places)[..., 0]
    others = values.scatter(-1, places, -torch.inf).logsumexp(-1)
    return own - others


def loss_scores(phi: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """The log-probability of the right class: an image with a small loss was rather trained on."""
    return F.logsigmoid(phi)


def lira_online(
    phi: Float64[Tensor, " n"], shadows: Float64[Tensor, "m n"], inside: Bool[Tensor, "m n"]
) -> Float64[Tensor, " n"]:
    """The log-likelihood ratio of phi: models with the image against models without it.

    `inside[k, i]` says that shadow model k was trained on image i. Each image needs a model on each
    side.
    """
    mean_in, variance_in = _fit(shadows, inside)
    mean_out, variance_out = _fit(shadows, ~inside)
    return _log_normal(phi, mean_in, variance_in) - _log_normal(phi, mean_out, variance_out)


def lira_offline(
    phi: Float64[Tensor, " n"], shadows: Float64[Tensor, "m n"], inside: Bool[Tensor, "m n"]
) -> Float64[Tensor, " n"]:
    """How far phi lies above what models without the image say, in their deviations.

    The published score is the Gaussian probability of less than that. This rises with it, image by
    image, and goes on rising where the probability rounds to 1.
    """
    mean, variance = _fit(shadows, ~inside)
    return (phi - mean) / variance.sqrt()


def rmia(
    phi: Float64[Tensor, " n"],
    shadows: Float64[Tensor, "m n"],
    inside: Bool[Tensor, "m n"],
    population: Float64[Tensor, " z"],
    population_shadows: Float64[Tensor, "m z"],
    *,
    gamma: float = 1.0,
    share: float = OFFLINE_SHARE,
) -> Float64[Tensor, " n"]:
    """The share of a population that the image beats: p(x|target)/p(x) > gamma p(z|target)/p(z).

    p(x) is what an average model would say. Only models without x are asked, and their mean m is
    moved towards 1, to ((1 + a) m + (1 - a)) / 2, since half of all models would have been trained
    on x. No model was trained on the population, neither the target nor a shadow model.
    """
    if not len(population):
        raise DataError("RMIA compares with a population, and there is none. Give other images.")
    out = (~inside).double()
    _require_models(out.sum(0))
    mean = (shadows.sigmoid() * out).sum(0) / out.sum(0)
    usual = ((1 + share) * mean + (1 - share)) / 2
    usual_population = ((1 + share) * population_shadows.sigmoid().mean(0) + (1 - share)) / 2
    ratio = F.logsigmoid(phi) - usual.log()
    others = (F.logsigmoid(population) - usual_population.log()).sort().values
    beaten = torch.searchsorted(others, ratio - math.log(gamma))
    return beaten.double() / len(others)


def _fit(
    shadows: Float64[Tensor, "m n"], chosen: Bool[Tensor, "m n"]
) -> tuple[Float64[Tensor, " n"], Float64[Tensor, " n"]]:
    """Mean and variance of each image over the chosen models; with few models, one variance."""
    weight = chosen.double()
    count = weight.sum(0)
    _require_models(count)
    mean = (shadows * weight).sum(0) / count
    squares = ((shadows - mean).square() * weight).sum(0)
    if int(count.min()) >= ENOUGH:
        variance = squares / (count - 1)
    else:
        # Each image's own mean has taken one of its models.
        variance = (squares.sum() / (count - 1).sum().clamp(min=1)).expand_as(mean)
    return mean, variance.clamp(min=LEAST_VARIANCE)


def _require_models(count: Float64[Tensor, " n"]) -> None:
    if bool((count < 1).any()):
        image = int((count < 1).nonzero()[0])
        raise DataError(
            f"image {image} is on one side of all shadow models: each needs some trained on it "
            "and some that did not. Train more of them, in pairs of halves."
        )


def _log_normal(
    value: Float64[Tensor, " n"], mean: Float64[Tensor, " n"], variance: Float64[Tensor, " n"]
) -> Float64[Tensor, " n"]:
    return -0.5 * ((value - mean).square() / variance + variance.log())
