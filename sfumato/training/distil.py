"""Distillation: a student learns the answers of a teacher, and sees no label.

The loss is T^2 KL(teacher || student) of answers softened by a temperature T (Hinton et al. 2015).
For T far above the logits it is a regression of centred logits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.data.example_rng import seed_of
from sfumato.privacy.sampling import Batch
from sfumato.training.hooks import Step
from sfumato.training.inputs import Inputs

Answers = Callable[[Float[Tensor, "n c h w"], Int[Tensor, " n"]], Float[Tensor, "n classes"]]
"""A teacher's logits, given inputs as the student sees them, and the places of the images."""


def cached(logits: Float[Tensor, "images classes"]) -> Answers:
    """Answers that were written down, whatever the student's view of the image."""
    return lambda x, places: logits[places.to(logits.device)].to(x.device)


def distil_step(
    student: nn.Module, inputs: Inputs, answers: Answers, *, temperature: float
) -> Step:
    """A step that leaves the gradient of the mean distillation loss."""

    def step(batch: Batch) -> dict[str, float]:
        (chunk,) = batch.chunks
        x = inputs.tensors(chunk, batch.step)[0]
        wanted = answers(x, chunk.indices)
        # Dropout is a function of the step, so that a run that was cut ends with the same weights.
        torch.manual_seed(seed_of(inputs.seed, batch.step))
        loss = distillation_loss(inputs.logits(student, x), wanted, temperature)
        student.zero_grad(set_to_none=True)
        loss.backward()
        return {"loss": float(loss.detach()), "clipped": 0.0, "batch": float(len(x))}

    return step


def distillation_loss(
    logits: Float[Tensor, "n classes"], wanted: Float[Tensor, "n classes"], temperature: float
) -> Float[Tensor, ""]:
    """T^2 KL of softened answers, averaged over images."""
    student = F.log_softmax(logits / temperature, dim=1)
    teacher = F.log_softmax(wanted / temperature, dim=1)
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return temperature**2 * divergence
