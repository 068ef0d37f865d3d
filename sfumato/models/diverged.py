"""Whether training has diverged, told without a look at private data."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sfumato.models.observe import in_evaluation_mode


def has_diverged(model: nn.Module, answer: Callable[[], Tensor]) -> bool:
    """Whether a weight is not finite, or no number of the answer to a public input is.

    `answer` asks the model about noise or a blank image, never about private data. So a caller who
    stops because of it reveals nothing that the weights, which are paid for, do not tell already.
    """
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        return True
    with torch.no_grad(), in_evaluation_mode(model):
        return not bool(answer().isfinite().any())
