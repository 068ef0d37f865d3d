"""Tables whose rows are looked up: Embedding and EmbeddingBag."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import UnsupportedLayer
from sfumato.ghost.registry import norm_rule
from sfumato.ghost.tape import Tape


@norm_rule(F.embedding)
def embedding(
    tape: Tape, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Rows of a table. The gradient of the output is all there is to keep."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise UnsupportedLayer(
            f'"{tape.name_of(weight)}" uses max_norm, scale_grad_by_freq or sparse, which let '
            "examples change each other's rows. Turn them off."
        )
    padding_idx = None if padding_idx is None else padding_idx % len(weight)
    part = tape.open(weight, "rows", "embedding")
    rows = F.embedding(input, weight.detach(), padding_idx)
    if not tape.replaying:
        tape.extras[-1] = (
            input.masked_fill(input == padding_idx, -1) if padding_idx is not None else input
        )
    if tape.survey:
        part.outputs, part.positions = weight.shape[1], input.numel() // tape.examples
    return rows + tape.keep(tuple(rows.shape), rows.dtype)


@norm_rule(F.embedding_bag)
def embedding_bag(
    tape: Tape, input: Tensor, weight: Tensor, offsets: Tensor | None = None,
    max_norm: Any = None, norm_type: float = 2, scale_grad_by_freq: bool = False,
    mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Sums or means of table rows, for bags given as a matrix of indices."""
    if offsets is not None or mode == "max" or max_norm or scale_grad_by_freq or sparse:
        raise UnsupportedLayer(
            f'"{tape.name_of(weight)}" is an EmbeddingBag with offsets, mode max, max_norm, '
            "scale_grad_by_freq or sparse, which has no per-example rule. Give it a matrix of "
            "indices, one row an example, or freeze it."
        )
    rows = embedding(tape, input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if mode == "sum":
        return rows.sum(dim=1)
    present = torch.ones_like(input) if padding_idx is None else input != padding_idx
    return rows.sum(dim=1) / present.sum(dim=1, keepdim=True).clamp(min=1)
