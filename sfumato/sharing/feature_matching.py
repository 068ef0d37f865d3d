"""Public images, moved until a teacher sees in them what it saw in private ones.

k steps of Adam on the pixels of a batch. What is made small: the distance of the batch's feature
statistics to the released ones, the teacher's cross-entropy for classes dealt out in turn,
roughness and size (Yin et al. 2020; from public images: Soufleri et al. 2024). All that is read
here is public or was released with noise, so the result needs no further privacy. At k = 0 nothing
moves.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from sfumato.models.observe import observed
from sfumato.runs import Run
from sfumato.settings.release import Matching
from sfumato.sharing.moments import MomentScale
from sfumato.training.inputs import Inputs


@dataclass(frozen=True)
class MatchingTarget:
    """What the teacher saw, as it was released: one row of mean moments, or one for each class."""

    gauge: MomentScale
    means: Float[Tensor, "groups d"]

    def distance(self, vectors: Float[Tensor, "n d"], group: int) -> Float[Tensor, ""]:
        """How far a batch is from what was released: a sum of norms, one a block."""
        found = self.gauge.statistics(self.gauge.mean(vectors))
        wanted = self.gauge.statistics(self.means[group])
        return torch.stack([(a - b).norm() for a, b in zip(found, wanted, strict=True)]).sum()


def deal_classes(count: int, num_classes: int) -> Int[Tensor, " count"]:
    """The class that each image is moved towards: dealt out in turn, whatever it shows."""
    return torch.arange(count) % num_classes


def match_features(
    model: nn.Module,
    inputs: Inputs,
    targets: Int[Tensor, " n"],
    goal: MatchingTarget | None,
    matching: Matching,
    run: Run,
    say: Callable[[str], None] = lambda _: None,
) -> UInt8[Tensor, "n c h w"]:
    """The pixels of all images of `inputs`, moved. A run that was cut goes on.

    With a goal for each class, a batch has images of one class only, so that its statistics can be
    those of the class.
    """
    images = inputs.images.require_public("moving images to match statistics")
    if matching.k == 0:
        return images.pixels.cpu().clone()
    state = run.load_checkpoint() or {"done": 0, "pixels": images.pixels.cpu().clone()}
    pixels = state["pixels"]
    by_class = goal is not None and len(goal.means) > 1
    batches = arrange_batches(targets, matching.match_batch, by_class=by_class, seed=inputs.seed)
    model.eval().requires_grad_(False)
    for number, places in enumerate(batches):
        if number < state["done"]:
            continue
        generator = torch.Generator().manual_seed(inputs.seed + number)
        group = int(targets[places[0]]) if by_class else 0
        pixels[places] = move_batch(
            model, inputs, places, targets, goal, group, matching, generator
        )
        if number % 20 == 19 or number == len(batches) - 1:
            run.save_checkpoint({"done": number + 1, "pixels": pixels})
            say(f"moved {int(sum(len(b) for b in batches[: number + 1]))} of {len(pixels)} images")
    return pixels


def arrange_batches(
    targets: Int[Tensor, " n"], batch: int, *, by_class: bool, seed: int = 0
) -> list[Int[Tensor, " batch"]]:
    """Batches of places, drawn at random, or class by class. All are about as large as asked."""
    places = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    rows = [places]
    if by_class:
        rows = [places[targets[places] == label] for label in targets.unique()]
    return [part for row in rows for part in row.tensor_split(max(1, round(len(row) / batch)))]


def move_batch(
    model: nn.Module,
    inputs: Inputs,
    places: Int[Tensor, " batch"],
    targets: Int[Tensor, " n"],
    goal: MatchingTarget | None,
    group: int,
    matching: Matching,
    generator: torch.Generator,
) -> UInt8[Tensor, "batch c h w"]:
    """k steps on one batch, and back to pixels."""
    x = inputs.normalise(inputs.scale(places))
    low, high = inputs.normalise(torch.zeros_like(x)), inputs.normalise(torch.ones_like(x))
    y = targets[places].to(x.device)
    x.requires_grad_(True)
    optimizer = torch.optim.Adam([x], lr=matching.match_lr, betas=(0.5, 0.99))
    lower = inputs.precision != torch.float32
    for _ in range(matching.k):
        optimizer.zero_grad()
        with observed(model) as found:
            with torch.autocast(x.device.type, inputs.precision) if lower else nullcontext():
                logits = model(shift_and_mirror(x, generator)).float()
            loss = matching.class_weight * F.cross_entropy(logits, y)
            if goal is not None:
                distance = goal.distance(goal.gauge.vectors(found), group)
                loss = loss + matching.statistics_weight * distance
        loss = loss + matching.tv_weight * roughness(x) + matching.l2_weight * x.norm()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            x.copy_(torch.minimum(torch.maximum(x, low), high))
    share = (x.detach() - low) / (high - low)
    return (255 * share).round().clamp(0, 255).to(torch.uint8).cpu()


def shift_and_mirror(
    x: Float[Tensor, "n c h w"], generator: torch.Generator
) -> Float[Tensor, "n c h w"]:
    """The batch, shifted around its edges by up to an eighth, and mirrored every second time."""
    height, width = x.shape[2:]
    draw = torch.rand(3, generator=generator)
    down = round((2 * float(draw[0]) - 1) * (height // 8))
    right = round((2 * float(draw[1]) - 1) * (width // 8))
    x = torch.roll(x, (down, right), (2, 3))
    return x.flip(3) if draw[2] < 0.5 else x


def roughness(x: Float[Tensor, "n c h w"]) -> Float[Tensor, ""]:
    """Mean absolute difference of neighbours, in four directions."""
    ways = [
        x[:, :, 1:] - x[:, :, :-1],
        x[:, :, :, 1:] - x[:, :, :, :-1],
        x[:, :, 1:, 1:] - x[:, :, :-1, :-1],
        x[:, :, 1:, :-1] - x[:, :, :-1, 1:],
    ]
    return torch.stack([way.abs().mean() for way in ways]).sum()
