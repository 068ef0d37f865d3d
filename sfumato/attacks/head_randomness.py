"""All the randomness of a head, named by its number.

Heads come in blocks of 256, and each block has its own generator, seeded by one seed and
the block's number. So a head is the same however the sequence is cut into batches and chunks.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sfumato.attacks.heads import HeadRecipe, split_layers

BLOCK = 256
"""Heads that draw from one generator. Other numbers give other heads: never change it."""

Normals = Callable[[tuple[int, ...]], Tensor]
"""Of a shape s: the next standard normals of each head, m x s."""


@dataclass(frozen=True)
class HeadRandomness:
    """What chance decides for m heads: where they start, who is in each step, and the noise."""

    start: Float[Tensor, "m p"]
    masks: Bool[Tensor, "m steps n"] | None
    """None: everybody is in every step."""
    normals: Normals
    """The primal asks for the noise of each step, the dual for what it needs of all at once."""


def draw_chance(
    recipe: HeadRecipe, d: int, seed: int, blocks: range, like: Tensor | None = None
) -> HeadRandomness:
    """The chance of the heads of these blocks, in the type and on the device of `like`.

    Guarantee: that of a block depends on the recipe, `d`, `seed`, the block's number, type and
    kind of device, and on nothing else. On a CPU any 2^32 blocks in a row have different seeds.
    """
    like = torch.empty(0) if like is None else like
    generators = [_generator(seed, block, like.device) for block in blocks]

    def fill(shape: tuple[int, ...], draw: Callable[[Tensor, torch.Generator], object]) -> Tensor:
        values = like.new_empty((len(generators) * BLOCK, *shape))
        for part, generator in zip(values.split(BLOCK), generators, strict=True):
            draw(part, generator)
        return values

    def normals(shape: tuple[int, ...]) -> Tensor:
        return fill(shape, lambda part, generator: part.normal_(generator=generator))

    start = normals((recipe.num_parameters(d),)).mul_(recipe.init_std)
    for _, bias in split_layers(start, recipe, d):
        bias.zero_()
    masks = None
    if recipe.rate < 1:
        shape = (recipe.steps, recipe.images)
        # A 24-bit uniform is below the rate with that chance, to 2^-24.
        masks = fill(shape, lambda part, generator: part.uniform_(generator=generator))
        masks = masks < recipe.rate
    return HeadRandomness(start, masks, normals)


def _generator(seed: int, block: int, device: torch.device) -> torch.Generator:
    # torch's CPU generator takes 32 bits of a seed, so they are counted rather than hashed.
    word = hashlib.sha256(f"sfumato heads {seed}".encode()).digest()[:8]
    number = int.from_bytes(word, "little") + block
    number %= 2**32 if device.type == "cpu" else 2**63
    return torch.Generator(device).manual_seed(number)
