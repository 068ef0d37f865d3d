"""torch's own attention, which takes its weights as arguments of one large function."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping.fallback import leaf_among
from sfumato.clipping.geometry import LINEAR
from sfumato.clipping.leaf import LeafTensor
from sfumato.clipping.linear_like import linear_like
from sfumato.clipping.rules.registry import layer_rule
from sfumato.clipping.tape import Tape
from sfumato.errors import UnsupportedLayer


@layer_rule(F.multi_head_attention_forward, any_axis=True)
def multi_head_attention(
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch's own attention: three projections, softmax, one projection."""
    if tape.here.axes[:3] != (1, 1, 1):
        given = (query, key, value, in_proj_weight, in_proj_bias, bias_k, bias_v, out_proj_weight)
        leaf = leaf_among((*given, out_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight), {})
        raise UnsupportedLayer(
            f'"{tape.name_of(leaf)}" attends over an axis that holds the examples, which mixes '
            "them. Give MultiheadAttention its input as it says it takes it (batch_first), or "
            "freeze it."
        )
    if bias_k is not None or add_zero_attn or static_k is not None or query.ndim != 3:
        raise UnsupportedLayer(
            f'"{tape.name_of(out_proj_weight)}" belongs to MultiheadAttention with add_bias_kv, '
            "add_zero_attn or input without a batch, which has no rule. Turn that off, or freeze "
            "the layer."
        )
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = _project_each(tape, (q, k, v), weights, in_proj_bias)
    elif query is key and key is value:
        q, k, v = project(tape, q, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        weights = tape.derive(torch.chunk, in_proj_weight, 3)
        q, k, v = _project_each(tape, (q, k, v), weights, in_proj_bias)
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = _hide(q @ k.mT * q.shape[-1] ** -0.5, attn_mask, key_padding_mask)
    weights = F.dropout(scores.softmax(dim=-1), dropout_p, training)
    mixed = (weights @ v).transpose(1, 2).flatten(-2)
    out = project(tape, mixed, out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return out, None
    return out, weights.mean(dim=1) if average_attn_weights else weights


def _project_each(
    tape: Tape, inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], bias: Tensor | None
) -> Iterator[Tensor]:
    """Queries, keys and values by a weight each, and by a third of the bias each."""
    biases = [None] * 3 if bias is None else tape.derive(torch.chunk, bias, 3)
    for x, weight, part in zip(inputs, weights, biases, strict=True):
        yield project(tape, x, weight, part)


def _hide(scores: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor:
    """Scores with what masks hide: both may be booleans, or numbers that are added."""
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, scores.shape[1]))
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    for mask in (attn_mask, padding):
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill(mask, -torch.inf) if is_bool else scores + mask
    return scores


def project(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer that may be frozen."""
    if isinstance(weight, LeafTensor) or isinstance(bias, LeafTensor):
        return linear_like(tape, x, weight, bias, LINEAR, "linear")
    return F.linear(x, weight, bias)
