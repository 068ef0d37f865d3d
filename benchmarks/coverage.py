"""Exactness on real architectures: norms and clipped sums against autograd, one loss at a time.

    python benchmarks/coverage.py [NAME ...] [--part 1/2]     then writes results/coverage.md

Every model has random weights, every parameter trained, BatchNorm with the statistics of one batch,
frozen. Results are kept in runs/coverage, a file a model: a sweep that was stopped goes on where it
was, and several parts may run side by side. Delete a file to measure that model again.

The error of a parameter is relative to its own gradient, or to a thousandth of the whole where that
is smaller: gradients that vanish by symmetry (key biases) are rounding noise in both. Where float32
is over 1e-5, the network may be so steep, or an activation so near a kink of ReLU, that rounding
alone shows. Then autograd is measured in the same way: its float32 gradients against float64, and
against those of images that differ in their last bit.
"""

import argparse
import json
import platform
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from families import EXPECTED, LISTED
from timm.models._registry import _deprecated_models
from torch import Tensor, nn

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.errors import UnsupportedLayer

KEPT = Path("runs/coverage")
GOAL, FLOOR, LARGE, NUDGES = 1e-5, 1e-3, 250e6, 4
Loss = Callable[[nn.Module, Tensor], Tensor]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss an example that is neither flat nor wild, whatever random weights do to logits."""
    out = model(x)
    out = out / out.detach().abs().amax(dim=1, keepdim=True).clamp(min=1e-3)
    return (out.sin() * torch.linspace(-1, 2, out.shape[1], dtype=out.dtype)).sum(dim=1)


def build(name: str, **options: Any) -> tuple[nn.Module, int]:
    """The model, and the smallest image size it takes among a few."""
    torch.manual_seed(0)
    for size in (64, 128):
        try:
            model = prepare(timm.create_model(name, num_classes=10, img_size=size, **options))
        except (TypeError, AssertionError, RuntimeError, ValueError):
            break
        if _runs(model, size):
            return model, size
    model = prepare(timm.create_model(name, num_classes=10, **options))
    own = model.default_cfg["input_size"][-1]
    return model, next(size for size in (64, 96, 128, own) if _runs(model, size))


def prepare(model: nn.Module) -> nn.Module:
    """Training mode with frozen BatchNorm and without dropout; no parameter where it starts."""
    model.train()
    for module in model.modules():
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if norm or "drop" in type(module).__name__.lower():
            module.eval()
        if hasattr(module, "drop_rate"):
            module.drop_rate = 0.0
    for parameter in model.parameters():
        if parameter.ndim <= 1 or bool((parameter == 0).all()):
            nn.init.normal_(parameter, float(parameter.detach().mean()), 0.1)
    return model


def settle(model: nn.Module, size: int) -> None:
    """Give BatchNorm the statistics of a batch, as pretrained models have those of their images."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = None
    if norms:
        with torch.no_grad():
            model(torch.randn(8, 3, size, size))
    for norm in norms:
        norm.eval()


def _runs(model: nn.Module, size: int) -> bool:
    try:
        with torch.no_grad():
            return model(torch.zeros(2, 3, size, size)).shape == (2, 10)
    except (RuntimeError, AssertionError, ValueError):
        return False


def compare(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Largest relative errors of norms and of clipped sums, and what the engine did.

    Factors are 1 / norm, so that the sums are of size one. Gradients of one example at a time are
    subtracted from them as they come: what is left is the error.
    """
    clipper = GradientClipper(model, clipping=Clipping(style="auto-v"))
    clipped = clipper.clip(loss_of, (x,), len(x))
    total, named = clipped.total, clipper.parameters
    sizes = {name: float(t.norm()) for name, t in total.items()}
    left = {n: total[n] if n in total else torch.zeros_like(p) for n, p in named.items()}
    norms = torch.zeros(len(x), dtype=torch.float64)
    for i, factor in enumerate(clipped.factors[0].tolist()):
        for name, gradient in zip(named, _gradients(model, named, x, i), strict=True):
            if gradient is not None:
                norms[i] += float(gradient.double().square().sum())
                left[name].sub_(gradient, alpha=factor)
    norms = norms.sqrt()
    worst = {n: float(t.norm()) / max(sizes.get(n, 0.0), FLOOR) for n, t in left.items()}
    where = max(worst, key=worst.__getitem__)
    (parts,) = clipper.layouts.values()
    return {
        "norms": float(((clipped.norms - norms) / norms).abs().max()),
        "sums": worst[where],
        "where": where,
        "rules": Counter(_rule(part) for part in parts),
        "trained": sum(named[n].numel() for n in total),
        "factors": clipped.factors[0].tolist(),
    }


def _gradients(
    model: nn.Module, named: dict[str, nn.Parameter], x: Tensor, i: int
) -> tuple[Tensor | None, ...]:
    loss = loss_of(model, x)[i]
    return torch.autograd.grad(loss, list(named.values()), allow_unused=True)


def _rule(part: Any) -> str:
    return f"{part.operation} {part.method}" if part.kind == "product" else part.operation


def weighted(model: nn.Module, x: Tensor, factors: list[float]) -> dict[str, Tensor]:
    """The clipped sums by autograd alone."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    for i, factor in enumerate(factors):
        for name, gradient in zip(named, _gradients(model, named, x, i), strict=True):
            if gradient is not None:
                total[name].add_(gradient, alpha=factor)
    return total


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The error of the worst parameter."""
    return max(
        float((found[n] - t).norm()) / max(float(t.norm()), FLOOR) for n, t in wanted.items()
    )


def mixes(model: nn.Module, x: Tensor) -> bool:
    """Whether the loss of the first example changes when the second does."""
    with torch.no_grad():
        before, after = loss_of(model, x)[0], loss_of(model, x[[0, 0]])[0]
    return bool((before - after).abs() > 1e-9 * before.abs())


def to_double(model: nn.Module) -> nn.Module:
    """All of it, and the constants that modules keep as plain attributes."""
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(module, key, value.double())
    return model.double()


def in_float64(model: nn.Module, x: Tensor) -> dict[str, float]:
    """The errors in float64: of large models by halves of the parameters, for want of memory."""
    parameters = list(model.parameters())
    large = sum(p.numel() for p in parameters) > LARGE
    middle = len(parameters) // 2
    halves = [parameters[:middle], parameters[middle:]] if large else [parameters]
    found = []
    for half in halves:
        for parameter in parameters:
            parameter.requires_grad_(any(parameter is p for p in half))
        found.append(compare(model, x))
    return {f"{key}64": max(one[key] for one in found) for key in ("norms", "sums")}


def check(name: str, **options: Any) -> dict[str, Any]:
    """One row of the table."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, size = build(name, **options)
        settle(model, size)
        x = torch.randn(2, 3, size, size)
        whole = sum(p.numel() for p in model.parameters())
        row = {"size": size, "parameters": whole} | compare(model, x)
        row["share"] = row.pop("trained") / whole
        steep = row["sums"] > GOAL or row["norms"] > GOAL
        noise: list[float] = []
        if steep:
            by_autograd = weighted(model, x, row["factors"])
            for _ in range(NUDGES):
                nudged = weighted(model, x * (1 + 1e-7 * torch.randn_like(x)), row["factors"])
                noise.append(distance(nudged, by_autograd))
        torch.set_default_dtype(torch.float64)
        try:
            model, x = to_double(model), x.double()
            row["mixes"] = mixes(model, x)
            row |= in_float64(model, x)
            if steep:
                model.requires_grad_(True)
                row["autograd"] = distance(by_autograd, weighted(model, x, row["factors"]))
                row["autograd"] = max(row["autograd"], *noise)
        finally:
            torch.set_default_dtype(torch.float32)
    return row | {"seconds": time.perf_counter() - start}


def architecture(name: str) -> str:
    """The name without what only says where weights come from."""
    return _deprecated_models.get(name, name).partition(".")[0]


def measured(name: str) -> dict[str, Any]:
    """The row of a model, from the last time or now."""
    place = KEPT / f"{architecture(name)}.json"
    if not place.exists():
        try:
            row = check(architecture(name))
        except Exception as problem:  # a model that fails is a row of the table
            row = {"problem": f"{type(problem).__name__}: {problem}"}
            row["refused"] = isinstance(problem, UnsupportedLayer)
        KEPT.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(row | {"commit": COMMIT}))
    return json.loads(place.read_text())


def commit() -> str:
    """The code that was measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


COMMIT = commit()
"""When this process began: it goes on with the code it has read."""


def main() -> None:
    """Check the models that have not been, and write the table of all."""
    from coverage_table import write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="timm models; all without")
    parser.add_argument("--part", default="1/1", help="which part of the sweep to do")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    for name in (options.names or LISTED + EXPECTED)[part - 1 :: parts]:
        row = measured(name)
        print(name, {k: v for k, v in row.items() if k != "rules"}, flush=True)
    write(KEPT, f"CPU, torch {torch.__version__}, timm {timm.__version__}, "
                f"Python {platform.python_version()}", architecture)  # fmt: skip


if __name__ == "__main__":
    main()
