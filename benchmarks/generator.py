"""The generator of `sfumato warmup`: images a second in training, and samples a second, by width.

    python benchmarks/generator.py --device cuda [--widths 32 64 128] [--ways eager compiled]

The network of the settings' defaults, on random pixels of 32 x 32 x 3 and ten classes: what the
images show does not matter to the time. A step of Adam on a batch of 512, captured as in training;
samples in batches of 500 by Heun's method (35 evaluations of the network) and by DPM-Solver++ (18).
Medians of rounds; the first round, which compiles and records, is told apart.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from sfumato.data.images import Images
from sfumato.diffusion.generator import new_denoiser, new_train_state, new_turn
from sfumato.diffusion.generator_data import GeneratorData
from sfumato.diffusion.sampler import draw_images
from sfumato.settings.diffusion import Diffusion
from sfumato.training.memory import release_memory
from sfumato.training.process_group import ProcessGroup
from sfumato.training.setup import quick_precision

ROUNDS, EACH = 5, 20
"""Rounds, and steps in each."""


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work takes."""
    before = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before


def measure(width: int, way: str, words: argparse.Namespace) -> str:
    """One row of the table."""
    device = torch.device(words.device)
    release_memory()  # the row before has ended; its peak is not that of this one
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    settings = replace(Diffusion(), gen_width=width, gen_batch=words.batch)
    shape = (3, words.size, words.size)
    images = Images(
        pixels=torch.randint(256, (2000, *shape), generator=torch.manual_seed(0)).to(torch.uint8),
        labels=torch.arange(2000) % 10, classes=tuple("0123456789"), name="noise", private=False,
    )  # fmt: skip
    labels, data = images.labels, GeneratorData(images, images.select(range(200)), device)
    torch.manual_seed(0)
    train_state = new_train_state(new_denoiser(settings, shape, 10), settings, device)
    if way == "compiled":
        train_state.denoiser.compile()
    precision = quick_precision(device)
    turn = new_turn(train_state, data, settings, precision, ProcessGroup())

    def steps() -> None:
        for step in range(words.steps):
            turn(0, step)

    first = timed(steps, device)
    trained = (
        words.batch * words.steps / statistics.median(timed(steps, device) for _ in range(ROUNDS))
    )
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    train_state.denoiser.eval().requires_grad_(False)
    drawn = {}
    for solver in ("heun", "dpm"):

        def draw(solver: str = solver) -> None:
            count = words.samples
            draw_images(
                train_state.denoiser, labels[:count], torch.arange(count), shape, solver=solver,
                batch_size=count, precision=precision,
            )  # fmt: skip

        timed(draw, device)
        drawn[solver] = words.samples / statistics.median(timed(draw, device) for _ in range(3))
    size = sum(p.numel() for p in train_state.denoiser.parameters()) / 1e6
    return (
        f"| {width} | {size:.1f} | {way} | {trained:.0f} | {memory:.1f} | {drawn['heun']:.0f} | "
        f"{drawn['dpm']:.0f} | {first:.0f} |"
    )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--ways", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=EACH)
    parser.add_argument("--samples", type=int, default=500)
    words = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    kind = torch.cuda.get_device_name() if words.device == "cuda" else "CPU"
    print(f"{kind}, torch {torch.__version__}, {words.size} px, batch {words.batch}")
    print(
        "| width | parameters, M | way | images/s | peak, GiB | samples/s, Heun 18 | samples/s, "
        "DPM 18 | first round, s |\n|---|---|---|---|---|---|---|---|"
    )
    for width in words.widths:
        for way in words.ways:
            print(measure(width, way, words), flush=True)


if __name__ == "__main__":
    main()
