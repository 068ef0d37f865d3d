"""The second half of an inversion: in what a generator can draw, find what the target names.

All classes and all restarts are one batch (in pieces that fit memory). Every image that was begun
counts in the end: nothing is chosen by how it looks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sfumato.attacks.access import TargetAccess
from sfumato.attacks.inversion_loss import InversionLoss, margins
from sfumato.attacks.random_views import random_view
from sfumato.data.example_rng import seed_of
from sfumato.settings.invert import Search, Views
from sfumato.training.cuda_graph import Replay
from sfumato.training.progress import progress

Draw = Callable[[Tensor, Int[Tensor, " n"]], Float[Tensor, "n c h w"]]
"""Images of codes and classes, between 0 and 1."""
Extra = Callable[[Tensor, Float[Tensor, "n c h w"]], Float[Tensor, ""]]
"""What else a code and its images should make small: roughness."""


@dataclass(frozen=True)
class InvertedImages:
    """What the attacker got: images by class, and by how much the target is convinced."""

    images: Float[Tensor, "n c h w"]
    labels: Int[Tensor, " n"]
    margins: Float[Tensor, " n"]


def search_codes(
    draw: Draw,
    begin: Callable[[int, torch.Generator], Tensor],
    access: TargetAccess,
    inversion_loss: InversionLoss,
    views: Views,
    search: Search,
    *,
    extra: Extra | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> InvertedImages:
    """Restarts of every class, each from its own code, moved until the target names the class.

    The loss is summed over two independent views of each image. Every few seconds `say` is told how
    far it is.
    """
    labels = torch.arange(len(access.classes)).repeat_interleave(search.restarts)
    parts = labels.to(access.device).split(search.z_batch)
    tell = progress(len(parts) * search.z_steps, 0, None, say, unit="images")

    def find(number: int, part: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(access.device).manual_seed(seed_of(seed, number))
        codes = begin(len(part), generator).requires_grad_(True)
        gpu = access.device.type == "cuda"
        optimizer = torch.optim.Adam([codes], lr=search.z_lr, capturable=gpu)

        def move(generator: torch.Generator) -> None:
            optimizer.zero_grad()
            images = draw(codes, part)
            loss = sum(
                inversion_loss(access.logits(random_view(views, images, generator)), part)
                for _ in range(2)
            )
            loss = loss if extra is None else loss + extra(codes, images)
            # A sum over images, so that none waits for others.
            (loss * len(part)).backward()  # pyright: ignore
            optimizer.step()

        turn = Replay(move, access.device)
        for step in range(search.z_steps):
            turn(seed, number, step)
            tell(number * search.z_steps + step + 1, {"batch": len(part)})
        with torch.no_grad():
            images = draw(codes, part)
            lead = margins(access.logits(images) / inversion_loss.scale, part)
        return images.cpu(), lead.cpu()

    images, leads = zip(*(find(number, part) for number, part in enumerate(parts)), strict=True)
    return InvertedImages(torch.cat(images), labels, torch.cat(leads))
