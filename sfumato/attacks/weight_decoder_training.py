"""How the attacker's network learns to see a training set in the weights it left.

Heads are trained on the attacker's own images as it learns, so no two batches are alike (unless
they are taken from disk). The loss of a guess is its distance to the nearest image that it may
show: where a class has several, none of them is the right one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from sfumato.attacks.heads import HeadRecipe, split_layers
from sfumato.attacks.shadow_heads import Heads
from sfumato.metrics.features import Features
from sfumato.privacy.sampling import Batch
from sfumato.training.hooks import Step

SHARP = 100.0
"""How sharply the nearest image is preferred: the weights are softmax(-100 error)."""


@dataclass(frozen=True)
class ReconstructionTask:
    """What a decoder is shown, and what it is asked for."""

    pixels: UInt8[Tensor, "n c h w"]
    classes: int
    class_size: int
    conditional: bool = True

    def wanted(self, heads: int) -> Int[Tensor, "heads wanted"]:
        """The classes that are asked for: all of each head, or one picture of whatever there is."""
        asked = torch.arange(self.classes if self.conditional else 1, device=self.pixels.device)
        return asked.expand(heads, -1)

    def truths(self, members: Int[Tensor, "m n"]) -> Float[Tensor, "m wanted k c h w"]:
        """The images that a guess may show, between -1 and 1."""
        images = self.pixels[members.to(self.pixels.device)].float() / 127.5 - 1
        if not self.conditional:
            return images[:, None]
        return images.unflatten(1, (self.classes, self.class_size))


def softmin_error(
    guesses: Float[Tensor, "m wanted c h w"], truths: Float[Tensor, "m wanted k c h w"]
) -> Float[Tensor, ""]:
    """Mean of squared and absolute error to the nearest of the images a guess may show."""
    difference = guesses[:, :, None] - truths
    errors = (difference.square() + difference.abs()).flatten(3).mean(dim=3) / 2
    if errors.shape[2] == 1:
        return errors.mean()
    return (errors * torch.softmax(-SHARP * errors, dim=2)).sum(dim=2).mean()


def decoder_step(
    decoder: nn.Module,
    task: ReconstructionTask,
    heads_of: Callable[[int], Heads],
    standardise: Callable[[Heads], Tensor],
    *,
    precision: torch.dtype = torch.float32,
    compile: bool = False,
) -> Step:
    """A step that leaves the gradient of the decoder's loss on a batch of heads of its own."""
    device = task.pixels.device

    def loss_of(z: Tensor, members: Tensor) -> Tensor:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            guesses = decoder(z, task.wanted(len(z)))
        return softmin_error(guesses.float(), task.truths(members))

    measure = torch.compile(loss_of) if compile else loss_of

    def step(batch: Batch) -> dict[str, float]:
        heads = heads_of(batch.step)
        # Rounded after it is standardised: what is to be seen is how far weights are from the mean.
        loss = measure(standardise(heads), heads.members)
        loss.backward()
        return {"loss": float(loss.detach()), "batch": float(len(heads.weights)), "clipped": 0.0}

    return step


@torch.no_grad()
def reconstruct(
    decoder: nn.Module, z: Float[Tensor, "m p"], task: ReconstructionTask, batch_size: int = 256
) -> Float[Tensor, "m wanted c h w"]:
    """What the decoder sees in heads, between -1 and 1."""
    decoder.eval()
    found = [decoder(part, task.wanted(len(part))).clamp(-1, 1) for part in z.split(batch_size)]
    return torch.cat(found)


def nearest_images(
    heads: Heads, recipe: HeadRecipe, own: Features, task: ReconstructionTask
) -> Float[Tensor, "m classes c h w"]:
    """For comparison, without any network: the attacker's image that lies along a row of weights.

    The row of a class, less the mean of all rows, is mostly a multiple of that class's features.
    """
    (matrix, _), *_ = split_layers(heads.weights, recipe, own.values.shape[1])
    centred = matrix - matrix.mean(dim=1, keepdim=True)
    found = []
    for label in range(recipe.classes):
        places = torch.nonzero(own.labels == label).flatten()
        features = torch.nn.functional.normalize(own.values[places], dim=1)
        found.append(places[(centred[:, label] @ features.T).argmax(dim=1)])
    chosen = torch.stack(found, dim=1)
    return task.pixels[chosen.to(task.pixels.device)].float() / 127.5 - 1
