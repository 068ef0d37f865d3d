"""Shadow models: many copies of one network, trained side by side on random halves of a pool.

What a model says of an image it was trained on, and of another, an attacker finds out on models of
its own. The copies are one stack of weights: each step is one vmap over them, each copy with its
own batch, and the optimizer, which works number by number, does not notice the stack. Training is
plain, without augmentation: what an attacker who knows the recipe does when it has no better idea.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from sfumato.data.example_rng import seed_of
from sfumato.errors import ConfigError
from sfumato.training.inputs import Inputs
from sfumato.training.progress import progress

Optimize = Callable[
    [Sequence[Tensor]], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]
]
"""An optimizer of these tensors, and its learning rate over time."""


@dataclass(frozen=True)
class ShadowModels:
    """Trained copies: the module that they are copies of, and all their weights in one stack."""

    module: nn.Module
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @torch.no_grad()
    def logits(self, inputs: Inputs, at_once: int = 512) -> Float[Tensor, "m n classes"]:
        """What each copy says of all images of the reading, in evaluation mode; on the CPU."""
        self.module.eval()

        def answer(weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            return inputs.logits(_as_function(self.module, weights, buffers), x)

        parts = []
        for start in range(0, len(inputs.images), at_once):
            x = inputs.normalise(inputs.scale(slice(start, start + at_once)))
            parts.append(vmap(answer, (0, 0, None))(self.weights, self.buffers, x).cpu())
        return torch.cat(parts, 1)


def draw_halves(count: int, images: int, seed: int) -> Bool[Tensor, "m n"]:
    """Which of the shadow models has which image: `[k, i]`.

    Guarantee: models come in pairs, a random half and all the rest, so each image is in exactly
    half of them; the halves of one pair differ by at most one image in size.
    """
    if count < 2 or count % 2:
        raise ConfigError(
            f"{count} shadow models: they come in pairs, one with each half. Give 2, 4, 8, 16 ..."
        )
    rows = torch.zeros(count, images, dtype=torch.bool)
    for pair in range(count // 2):
        order = _generator(seed, "halves", pair).permutation(images)
        rows[2 * pair, order[: images // 2]] = True
        rows[2 * pair + 1] = ~rows[2 * pair]
    return rows


def shadow_batches(
    inside: Bool[Tensor, " n"], *, steps: int, size: int, seed: int, number: int
) -> Int[Tensor, "steps size"]:
    """The batches of shadow model `number`: passes over its images, each in a new order."""
    places = inside.nonzero()[:, 0].numpy()
    if not len(places):
        raise ConfigError("a shadow model without images learns nothing. Give a larger pool.")
    generator = _generator(seed, "batches", number)
    passes = -(-steps * size // len(places))
    order = np.concatenate([generator.permutation(places) for _ in range(passes)])
    return torch.from_numpy(order[: steps * size].reshape(steps, size))


def train_copies(
    models: Sequence[nn.Module],
    inputs: Inputs,
    batches: Int[Tensor, "m steps size"],
    optimize: Optimize,
    *,
    at_once: int = 512,
    say: Callable[[str], None] | None = None,
) -> ShadowModels:
    """Train the models, each on its own batches, all of them at the same time.

    Guarantee: each is what it would be if it were trained alone on its batches with the mean
    loss, but for rounding; dropout is drawn for each by itself. About `at_once` images of each
    model are in memory. The models' own weights are not changed. Layers stay in the mode, training
    or evaluation, that they are in; a BatchNorm in training mode is refused. Every few seconds
    `say` is told how far it is.
    """
    module = models[0]
    _refuse_mixing(module)
    weights, buffers = stack_module_state(list(models))
    weights = {name: value.detach().clone() for name, value in weights.items()}
    learning = {n: weights[n] for n, p in module.named_parameters() if p.requires_grad}
    resting = {name: value for name, value in weights.items() if name not in learning}
    optimizer, schedule = optimize(list(learning.values()))

    def loss(learning: dict[str, Tensor], resting: dict[str, Tensor], *rest: Tensor) -> Tensor:
        held, (x, y) = dict(zip(buffers, rest[2:], strict=True)), rest[:2]
        model = _as_function(module, {**learning, **resting}, held)
        return F.cross_entropy(inputs.logits(model, x), y, reduction="sum")

    gradients = vmap(grad(loss), randomness="different")
    tell = progress(batches.shape[1], 0, None, say)
    for step in range(batches.shape[1]):
        optimizer.zero_grad()
        for places in batches[:, step].split(at_once, dim=1):
            x, y = _inputs(inputs, places)
            found = gradients(learning, resting, x, y, *buffers.values())
            for name, value in learning.items():
                part = found[name] / batches.shape[2]
                value.grad = part if value.grad is None else value.grad + part
        optimizer.step()
        schedule.step()
        tell(step + 1, {"batch": len(models) * batches.shape[2]})
    return ShadowModels(module, weights, buffers)


def _refuse_mixing(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise ConfigError(
                f'"{name}" is a BatchNorm that learns statistics, and shadow models that are '
                "trained side by side cannot. Use --shadows 0: the loss attack needs none."
            )


def _as_function(
    module: nn.Module, weights: dict[str, Tensor], buffers: dict[str, Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda x: functional_call(module, (weights, buffers), (x,))


def _inputs(
    inputs: Inputs, places: Int[Tensor, "m part"]
) -> tuple[Float[Tensor, "m part c h w"], Int[Tensor, "m part"]]:
    flat = places.flatten()
    x = inputs.normalise(inputs.scale(flat))
    labels = inputs.images.labels[flat.to(inputs.images.labels.device)].to(inputs.device)
    return x.unflatten(0, tuple(places.shape)), labels.view(places.shape)


def _generator(seed: int, *name: object) -> np.random.Generator:
    return np.random.default_rng(seed_of("shadows", seed, *name))
