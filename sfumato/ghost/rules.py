"""What happens where a parameter meets the batch: which rule takes over, and the rules of tables.

An operation without a rule is still exact: if it broadcasts, the parameter is given a row for each
example (`by_broadcasting`); if not, it runs once an example under vmap (`by_vmap`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import UnsupportedLayer

# Imported for the rules they register.
from sfumato.ghost import attention, norms, products  # noqa: F401
from sfumato.ghost.generic import by_broadcasting, by_expanding, by_vmap
from sfumato.ghost.registry import RULES, norm_rule
from sfumato.ghost.tape import Leaf, Tape, flat


def dispatch(tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any, kind: type[Leaf]) -> Any:
    """Decide what an operation with a Leaf among its arguments is."""
    tensors = flat((args, tuple(kwargs.values())))
    meets = any(not isinstance(t, Leaf) and t.requires_grad for t in tensors)
    if func in EXPANDING:
        return by_expanding(tape, func, args, kwargs, kind)
    if func in LOOKUPS and LOOKUPS[func](tape, args):
        return RULES[func](tape, *args, **kwargs)
    if not meets or func in PASSIVE:
        return tape.derive(func, args, kwargs, kind)
    if func in RULES:
        return RULES[func](tape, *args, **kwargs)
    if func in BROADCASTING:
        return by_broadcasting(tape, func, args, kwargs)
    return by_vmap(tape, func, args, kwargs)


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
            "an EmbeddingBag with offsets, mode max, max_norm, scale_grad_by_freq or sparse has no "
            "per-example rule. Give it a matrix of indices, one row an example."
        )
    rows = embedding(tape, input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if mode == "sum":
        return rows.sum(dim=1)
    present = torch.ones_like(input) if padding_idx is None else input != padding_idx
    return rows.sum(dim=1) / present.sum(dim=1, keepdim=True).clamp(min=1)


def _ids_carry_the_batch(tape: Tape, args: Any) -> bool:
    ids, weight = args[:2]
    if not tape.survey:
        return tape.expects(weight, "embedding")
    return ids.ndim > 0 and ids.shape[0] > 0 and ids.shape[0] % tape.examples == 0


LOOKUPS = {F.embedding: _ids_carry_the_batch, F.embedding_bag: _ids_carry_the_batch}
"""Operations whose batch is made of whole numbers, which carry no gradient to be told by."""

PASSIVE = {Tensor.type_as, Tensor.to, Tensor.view_as, Tensor.reshape_as}
"""Operations that look at the batch's type or shape only."""

EXPANDING = {
    Tensor.expand,
    Tensor.expand_as,
    Tensor.repeat,
    torch.broadcast_to,
    torch.tile,
    Tensor.tile,
}

_NAMES = """
add sub mul div true_divide rsub maximum minimum where lerp addcmul cat concat pow
add_ sub_ mul_ div_ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__
__imul__ __truediv__ __rtruediv__ __itruediv__ __pow__
"""

BROADCASTING = {
    getattr(home, name)
    for home in (torch, Tensor)
    for name in _NAMES.split()
    if hasattr(home, name)
} | {F.scaled_dot_product_attention}
"""Operations that broadcast their arguments against each other, row by row."""
