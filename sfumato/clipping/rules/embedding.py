"""Tables whose rows are looked up: by the batch (Embedding and EmbeddingBag), or by constants.

Relative positions (BEiT, Swin) are a table read by a constant index before it meets the batch.
Autograd would pull each example's gradient back on its own, by sorting the index; `Rows` adds up
those of all examples at once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping.arithmetic import to_sum_type
from sfumato.clipping.fallback import by_vmap
from sfumato.clipping.leaf import LeafTensor
from sfumato.clipping.rules.registry import layer_rule
from sfumato.clipping.tape import Tape
from sfumato.errors import UnsupportedLayer


@layer_rule(F.embedding, trailing_axes=lambda *_, **__: 0)
def embedding(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
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


@layer_rule(F.embedding_bag, any_axis=True)
def embedding_bag(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sums or means of table rows, for bags given as a matrix of indices."""
    if not set(tape.here.axes) <= {0, None}:
        args = (input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse)
        args = (*args, per_sample_weights, include_last_offset, padding_idx)
        return by_vmap(tape, F.embedding_bag, args, {})
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


@layer_rule(Tensor.__getitem__, any_axis=True)
def take_rows(tape: Tape, input: Tensor, index: Any) -> Tensor:
    """Rows of a parameter by labels; with other indices, one example at a time."""
    ids: Any = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    is_table = isinstance(input, LeafTensor) and isinstance(ids, Tensor)
    if not is_table or ids.dtype in (torch.bool, torch.uint8):
        return by_vmap(tape, Tensor.__getitem__, (input, index), {})
    rows = tape.derive(Tensor.flatten if input.ndim > 1 else Tensor.unsqueeze, input, 1)
    axis = next(axis for axis in tape.here.axes if axis is not None)
    ids = torch.where(ids < 0, ids + len(input), ids).movedim(axis, 0)
    found = embedding(tape, ids, rows).movedim(0, axis)
    return found.reshape(*found.shape[:-1], *input.shape[1:])


@layer_rule(torch.index_select, Tensor.index_select, any_axis=True)
def index_select(tape: Tape, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """The same, as a function."""
    if dim == 0 and isinstance(input, LeafTensor):
        return take_rows(tape, input, index)
    return by_vmap(tape, torch.index_select, (input, dim, index), {})


def replace_gather(func: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """The operation, or one that does the same by `Rows` where rows are read by a constant."""
    if _table_and_index(func, args, kwargs) is None:
        return func

    def rows(*args: Any, **kwargs: Any) -> Any:
        # From its own arguments: a recipe may call it again, with a table of later parameters.
        found = _table_and_index(func, args, kwargs)
        return func(*args, **kwargs) if found is None else Rows.apply(*found)

    return rows


def _table_and_index(
    func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Tensor, Tensor] | None:
    """What is read by which numbers, for the spellings that models use."""
    table = index = None
    if func is Tensor.__getitem__:
        table, index = args
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    elif func in (torch.index_select, Tensor.index_select) and len(args) == 3 and args[1] == 0:
        table, _, index = args
    elif func is F.embedding and len(args) == 2 and kwargs.get("padding_idx") is None:
        special = any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
        index, table = (None, None) if special else args
    if (
        not isinstance(table, Tensor)
        or not isinstance(index, Tensor)
        or isinstance(index, LeafTensor)
    ):
        return None
    return (table, index) if index.dtype in (torch.int32, torch.int64) else None


class Rows(torch.autograd.Function):
    """Rows of a table; its gradient adds up, in float32, for any number of examples at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table: Tensor, index: Tensor) -> Tensor:
        """`table[index]`."""
        return table[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Keep the index, counted from the first row."""
        table, index = inputs
        index = index.to(table.device)
        ctx.save_for_backward(torch.where(index < 0, index + len(table), index).flatten())
        ctx.shape = table.shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Where a row was read several times, the sum."""
        (g,), (index,) = gradients, ctx.saved_tensors
        rows = to_sum_type(g.reshape(len(index), *ctx.shape[1:]))
        return rows.new_zeros(ctx.shape).index_add(0, index, rows).to(g.dtype), None
