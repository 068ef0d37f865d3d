"""Which way each layer takes, by cost, and the table that says so.

Per layer, with T positions, D inputs and P outputs (of a group), forming the per-example gradient
costs what the ordinary weight gradient costs, and replaces it: nothing is lost but memory for P D
numbers an example. Gram matrices cost T T (E + P) on top of it and need no such memory (E is D, or
less where the raw Gram matrix serves). So early convolutions, with many positions and small
weights, store; late and linear layers take the ghost norm. (Bu et al. 2022 chose by memory alone;
book-keeping makes the stored gradient free.)
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import nn

from sfumato.clipping.param_use import ParamUse

MODES = ("ghost_mixed", "ghost", "non-ghost")


def choose_methods(parts: Sequence[ParamUse], mode: str) -> None:
    """Set the method of every part.

    A parameter that is used several times, or through a computation, needs its per-example
    gradient itself: the norm of a sum is not the sum of norms.
    """
    joint = joint_names(parts)
    for part in parts:
        if part.kind != "product":
            continue
        itself = _must_store(part) or not joint.isdisjoint(part.sources)
        gram = mode == "ghost" or (mode == "ghost_mixed" and _gram_is_cheaper(part))
        part.method = "ghost" if gram and not itself else "store"


def joint_names(parts: Sequence[ParamUse]) -> set[str]:
    """Parameters whose per-example gradient is a sum of several uses, or pulled back from one."""
    uses = Counter(name for part in parts for name in part.sources)
    computed = {
        name
        for part in parts
        if part.root is None and part.standardised is None
        for name in part.sources
    }
    return computed | {name for name, count in uses.items() if count > 1}


def layer_groups(names: Iterable[str], parts: Sequence[ParamUse]) -> tuple[dict[str, int], int]:
    """A group for each layer; layers whose parameters meet the batch as one value share one."""
    leader = {name: name.rpartition(".")[0] for name in names}
    for part in parts:
        layers = {leader[name] for name in part.sources}
        first = min(layers, default="")
        leader = {name: first if layer in layers else layer for name, layer in leader.items()}
    order = {layer: i for i, layer in enumerate(dict.fromkeys(leader.values()))}
    return {name: order[layer] for name, layer in leader.items()}, max(1, len(order))


GRAM_WORK, STORE_WORK = 400, 125
"""Work per entry of a Gram matrix, and per number of a stored gradient, for passing through memory;
in multiply-adds. Measured on a CPU (2 cores, AVX-512), where memory is dearest."""


def _gram_is_cheaper(part: ParamUse) -> bool:
    t, d, p = part.positions, part.inputs, part.outputs
    if part.on_gpu:
        # There Gram matrices stay on the chip, and what is stored replaces the output gradient.
        return 2 * t * t <= d * p and t < d
    return t * t * (part.gram_depth + p + GRAM_WORK) < STORE_WORK * d * p


def _must_store(part: ParamUse) -> bool:
    """Whether no Gram formula is at hand: for standardised weights there is one for convolutions
    whose output is still there on the way back."""
    if part.standardised is None:
        return False
    geometry = part.geometry
    plain = geometry is not None and not geometry.is_linear and not geometry.transposed
    return not plain or part.groups > 1 or part.output_lost


def explain(model: nn.Module, shape: tuple[int, ...], mode: str = "ghost_mixed") -> str:
    """The table for a model that takes images of `shape` (channels, height, width)."""
    from sfumato.clipping.clip import GradientClipper

    clipper = GradientClipper(model, mode)
    x = torch.zeros(2, *shape)
    clipper.clip(lambda model, x: model(x).flatten(1).sum(dim=1), (x,), 2)
    (parts,) = clipper.layouts.values()
    return explain_layout(parts, model)


def explain_layout(parts: Sequence[ParamUse], model: nn.Module) -> str:
    """A table: for each use of a parameter its method, work, memory and share of the model."""
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lines = [
        f"{'parameter':<44} {'operation':<16} {'method':<9} {'T':>6} {'D':>6} {'P':>6} "
        f"{'MFLOP':>9} {'extra':>7} {'KB kept':>9} {'share':>7}"
    ]
    plain = added = 0.0
    for part in parts:
        work, extra, kept = part_cost(part)
        plain, added = plain + work, added + extra
        name = part.path if len(part.path) <= 44 else "…" + part.path[-43:]
        method = (
            part.method if part.kind == "product" else "rows" if part.kind == "rows" else "keep"
        )
        lines.append(
            f"{name:<44} {part.operation:<16} {method:<9} {part.positions:>6} {part.inputs:>6} "
            f"{part.outputs:>6} {_flops(part, work):>9} {_percent(extra, work):>7} "
            f"{kept / 1e3:>9.1f} "
            f"{_percent(prod(part.shape), total):>7}"
        )
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    lines.append(
        f"{len({p.path for p in parts})} parameters trained, {len(frozen)} frozen; per example "
        f"{plain / 1e6:.1f} MFLOP of products in plain training, predicted private cost "
        f"{1 + added / plain if plain else 1:.3f} times that."
    )
    without = sorted({part.path for part in parts if not part.has_rule})
    if without:
        lines.append(
            f"Not in these numbers: {', '.join(without[:3])}{' ...' if len(without) > 3 else ''}. "
            "There is no rule for what uses them, so it runs once per example, which can be the "
            "slowest part of all. Write a rule with @layer_rule (docs/extend/layer-rule.md)."
        )
    return "\n".join(lines)


def part_cost(part: ParamUse) -> tuple[float, float, float]:
    """FLOPs of plain training, FLOPs on top of it, and bytes kept: for one example."""
    size = 4.0 * prod(part.shape)
    if part.kind != "product":
        return 0.0, 0.0, size
    t, d, p, g = part.positions, part.inputs, part.outputs, part.groups
    work = 6.0 * t * d * p * g
    if part.method == "ghost":
        return work, 2.0 * t * t * (part.gram_depth + p) * g, 4.0 * t * p * g
    return work, 2.0 * d * p * g, size


def _flops(part: ParamUse, work: float) -> str:
    return f"{work / 1e6:.2f}" if part.has_rule else "unknown"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
