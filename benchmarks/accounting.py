"""How long a calibration takes: `python benchmarks/accounting.py` writes results/accounting.md."""

import platform
import statistics
import subprocess
import time
from pathlib import Path

from sfumato.privacy.budget import Budget, make_plan

PLANS = [
    ("digits", 3, 4_000, 500, 25),
    ("CIFAR-10, 3 epochs of 1,000", 2, 50_000, 1_000, 3),
    ("CIFAR-10, De et al.", 8, 50_000, 4_096, 205),
    ("CIFAR-10, warm-up", 2, 48_000, 4_000, 30),
    ("MNIST, 4 epochs of 128", 1, 60_000, 128, 4),
    ("MNIST, 25 epochs of 2,048", 1, 60_000, 2_048, 25),
    ("Fashion-MNIST, 30 epochs of 50", 1, 60_000, 50, 30),
    ("ImageNet, 10 epochs of 16,384", 8, 1_281_167, 16_384, 10),
]


def seconds(epsilon: float, size: int, batch: int, epochs: float) -> tuple[float, float, int]:
    """Median of three calibrations; the noise found, and the number of steps."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        budget = Budget(epsilon=epsilon, delta=min(1e-5, size**-1.1))
        plan = make_plan(budget, size=size, batch_size=batch, epochs=epochs)
        times.append(time.perf_counter() - start)
    return statistics.median(times), plan.noise_multiplier, plan.steps


def main() -> None:
    """Measure and write the table."""
    make_plan(Budget(epsilon=1, delta=1e-5), size=100)  # imports
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    lines = [
        "# Calibration time",
        "",
        f"`python benchmarks/accounting.py`, commit {commit.stdout.strip()}, 2 cores, "
        f"Python {platform.python_version()}; median of 3, noise for an epsilon by PLD.",
        "",
        "| plan | epsilon | steps | noise multiplier | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, epsilon, size, batch, epochs in PLANS:
        took, noise, steps = seconds(epsilon, size, batch, epochs)
        lines.append(f"| {name} | {epsilon} | {steps} | {noise:.4g} | {took:.2f} |")
        print(lines[-1], flush=True)
    Path("results/accounting.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
