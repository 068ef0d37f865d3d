"""torch's own attention, which takes its weights as arguments of one large function."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.clipping.generic import leaf_among
from sfumato.clipping.geometry import LINEAR
from sfumato.clipping.leaf import Leaf
from sfumato.clipping.products import contraction
from sfumato.clipping.registry import norm_rule
from sfumato.clipping.tape import Tape
from sfumato.errors import UnsupportedLayer


@norm_rule(F.multi_head_attention_forward, finds_examples=True)
def multi_head_attention(
    tape: Tape, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Any, in_proj_bias: Any, bias_k: Any, bias_v: Any, add_zero_attn: bool,
    dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Any, training: bool = True,
    key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None, k_proj_weight: Any = None, v_proj_weight: Any = None,
    static_k: Any = None, static_v: Any = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
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
    biases = [None] * 3 if in_proj_bias is None else tape.derive(torch.chunk, in_proj_bias, 3)
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    elif query is key and key is value:
        q, k, v = project(tape, q, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
        weights = None
    else:
        weights = tape.derive(torch.chunk, in_proj_weight, 3)
    if weights is not None:
        triples = zip((q, k, v), weights, biases, strict=True)
        q, k, v = (project(tape, t, weight, bias) for t, weight, bias in triples)
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if attn_mask is not None:
        mask = attn_mask.unflatten(0, (-1, num_heads)) if attn_mask.ndim == 3 else attn_mask
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, None, :]
        scores = (
            scores.masked_fill(hidden, -torch.inf)
            if hidden.dtype == torch.bool
            else scores + hidden
        )
    weights = F.dropout(scores.softmax(dim=-1), dropout_p, training)
    mixed = (weights @ v).transpose(1, 2).flatten(-2)
    out = project(tape, mixed, out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return out, None
    return out, weights.mean(dim=1) if average_attn_weights else weights


def project(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer that may be frozen."""
    if isinstance(weight, Leaf) or isinstance(bias, Leaf):
        return contraction(tape, x, weight, bias, LINEAR, "linear")
    return F.linear(x, weight, bias)
