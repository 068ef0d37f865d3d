"""How one head is trained: a recipe that an adversary knows, and what the head then says.

A head is a linear softmax layer, or a two-layer binary network, on features of a public body. It
sees N = classes * class_size images, all of them in each step or each by its own coin. One head is
one flat vector of P numbers: weights row by row, then biases, layer by layer.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.errors import ConfigError, DataError
from sfumato.settings.heads import HeadRecipe

LOGIT_BYTES = 2**26
"""Heads are scored in groups whose logits take about this much."""


def labels_of(recipe: HeadRecipe) -> Int[Tensor, " n"]:
    """The classes of a head's images, in the order in which `ShadowHeads` gives them."""
    return torch.arange(recipe.classes).repeat_interleave(recipe.class_size)


def targets_of(recipe: HeadRecipe, labels: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """What the head is to say: the class, or whether it is a positive one."""
    if not recipe.hidden:
        return labels
    return torch.isin(labels, torch.tensor(recipe.positive, device=labels.device)).long()


def class_size_for(images: int, classes: int) -> int:
    """Images of each class when a head has `images` in all; refuses what does not divide."""
    if classes < 1 or images < classes or images % classes:
        near = max(1, round(images / max(classes, 1))) * classes
        raise ConfigError(
            f"{images} images cannot be shared out among {classes} classes: each head has equally "
            f"many of each. Take {near}."
        )
    return images // classes


def split_layers(
    weights: Float[Tensor, "m p"], recipe: HeadRecipe, d: int
) -> list[tuple[Float[Tensor, "m rows columns"], Float[Tensor, "m rows2"]]]:
    """Weight and bias of each layer, as views of the flat vectors: writing to them writes there."""
    check_weights(weights, recipe, d)
    parts, start = [], 0
    for rows, columns in recipe.layers(d):
        middle, end = start + rows * columns, start + rows * (columns + 1)
        weight = weights[:, start:middle].unflatten(1, (rows, columns))
        parts.append((weight, weights[:, middle:end]))
        start = end
    return parts


def parameter_name(index: int, recipe: HeadRecipe, d: int) -> str:
    """The name of one number of the flat vector.

    >>> parameter_name(2565, HeadRecipe(), 256)
    'bias[5]'
    """
    layers = recipe.layers(d)
    for number, (rows, columns) in enumerate(layers, 1):
        prefix = f"layer {number} " if len(layers) > 1 else ""
        if index < rows * columns:
            return f"{prefix}weight[{index // columns}, {index % columns}]"
        index -= rows * columns
        if index < rows:
            return f"{prefix}bias[{index}]"
        index -= rows
    raise IndexError("the head has fewer numbers than that")


def predict(
    weights: Float[Tensor, "m p"], recipe: HeadRecipe, features: Float[Tensor, "n d"]
) -> Float[Tensor, "m n outputs"]:
    """The logits of every head for every example."""
    (weight, bias), *rest = split_layers(weights, recipe, features.shape[1])
    values = features @ weight.mT + bias[:, None]
    for weight, bias in rest:
        values = values.relu() @ weight.mT + bias[:, None]
    return values


def accuracy_of_heads(
    weights: Float[Tensor, "m p"],
    recipe: HeadRecipe,
    features: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
) -> Float[Tensor, " m"]:
    """The share of these examples that each head gets right."""
    if not len(labels):
        raise DataError("there are no examples to score heads on. Give at least one.")
    targets = targets_of(recipe, labels)
    widest = max(recipe.hidden, recipe.outputs)
    at_once = max(1, LOGIT_BYTES // (len(labels) * widest * weights.element_size()))
    shares = []
    for some in weights.split(at_once):
        logits = predict(some, recipe, features)
        said = (logits[..., 0] > 0).long() if recipe.hidden else logits.argmax(-1)
        shares.append((said == targets).to(weights.dtype).mean(1))
    return torch.cat(shares) if shares else weights.new_empty(0)


def check_weights(weights: Tensor, recipe: HeadRecipe, d: int) -> None:
    """Refuse weights that are not `m` heads of this recipe on `d` features."""
    wanted = recipe.num_parameters(d)
    if weights.ndim != 2 or weights.shape[1] != wanted:
        shapes = " and ".join(f"{rows}x{columns}" for rows, columns in recipe.layers(d))
        raise DataError(
            f"weights of shape {tuple(weights.shape)} are not heads of this recipe: on {d} "
            f"features a head has {wanted} numbers ({shapes}, with biases). Give the recipe that "
            "the head was trained by, and features of the same body."
        )
