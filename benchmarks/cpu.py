"""What a private step costs on a CPU, against plain training and Opacus, in one run.

    python benchmarks/cpu.py            writes results/cpu.md (needs `pip install opacus` beside)
    python benchmarks/cpu.py --one-thread --methods plain ghost_mixed

Time: all methods of a case take turns in one process, median of the rounds. Memory: each method
once in a process of its own, peak minus what was there before the step. A step is forward,
backward and clipping (noise and optimizer cost the same for all). With --one-thread it is the CPU
time of one thread, which others on the machine disturb less than the time on the clock.
"""

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.models.normalise import replace_batch_norm
from sfumato.models.wrn import WideResNet

ROUNDS, SLOW, LIMIT = 9, 15.0, 120
"""Rounds; a method whose first step takes SLOW seconds is not asked again, LIMIT ends it."""
CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "ResNet-18-GN, 32": (
        lambda: replace_batch_norm(timm.create_model("resnet18", num_classes=10)),
        32,
        64,
    ),
    "ViT-Ti/16, 64": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10),
        64,
        64,
    ),
    "WRN-16-4 (WS+GN), 32": (lambda: WideResNet(10), 32, 32),
}
METHODS = (
    "plain", "ghost_mixed", "half batches", "ghost", "non-ghost", "Opacus",
    "Opacus ghost",
)  # fmt: skip


def make_step(method: str, case: str) -> Callable[[], object]:
    """One step of a method, ready to be called."""
    build, size, n = CASES[case]
    torch.manual_seed(0)
    model = build()
    x, y = torch.randn(n, 3, size, size), torch.randint(0, 10, (n,))

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    if method == "plain":
        parameters = list(model.parameters())
        return lambda: torch.autograd.grad(loss_of(model, x, y).mean(), parameters)
    if method.startswith("Opacus"):
        return opacus_step(model, x, y, clipper=method.endswith("ghost"))
    if method == "half batches":
        return in_halves(GradientClipper(model), loss_of, x, y)
    clipper = GradientClipper(model, method)
    return lambda: clipper.clip(loss_of, (x, y), n)


def in_halves(
    clipper: GradientClipper, loss_of: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> Callable[[], object]:
    """The same sum with half the physical batch: two chunks, one after the other.

    They are added up where a training step adds up its chunks, however many: that is made before.
    """
    half, total = len(x) // 2, {name: torch.ones_like(p) for name, p in clipper.parameters.items()}

    def add(more: dict[str, torch.Tensor]) -> None:
        for name in total:
            total[name] += more[name]

    def step() -> None:
        for rows in (slice(None, half), slice(half, None)):
            add(clipper.clip(loss_of, (x[rows], y[rows]), half).total)

    return step


def opacus_step(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, clipper: bool, noise: float = 0.0
) -> Callable[[], object]:
    """The same step by Opacus: in-place activations off, as it needs."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    settings = {"noise_multiplier": noise, "max_grad_norm": 1.0, "poisson_sampling": False}
    if clipper:
        made = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader,
            criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost", **settings,
        )  # fmt: skip
        model, optimizer, criterion, _ = made
    else:
        made = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, **settings
        )
        (model, optimizer, _), criterion = made, nn.CrossEntropyLoss()

    def step() -> None:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_memory(method: str, case: str) -> float:
    """Megabytes at the peak of one step, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--memory", method, case],
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout) if done.returncode == 0 else float("nan")


def measure_memory(method: str, case: str) -> None:
    """Print what `peak_memory` reads."""
    step = make_step(method, case)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (Linux)
    before = _status("VmRSS")
    step()
    step()
    print(json.dumps((_status("VmHWM") - before) / 1024))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def first_time(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """How long the first step takes; TimeoutError when it does not end."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    start = clock()
    try:
        step()
    finally:
        signal.alarm(0)
    return clock() - start


def main(methods: list[str], *, one_thread: bool) -> None:
    """Measure all cases and write the table."""
    warnings.filterwarnings("ignore")
    clock = time.thread_time if one_thread else time.perf_counter
    if one_thread:
        torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    spent = "CPU time of one thread" if one_thread else "time on the clock, 2 cores"
    lines = [
        "# A private step on the CPU",
        "",
        f"`python benchmarks/cpu.py`, commit {commit.stdout.strip()}, {spent}, torch "
        f"{torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}; "
        f"float32, median of {ROUNDS} rounds in which the methods take turns. Ratios of time and "
        "of peak memory to plain training.",
        "",
        "| case (batch) | " + " | ".join(methods) + " |",
        "|---|" + "---|" * len(methods),
    ]
    for case, (_, _, n) in CASES.items():
        steps, failed = {}, {}
        times: dict[str, list[float]] = {}
        for method in methods:
            try:
                steps[method] = make_step(method, case)
                times[method] = [first_time(steps[method], clock)]
            except Exception as problem:  # a peer that fails is a cell of the table
                steps.pop(method, None)
                failed[method] = type(problem).__name__
        quick = [method for method in steps if times[method][0] < SLOW]
        times.update({method: [] for method in quick})
        for _ in range(ROUNDS):
            for method in quick:
                start = clock()
                steps[method]()
                times[method].append(clock() - start)
        plain = statistics.median(times["plain"])
        base = peak_memory("plain", case)
        cells = [f"{1000 * plain:.0f} ms, {base:.0f} MB"]
        for method in methods[1:]:
            if method in failed:
                cells.append(f"fails ({failed[method]})")
                continue
            ratio = statistics.median(times[method]) / plain
            cells.append(f"{ratio:.2f}x, {peak_memory(method, case) / base:.2f}x")
        lines.append(f"| {case} ({n}) | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    page = Path("results/cpu.md")
    _, end, kept = page.read_text().partition(
        "\n\nThese are gradients"
    )  # what this does not measure
    page.write_text("\n".join(lines) + (end + kept or "\n"))


if __name__ == "__main__":
    if "--memory" in sys.argv:
        measure_memory(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--one-thread", action="store_true")
        parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
        chosen = parser.parse_args()
        main(chosen.methods, one_thread=chosen.one_thread)
