"""Does a function that trains keep its guarantee? Call it again and again, and see.

The function gets images and gives back a model. In half of the calls one image more is among them:
an image with a wrong label, which a model can only get "right" if it remembers it. How sure each
model is of that label is a trial, and independent trials with and without the image bound epsilon
from below (Jagielski et al. 2020). Nothing is asked of the function but that it draws fresh chance
in every call; what it does inside, and what it claims, play no part.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.attacks.membership import log_odds
from sfumato.data.example_rng import seed_of
from sfumato.data.images import Images
from sfumato.errors import ConfigError, DataError
from sfumato.privacy.audit.lower import Bound, many_run_bound

Answer = Callable[[Tensor], Tensor]
"""Pixels between 0 and 1 (n c h w) in, logits (n classes) out; a torch module is one too."""
Trainer = Callable[[Images], Answer]

FEWEST_RUNS = 20
TELLING = 10
"""Calls after which equal trials are no accident any more: fewer may be, of a model that answers
with labels alone."""
ALIKE = (
    "all runs on the same images gave the very same model, so they are one trial and not many. If "
    "the trainer sets a seed of its own, let it draw a fresh one in each call; a training without "
    "any chance in it has no finite epsilon."
)


def audit_trainer(
    train: Trainer,
    images: Images,
    *,
    runs: int = 200,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int = 0,
) -> Bound:
    """An epsilon that `train` cannot be below, for one image added or removed.

    One of the images is set aside as the canary and gets another class; half of the runs have it.
    Guarantee: above the true epsilon with chance at most 1 - confidence, if `train` draws fresh
    chance in each call (the global generators of torch, numpy and random are seeded for each run,
    `seed` telling runs apart). With r runs no more than about ln(r / 15) can be proved.
    """
    check_runs(runs)
    rest, canary = set_canary_aside(images, seed)
    scores: dict[int, float] = {}
    for number in range(runs):
        scores[number] = run_trial(train, rest, canary, number, seed)
        check_trials(scores)
    return bound_of_trials(scores, delta=delta, confidence=confidence)


def check_runs(runs: int) -> None:
    """Refuse too few runs to prove anything by."""
    if runs < FEWEST_RUNS or runs % 2:
        raise ConfigError(
            f"{runs} runs: give an even number, at least {FEWEST_RUNS}; with 200 no more than "
            "epsilon 2.6 can be proved, with 1000 no more than 4.2."
        )


def set_canary_aside(images: Images, seed: int) -> tuple[Images, Images]:
    """All images but one, and that one with a label that is not its own."""
    if not isinstance(images, Images):
        raise DataError(
            f"an audit needs Images, and got a {type(images).__name__}: see sfumato.load_images."
        )
    if len(images) < 2 or len(images.classes) < 2:
        raise DataError(f'"{images.name}": an audit needs two images and two classes at least.')
    generator = np.random.default_rng(seed)
    place = int(generator.integers(len(images)))
    canary = images.select([place])
    shift = int(generator.integers(1, len(images.classes)))
    rest = images.select([i for i in range(len(images)) if i != place])
    wrong = (canary.labels + shift) % len(images.classes)
    return replace(rest, people=None), replace(canary, labels=wrong, people=None)


def run_trial(train: Trainer, rest: Images, canary: Images, number: int, seed: int) -> float:
    """How sure a model is of the canary's label; it was trained on the canary if `number` is odd.

    NaN is what a model says that broke.
    """
    data = rest.joined(canary) if number % 2 else rest
    _seed_everything(seed, number)
    try:
        answer = train(data)
    except Exception as problem:
        problem.add_note(f"(The trainer that is audited raised this, in call {number + 1}.)")
        raise
    if not callable(answer):
        raise DataError(
            f"the trainer gave a {type(answer).__name__}. It must return a torch module, or a "
            "function of pixels between 0 and 1 that gives logits."
        )
    return _surety(answer, canary)


def check_trials(scores: Mapping[int, float]) -> None:
    """Refuse early what no further call would fix: models that broke, or one again and again."""
    if len(scores) > 1 and all(map(math.isnan, scores.values())):
        raise DataError(
            f"the models of all {len(scores)} calls so far answered NaN: the training breaks, and "
            "nothing can be told by it. Mend the trainer (a smaller learning rate?) and call again."
        )
    if len(scores) >= TELLING and all(len(set(side)) == 1 for side in split_trials(scores)):
        raise DataError(ALIKE)


def split_trials(scores: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Trials with the canary and without it, by number; a model that broke says no."""
    told = {n: -math.inf if math.isnan(scores[n]) else scores[n] for n in sorted(scores)}
    inside, outside = ([s for n, s in told.items() if n % 2 == side] for side in (1, 0))
    return inside, outside


def bound_of_trials(scores: Mapping[int, float], *, delta: float, confidence: float) -> Bound:
    """What the trials prove, odd numbers being those with the canary."""
    inside, outside = split_trials(scores)
    if len(set(inside)) == 1 or len(set(outside)) == 1:
        raise DataError(ALIKE)
    return many_run_bound(
        inside,
        outside,
        delta=delta,
        confidence=confidence,
        name="many runs of the trainer, one mislabelled image",
        assumes="the trainer draws fresh chance in every call",
    )


def _surety(answer: Answer, canary: Images) -> float:
    pixels = canary.pixels.float() / 255
    if isinstance(answer, nn.Module):
        answer.eval()
        parameter = next(answer.parameters(), pixels)
        pixels = pixels.to(parameter.device)
    with torch.no_grad():
        logits = answer(pixels)
    wanted = (1, len(canary.classes))
    if not isinstance(logits, Tensor) or tuple(logits.shape) != wanted:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"the trained model gave {shape} for one image, not logits of {wanted}.")
    return float(log_odds(logits.float().cpu(), canary.labels)[0])


def _seed_everything(seed: int, number: int) -> None:
    torch.manual_seed(seed_of("trial", seed, number))
    np.random.seed(seed_of("trial of numpy", seed, number) % 2**32)
    random.seed(seed_of("trial of Python", seed, number))
