"""The inputs of trial passes: more or fewer examples, and the same dice each time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def resized(inputs: Sequence[Any], examples: int, number: int) -> list[Any]:
    """The inputs of `number` examples, made by repeating those there are, ever fainter."""
    places = torch.arange(number) % max(1, examples)
    found = [examples_at(x, places, examples) if isinstance(x, Tensor) else x for x in inputs]
    return [fading(x, number) if isinstance(x, Tensor) else x for x in found]


def fading(x: Tensor, examples: int) -> Tensor:
    """Examples that no two are alike, so that rows of one are not taken for another's."""
    if not x.is_floating_point():
        return x
    strength = 1 / (1 + 0.1 * torch.arange(examples, device=x.device, dtype=x.dtype))
    rows = x.unflatten(0, (examples, -1))
    return (rows * strength.reshape(-1, *[1] * (rows.ndim - 1))).flatten(0, 1)


def examples_at(x: Tensor, places: Tensor, examples: int) -> Tensor:
    """All rows of the examples at these places; zeros if there are no examples at all."""
    rows = x.unflatten(0, (examples, -1)) if examples else x.new_zeros(1, 1, *x.shape[1:])
    return rows[places.to(x.device)].flatten(0, 1)


def random_state() -> tuple[Tensor, list[Tensor]]:
    """torch's own generators, which dropout draws from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda


def same_state(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    """Whether nothing was drawn in between."""
    pairs = zip([one[0], *one[1]], [other[0], *other[1]], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Draw the same again."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
