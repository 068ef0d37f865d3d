"""What happens where a parameter meets the batch: one rule for each kind of operation.

To add a rule, write a function that takes the tape and the operation's own arguments, and put
`@norm_rule(operation)` above it. `RULES` is also the test matrix: see tests/ghost/test_rules.py.
An operation without a rule is still exact: if it broadcasts, the parameter is given a row for each
example (`by_broadcasting`); if not, it runs once an example under vmap (`by_vmap`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.errors import UnsupportedLayer
from sfumato.ghost import contract
from sfumato.ghost.contract import LINEAR, Geometry
from sfumato.ghost.generic import by_vmap, per_row
from sfumato.ghost.leaf import Leaf, plain
from sfumato.ghost.tape import Part, Tape

RULES: dict[Callable[..., Any], Callable[..., Any]] = {}


def norm_rule(*operations: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a rule for these torch operations."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(operations, rule))
        return rule

    return register


class Contraction(torch.autograd.Function):
    """A layer that multiplies by a weight, and measures its per-example gradients on the way back.

    The dummies norm, kept_x, kept_g, kept_w and kept_b get, as their gradients: the squared norms,
    the input, the output gradient, the per-example gradients of the weight, and of the bias. Which
    of them are there (not None) is decided by the part's method.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, norm: Any, kept: Any, geometry: Geometry,
        method: str, examples: int, reads_input: bool, *dummies: Any,
    ) -> Tensor:  # fmt: skip
        """The ordinary forward pass."""
        ctx.save_for_backward(x, weight)
        ctx.settings = (geometry, method, examples, reads_input, bias is not None, kept)
        return contract.apply(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input, and what the dummies keep."""
        (g,) = gradients
        with plain():
            x, weight = ctx.saved_tensors
            geometry, method, examples, reads_input, _, kept = ctx.settings
            grad_x = None
            if not reads_input:
                grad_x = contract.input_gradient(g, x, weight, geometry)
            squares, keeps = None, []
            if method:
                a, b = contract.columns(x, g, weight, geometry, examples)
                if method == "ghost":
                    squares = contract.ghost_norm(a, b)
                elif method == "square":
                    squares = contract.instantiated_norm(a, b)
                else:
                    gradient = contract.per_example_gradient(a, b)
                    keeps.append(gradient.reshape(examples, *weight.shape))
                if method != "store" and kept[0]:
                    keeps += [x.detach(), g]
            if kept[1]:
                keeps.append(_bias_gradient(g, geometry, examples))
            return (grad_x, None, None, squares, None, None, None, None, None, *keeps)


def contraction(
    tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, operation: str
) -> Tensor:
    """Run a linear layer or convolution whose weight or bias is a Leaf."""
    by_weight = tape.open(weight, "product", operation) if isinstance(weight, Leaf) else None
    by_bias = tape.open(bias, "gradient", operation) if isinstance(bias, Leaf) else None
    method, norm, dummies = "", None, []
    out = contract.output_shape(x, weight, geometry)
    if by_weight is not None:
        if tape.survey:
            _measure(by_weight, x, weight, geometry, out, tape)
        method = by_weight.method
        if method == "store":
            dummies.append(tape.keep((tape.examples, *weight.shape), contract.sum_type(x)))
        else:
            norm = tape.norms[tape.group_of.get(by_weight.root or "", 0)]
            if tape.keeps_factors:
                dtype = _product_type(x)
                dummies += [tape.keep(tuple(x.shape), dtype), tape.keep(out, dtype)]
    if by_bias is not None:
        width = out[-1 if geometry.is_linear else 1]
        dummies.append(tape.keep((tape.examples, width), contract.sum_type(x)))
    first = by_weight.reads_input if by_weight is not None else False
    dtype = _product_type(x)
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    kept = (tape.keeps_factors, by_bias is not None)
    return Contraction.apply(
        x, weight, bias, norm, kept, geometry, method, tape.examples, first, *dummies
    )  # pyright: ignore


@norm_rule(F.linear)
def linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A matrix on the last axis of an input of any number of dimensions."""
    if weight.ndim != 2 or x.ndim < 2 or _depends_on_batch(weight) or _depends_on_batch(bias):
        return by_vmap(tape, F.linear, (x, weight, bias), {})
    return contraction(tape, x, weight, bias, LINEAR, "linear")


def _convolution(operation: Callable[..., Any], dims: int) -> None:
    @norm_rule(operation)
    def rule(
        tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        """A convolution with any stride, dilation, groups and padding."""
        if _depends_on_batch(weight) or _depends_on_batch(bias) or input.ndim != dims + 2:
            args = (input, weight, bias, stride, padding, dilation, groups)
            return by_vmap(tape, operation, args, {})
        stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
        if isinstance(padding, str):
            input, padding = _pad_same(input, weight.shape[2:], dilation, padding), 0
        geometry = Geometry(stride, _tuple(padding, dims), dilation, False, (0,) * dims, groups)
        return contraction(tape, input, weight, bias, geometry, f"conv{dims}d")


def _transposed_convolution(operation: Callable[..., Any], dims: int) -> None:
    @norm_rule(operation)
    def rule(
        tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Any:  # fmt: skip
        """The adjoint of a convolution."""
        if _depends_on_batch(weight) or _depends_on_batch(bias) or input.ndim != dims + 2:
            args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
            return by_vmap(tape, operation, args, {})
        geometry = Geometry(
            stride=_tuple(stride, dims),
            padding=_tuple(padding, dims),
            dilation=_tuple(dilation, dims),
            transposed=True,
            output_padding=_tuple(output_padding, dims),
            groups=groups,
        )
        return contraction(tape, input, weight, bias, geometry, f"conv_transpose{dims}d")


for _dims, _forward, _adjoint in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    _convolution(_forward, _dims)
    _transposed_convolution(_adjoint, _dims)


@norm_rule(F.layer_norm)
def layer_norm(
    tape: Tape, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise the last axes, then scale and shift them."""
    return _scale_and_shift(tape, F.layer_norm(input, normalized_shape, eps=eps), weight, bias)


@norm_rule(F.rms_norm)
def rms_norm(
    tape: Tape, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor:
    """The same without mean and shift."""
    return _scale_and_shift(tape, F.rms_norm(input, normalized_shape, eps=eps), weight, None)


@norm_rule(F.group_norm, torch.group_norm)
def group_norm(
    tape: Tape, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any,
) -> Tensor:  # fmt: skip
    """Normalise groups of channels, then scale and shift channels."""
    normal = F.group_norm(input, num_groups, eps=eps)
    return _scale_and_shift(tape, normal, weight, bias, channels=True)


@norm_rule(torch.instance_norm)
def instance_norm(
    tape: Tape, input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """Normalise each channel of each example, then scale and shift it."""
    if use_input_stats and running_mean is not None:
        raise UnsupportedLayer(_mixes(weight, tape, "InstanceNorm that tracks running statistics"))
    normal = torch.instance_norm(
        input, None, None, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
    )
    return _scale_and_shift(tape, normal, weight, bias, channels=True)


@norm_rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    tape: Tape, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None,
    bias: Any = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Tensor:  # fmt: skip
    """With frozen statistics: scale and shift channels. In training mode: refused."""
    if training:
        raise UnsupportedLayer(_mixes(weight, tape, "BatchNorm in training mode"))
    normal = F.batch_norm(input, running_mean, running_var, eps=eps)
    return _scale_and_shift(tape, normal, weight, bias, channels=True)


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


@norm_rule(F.multi_head_attention_forward)
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
    if bias_k is not None or add_zero_attn or static_k is not None or query.ndim != 3:
        raise UnsupportedLayer(
            f'"{tape.name_of(out_proj_weight)}" belongs to MultiheadAttention with add_bias_kv, '
            "add_zero_attn or input without a batch, which has no rule. Turn that off, or freeze "
            "the layer."
        )
    kind = next(
        type(w)
        for w in (in_proj_weight, q_proj_weight, out_proj_weight, out_proj_bias)
        if isinstance(w, Leaf)
    )
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    biases = (
        [None] * 3
        if in_proj_bias is None
        else tape.derive(torch.chunk, (in_proj_bias, 3), {}, kind)
    )
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    elif query is key and key is value:
        q, k, v = project(tape, q, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
        weights = None
    else:
        weights = tape.derive(torch.chunk, (in_proj_weight, 3), {}, kind)
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


def _scale_and_shift(
    tape: Tape, normal: Tensor, weight: Any, bias: Any, channels: bool = False
) -> Tensor:
    def shaped(parameter: Tensor) -> Tensor:
        if isinstance(parameter, Leaf):
            ndim = normal.ndim - (normal.ndim - 2 if channels else 0)
            row = per_row(tape, parameter, ndim, normal.shape[0], "scale_and_shift")
        else:
            row = parameter
        return row.reshape(*row.shape, *[1] * (normal.ndim - 2)) if channels else row

    if weight is not None:
        normal = normal * shaped(weight)
    return normal if bias is None else normal + shaped(bias)


def _measure(
    part: Part, x: Tensor, weight: Tensor, geometry: Geometry, out: tuple[int, ...], tape: Tape
) -> None:
    """Note what the choice of method depends on."""
    part.geometry, part.groups = geometry, geometry.groups
    part.reads_input = id(x) in tape.inputs or not x.requires_grad
    if geometry.is_linear:
        part.positions, part.inputs, part.outputs = x.numel() // x.shape[-1], x.shape[-1], out[-1]
    else:
        spatial = x.shape[2:] if geometry.transposed else out[2:]
        part.positions = x.shape[0] * torch.Size(spatial).numel()
        part.outputs = weight.shape[0] // geometry.groups
        part.inputs = weight[0].numel()
    part.positions //= max(1, tape.examples)


def _bias_gradient(g: Tensor, geometry: Geometry, examples: int) -> Tensor:
    if geometry.is_linear:
        return g.reshape(examples, -1, g.shape[-1]).to(contract.sum_type(g)).sum(dim=1)
    rows = g.flatten(2).to(contract.sum_type(g)).sum(dim=2)
    return rows.unflatten(0, (examples, -1)).sum(dim=1)


def _product_type(x: Tensor) -> torch.dtype:
    """The type autocast computes products in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _depends_on_batch(tensor: Tensor | None) -> bool:
    return tensor is not None and not isinstance(tensor, Leaf) and tensor.requires_grad


def _tuple(setting: Any, dims: int) -> tuple[int, ...]:
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dims if len(values) == 1 else values


def _pad_same(x: Tensor, kernel: Any, dilation: tuple[int, ...], padding: str) -> Tensor:
    if padding == "valid":
        return x
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return F.pad(x, sides)


def _mixes(weight: Any, tape: Tape, what: str) -> str:
    name = tape.name_of(weight).rpartition(".")[0] or "a layer"
    return (
        f'"{name}" is a {what}: it mixes the examples of a batch, so no per-example gradient '
        "exists. Use --norm group, or freeze it with --norm frozen (model.eval() for that layer)."
    )
