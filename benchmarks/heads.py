"""Shadow heads: how many a second, against a plain PyTorch loop, in one run.

    python benchmarks/heads.py                    one thread, CPU time (others disturb it least)
    python benchmarks/heads.py --threads 2        time on the clock
    python benchmarks/heads.py --device cuda      how long 2.56 million heads take by the dual

All methods of a case take turns, median of the rounds. The loop is how the published code trains
heads, less what is not training (data loaders, a validation pass for each head, printing): nn,
autograd and torch.optim, one head after the other. Under DP there are two loops: one by hand, which
knows that the norms of a linear layer's gradients have a closed form, and Opacus, as published
(where it is installed). Features are noise: their values do not matter to the time.
"""

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.attacks.batched_heads import train_primal
from sfumato.attacks.head_randomness import BLOCK, draw_chance
from sfumato.attacks.heads import HeadRecipe
from sfumato.attacks.shadow_heads import ShadowHeads

ROUNDS, LOOPED, DUAL = 7, 10, 4 * BLOCK
"""Rounds, and heads in each of them: by a loop, by the dual. The primal trains one block."""
HEADS, BATCH = 2_560_000, 2**16
"""Heads on a GPU, in all and in a batch."""
MNIST = HeadRecipe(lr=0.01, weight_decay=1e-5, init_std=0.002)
CIFAR = HeadRecipe(
    lr=0.01, weight_decay=1e-4, init_std=0.0002, epochs_base=38, epochs_per_image=10
)  # fmt: skip
CASES: dict[str, tuple[int, HeadRecipe]] = {
    "MNIST N=10": (256, MNIST),
    "MNIST N=40": (256, replace(MNIST, class_size=4)),
    "CIFAR N=10": (1280, CIFAR),
    "DP MNIST N=10": (256, replace(MNIST, rate=0.5, noise_multiplier=1.82, max_norm=4.0)),
    "DP MNIST N=40": (
        256,
        replace(MNIST, class_size=4, rate=0.5, noise_multiplier=5.21, max_norm=4.0),
    ),
    "DP CIFAR N=10": (1280, replace(CIFAR, rate=0.5, noise_multiplier=1.48, max_norm=1.2)),
}


def table(d: int, rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Non-negative noise for features, and labels in turn."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(rows, d, generator=generator).relu() / d**0.5
    return features.to(device), torch.arange(rows) % 10


def new_head(recipe: HeadRecipe, d: int) -> nn.Linear:
    """A head at its start."""
    net = nn.Linear(d, recipe.classes)
    nn.init.normal_(net.weight, std=recipe.init_std)
    nn.init.zeros_(net.bias)
    return net


def sgd(recipe: HeadRecipe, net: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the recipe."""
    return torch.optim.SGD(net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)


def loop_plain(recipe: HeadRecipe, x: Tensor, y: Tensor) -> None:
    """One head without privacy."""
    net = new_head(recipe, x.shape[1])
    optimizer = sgd(recipe, net)
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def loop_private(recipe: HeadRecipe, x: Tensor, y: Tensor) -> None:
    """One head by DP-SGD, with norms in closed form: clipping is a weight on each loss."""
    assert recipe.max_norm is not None
    net = new_head(recipe, x.shape[1])
    optimizer = sgd(recipe, net)
    squares = x.square().sum(1) + 1
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        present = torch.rand(len(x)) < recipe.rate
        logits = net(x)
        with torch.no_grad():
            residual = logits.softmax(1) - F.one_hot(y, recipe.classes)
            norms = (residual.square().sum(1) * squares).sqrt()
            factors = (recipe.max_norm / norms).clamp(max=1) * present
        (F.cross_entropy(logits, y, reduction="none") * factors).sum().backward()
        for p in net.parameters():
            assert p.grad is not None
            noise = torch.randn_like(p) * (recipe.noise_multiplier * recipe.max_norm)
            p.grad.add_(noise).div_(recipe.divisor)
        optimizer.step()


def loop_opacus(recipe: HeadRecipe, x: Tensor, y: Tensor) -> None:
    """One head by Opacus's gradients and optimizer, on Poisson batches."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    assert recipe.max_norm is not None
    net = GradSampleModule(new_head(recipe, x.shape[1]))
    optimizer = DPOptimizer(
        sgd(recipe, net), noise_multiplier=recipe.noise_multiplier,
        max_grad_norm=recipe.max_norm, expected_batch_size=int(recipe.divisor),
    )  # fmt: skip
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        present = torch.rand(len(x)) < recipe.rate
        # Opacus undoes the mean, of as many as there are: a batch of none would be 0/0.
        present[0] |= not present.any()
        F.cross_entropy(net(x[present]), y[present]).backward()
        optimizer.step()


def primal_block(shadow_heads: ShadowHeads) -> None:
    """One block of shadow heads by the primal."""
    x = shadow_heads.features[shadow_heads.members(0, BLOCK)]
    chance = draw_chance(
        shadow_heads.recipe,
        shadow_heads.dimension,
        shadow_heads.seed,
        range(1),
        shadow_heads.features,
    )
    train_primal(shadow_heads.recipe, x, shadow_heads.recipe.labels, chance)


def measure(case: str, clock: Callable[[], float]) -> dict[str, float]:
    """Milliseconds a head of each method."""
    d, recipe = CASES[case]
    shadow_heads = ShadowHeads(*table(d, 10_000, "cpu"), recipe, seed=0)
    x, y = shadow_heads.features[shadow_heads.members(0, 1)[0]], recipe.labels
    loops = {"loop": loop_private if recipe.noise_multiplier else loop_plain}
    if recipe.noise_multiplier and find_spec("opacus"):
        loops["Opacus loop"] = loop_opacus
    jobs: dict[str, tuple[int, Callable[[], object]]] = {
        name: (LOOPED, lambda train=train: [train(recipe, x, y) for _ in range(LOOPED)])
        for name, train in loops.items()
    }
    jobs["primal"] = BLOCK, lambda: primal_block(shadow_heads)
    jobs["dual"] = DUAL, lambda: shadow_heads.heads(0, DUAL)
    _ = shadow_heads.kind
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(ROUNDS + 1):
        for name, (count, job) in jobs.items():
            before = clock()
            job()
            if turn:
                times[name].append(1000 * (clock() - before) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(threads: int) -> None:
    """Print the table of the CPU."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    unit = "CPU time" if threads == 1 else "time on the clock"
    print(f"{platform.machine()}, torch {torch.__version__}, {threads} thread(s), {unit}.\n")
    print(
        "| heads | loop, ms | Opacus loop, ms | primal, ms | dual, ms | dual, heads/s | loop/dual |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        found = measure(case, clock)
        loop, dual = found["loop"], found["dual"]
        opacus = f"{found['Opacus loop']:.1f}" if "Opacus loop" in found else "-"
        row = f"{loop:.2f} | {opacus} | {found['primal']:.2f} | {dual:.3f} | {1000 / dual:,.0f}"
        print(f"| {case} | {row} | {loop / dual:.0f} |", flush=True)


def time_shadow_heads(device: str) -> None:
    """Print how long the whole sequence takes on a GPU; heads are made and let go."""
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}.\n")
    print("| heads | seconds for 2.56 million | heads/s |")
    print("|---|---|---|")
    for case, (d, recipe) in CASES.items():
        shadow_heads = ShadowHeads(*table(d, 50_000, device), recipe, seed=0)
        shadow_heads.batch(0, BATCH)
        torch.cuda.synchronize(device)
        before = time.perf_counter()
        for first in range(0, HEADS, BATCH):
            shadow_heads.heads(first, min(BATCH, HEADS - first))
        torch.cuda.synchronize(device)
        taken = time.perf_counter() - before
        print(f"| {case} | {taken:.1f} | {HEADS / taken:,.0f} |", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    # Opacus's hooks warn that features need no gradient.
    warnings.filterwarnings("ignore", message="Full backward hook")
    if arguments.device == "cpu":
        compare(arguments.threads)
    else:
        time_shadow_heads(arguments.device)


if __name__ == "__main__":
    main()
