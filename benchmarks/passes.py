"""The private stage of `sfumato warmup`: passes of WRN-16-4 a second, against plain and Opacus.

    python benchmarks/passes.py --device cuda [--compile] [--float32]   (Opacus only if it is there)

A pass is one view of one image, forward and backward, 32 x 32 x 3: a step of 4,000 images of 16
views has 64,000. Views are drawn and normalised beforehand; a step is what `sfumato train --augmult
16` does with a chunk of them: one clipped gradient an image, that of the mean loss of its views.
Opacus does it as the published code did, view after view, in float32 with TF32 (it knows no
weight standardisation, so it differentiates such layers by functorch). All methods in one run, in
turns; medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.ghost.clip import Ghost
from sfumato.nn.wrn import WideResNet

ROUNDS = 5
Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


def losses_of(views: int, device: torch.device, low: bool) -> Losses:
    """The mean loss of an image's views, in bf16 if `low`."""

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            found = model(x).float()
        each = F.cross_entropy(found, y.repeat_interleave(views), reduction="none")
        return each.unflatten(0, (-1, views)).mean(dim=1)

    return losses


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, views: int) -> Callable[[], object]:
    """One clipped sum by Opacus, view after view."""
    from opacus.grad_sample import GradSampleModule

    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # pyright: ignore
    wrapped: Any = GradSampleModule(model, loss_reduction="sum")
    parts = x.unflatten(0, (-1, views)).transpose(0, 1).contiguous()

    def step() -> None:
        total: dict[Any, Tensor] = {}
        for view in parts:
            F.cross_entropy(wrapped(view), y, reduction="sum").backward()
            for p in wrapped.parameters():
                found = p.grad_sample / views
                total[p] = total[p] + found if p in total else found
                p.grad_sample = p.grad = None
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in total.values()]).norm(dim=0)
        factors = (1 / norms.clamp(min=1e-6)).clamp(max=1)
        for p, g in total.items():
            p.grad = torch.einsum("n...,n->...", g, factors)

    return step


def steps_of(words: argparse.Namespace) -> dict[str, tuple[Callable[[], object], int]]:
    """Each method, and how many images its step has."""
    device, views = torch.device(words.device), words.views
    losses = losses_of(views, device, not words.float32)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format

    def model() -> nn.Module:
        torch.manual_seed(0)
        return WideResNet(10).to(device).to(memory_format=layout)  # pyright: ignore

    def batch(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count * views, 3, 32, 32, device=device).to(memory_format=layout)
        return x, torch.randint(0, 10, (count,), device=device)

    def plain(compiled: bool) -> Callable[[], object]:
        net, data = model(), batch(words.images)
        if compiled:
            net.compile()
        return lambda: torch.autograd.grad(losses(net, *data).mean(), list(net.parameters()))

    def private(compiled: bool) -> Callable[[], object]:
        ghost, data = Ghost(model(), "ghost_mixed"), batch(words.images)
        ghost.clip(losses, data, words.images)
        clip = ghost.clip
        if compiled:
            torch._dynamo.config.trace_autograd_ops = True  # pyright: ignore
            clip = torch.compile(ghost.clip, fullgraph=True)
        return lambda: clip(losses, data, words.images)

    found = {"plain": (plain(False), words.images), "private": (private(False), words.images)}
    if words.compile:
        found["plain, compiled"] = (plain(True), words.images)
        found["private, compiled"] = (private(True), words.images)
    if find_spec("opacus"):
        count = min(words.images, words.opacus_images)
        found["Opacus"] = (opacus_step(model(), *batch(count), views), count)
    return found


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--views", type=int, default=16)
    parser.add_argument("--opacus-images", type=int, default=256)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--float32", action="store_true", help="plain and ours too")
    words = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    wait = torch.cuda.synchronize if words.device == "cuda" else lambda: None
    times: dict[str, list[float]] = {}
    steps = steps_of(words)
    for turn in range(ROUNDS + 2):
        for name, (step, _) in steps.items():
            wait()
            before = time.perf_counter()
            step()
            wait()
            if turn > 1:
                times.setdefault(name, []).append(time.perf_counter() - before)
    kind = torch.cuda.get_device_name() if words.device == "cuda" else "CPU"
    print(f"{kind}, torch {torch.__version__}, {words.images} images of {words.views} views")
    print("| method | passes/s | 30 epochs of 48,000 images, minutes |\n|---|---|---|")
    for name, (_, count) in steps.items():
        rate = count * words.views / statistics.median(times[name])
        print(f"| {name} | {rate:,.0f} | {30 * 48_000 * words.views / rate / 60:.1f} |")


if __name__ == "__main__":
    main()
