"""Where a private step's extra time goes, layer by layer: `benchmarks/gpu.py --layers`.

A forward pass of the real model and batch says what every linear layer and convolution reads, in
which type and order, and which method its norms take. Layers alike are one group. For each the same
functions that a step calls run alone, on random tensors of these shapes: the plain gradient of the
weight, and in its place the norms and the sum of clipped gradients. On a GPU calls are captured in
a CUDA graph, so nothing waits for Python. Biases, normalisation and tokens are not looked at.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_cases import Case, Way
from gpu_measure import Record, in_few_words
from gpu_steps import private_clip
from torch import Tensor

from sfumato.clipping import arithmetic, grams, layer_algebra, standardised
from sfumato.clipping.clip import GradientClipper, kind_of_batch
from sfumato.clipping.geometry import WeightGeometry
from sfumato.clipping.linear_like import LinearWithNorms
from sfumato.clipping.method_choice import part_cost
from sfumato.clipping.param_use import ParamUse
from sfumato.training.memory import release_memory

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor."""
BACKWARD = f"{LinearWithNorms.__name__}Backward"
ROUNDS = 3


class Layer(NamedTuple):
    """What the time of a layer depends on; layers that are equal in it are one group."""

    x: Form
    weight: Form
    geometry: WeightGeometry
    method: str
    standardised: float | None
    examples: int


def measure_layers(case: Case, way: Way, device: torch.device) -> Iterator[Record]:
    """One finding: for each group of layers what it is, and its times in ms."""
    finding: Record = {"kind": "layers", "method": "private"}
    try:
        found = layers_of(case, way, device)
        counts = Counter(layer for layer, _ in found)
        first = dict(reversed(found))
        release_memory()
        groups = [
            {"count": count, **described(layer, first[layer]), **times_of(layer, device)}
            for layer, count in counts.items()
        ]
        yield {**finding, "batch": case.batch, "groups": groups}
    except Exception as problem:
        yield {**finding, "error": in_few_words(problem)}


def layers_of(case: Case, way: Way, device: torch.device) -> list[tuple[Layer, ParamUse]]:
    """Every use of a layer in one forward pass of the whole batch, in order."""
    model, inputs = case.model(device, way), case.inputs(case.batch, device, way)
    losses = case.losses(device, low=way.low)
    clipper, _ = private_clip(model, losses, inputs, way)
    key = kind_of_batch(inputs, case.batch)
    with clipper.recording(case.batch, key) as tape:
        out = losses(model, *tape.mark(inputs))
    parts = {part.path: part for part in clipper.layouts[key] if part.kind == "product"}
    found = []
    for node in contractions(out):
        part = parts.get(name_of(node, clipper))
        if part is None:
            continue  # its weight is frozen
        x, weight, *_ = node.saved_tensors
        plan = node.plan
        settings = (plan.geometry, plan.method, part.standardised, plan.examples)
        found.append((Layer(form(x), form(weight), *settings), part))
    return found


def contractions(out: Tensor) -> list[Any]:
    """The nodes of a graph in which a weight meets the batch, in the order they were made."""
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    found = [node for node in seen if type(node).__name__ == BACKWARD]
    return sorted(found, key=lambda node: node._sequence_nr())


def name_of(node: Any, clipper: GradientClipper) -> str:
    """The parameter that the weight of a node comes from."""
    names = {id(parameter): name for name, parameter in clipper.parameters.items()}
    waiting = [node.next_functions[1][0]]
    while waiting:
        node = waiting.pop()
        if node is not None:
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                return name
            waiting += [before for before, _ in node.next_functions]
    return ""


def form(tensor: Tensor) -> Form:
    """What is needed to make a tensor like this one."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def described(layer: Layer, part: ParamUse) -> Record:
    """A group for the table; GFLOP on top of plain training are those of the whole batch."""
    _, extra, _ = part_cost(part)
    return {
        "layer": part.path.removesuffix(".weight"),
        "method": layer.method,
        "T": part.positions,
        "D": part.inputs,
        "P": part.outputs,
        "G": part.groups,
        "gflop": layer.examples * extra / 1e9,
    }


def times_of(layer: Layer, device: torch.device) -> dict[str, float]:
    """Milliseconds: the plain gradient of the weight; ours for the sum, and for the norms."""
    torch.manual_seed(0)
    x, weight = like(layer.x, device), like(layer.weight, device)
    shape = layer_algebra.output_shape(x, weight, layer.geometry)
    g = layer_algebra.prepare_input(torch.randn(shape, device=device), x, x.dtype)
    factors = torch.rand(layer.examples, device=device)
    norms, sums = private_work(layer, x, g, factors, weight)
    return {
        "plain": milliseconds(lambda: plain_gradient(x, g, weight, layer.geometry), device),
        "sums": milliseconds(sums, device),
        "norms": milliseconds(norms, device),
    }


def plain_gradient(x: Tensor, g: Tensor, weight: Tensor, geometry: WeightGeometry) -> Tensor:
    """The gradient of the weight as autograd computes it."""
    if geometry.is_linear:
        return g.flatten(0, -2).mT @ x.flatten(0, -2)
    mask = [False, True, False]
    return torch.ops.aten.convolution_backward(g, x, weight, None, *geometry, mask)[1]


def private_work(
    layer: Layer, x: Tensor, g: Tensor, factors: Tensor, weight: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What a step does for the norms, and for the sum; stored gradients are formed for the sum."""
    geometry, examples, eps = layer.geometry, layer.examples, layer.standardised
    gradients = partial(layer_algebra.per_example_gradients, x, g, weight, geometry, examples)
    if layer.method == "store":
        stored = gradients()
        norms = partial(arithmetic.square_norm, stored)
        if eps is not None:
            norms = partial(standardised.standardised_square_norm, stored, weight.float(), eps)
        return norms, lambda: arithmetic.weighted_sum(gradients(), factors)
    norms = partial(grams.ghost_norm, x, g, weight, geometry, examples)
    if eps is not None:
        scale, y = standardised.scale_of_rows(weight.float(), eps), torch.randn_like(g)
        settings = (scale, weight, None, geometry, examples)
        norms = partial(standardised.standardised_ghost_norm, x, g, y, *settings)
    return norms, partial(layer_algebra.weighted_gradient, x, g, factors, weight, geometry)


def like(wanted: Form, device: torch.device) -> Tensor:
    """Random numbers in this form."""
    shape, strides, dtype = wanted
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).normal_()


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """The time of a call: on a GPU by events around a graph of calls, elsewhere by the clock."""
    work()
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        return float(do_bench_cudagraph(work, return_mode="median"))  # pyright: ignore
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return min(times)
