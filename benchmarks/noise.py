"""What `privatize` costs for a large model, step by step, beside one copy of the same numbers.

    python benchmarks/noise.py --device cuda               300 million numbers, as ViT-L has
    python benchmarks/noise.py --device cpu --numbers 1000000

It prints a table and writes nothing. A copy reads and writes every number once.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from sfumato.privacy.budget import Plan
from sfumato.privacy.flat import Sums
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.noise import privatize, to_philox_mean
from sfumato.privacy.seal import tag_of
from sfumato.privacy.secure import to_secure_mean
from sfumato.privacy.session_key import SessionKey

PARAMETERS = 300
PLAN = Plan(noise_multiplier=1.0, max_norm=1.0, expected_batch=1000, rate=0.01, steps=10**6)


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of the work, all of it done, after two trials."""
    times = []
    for trial in range(repeats + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if trial >= 2:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def works(sums: Sums, secret: SessionKey) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    (flat,) = sums.flats
    other, key = torch.empty_like(flat), bytes(32)
    apart = {name: tensor.clone() for name, tensor in sums.items()}
    steps = iter(range(PLAN.steps))
    books = {
        noise: Ledger(LedgerHeader(data="none", delta=1e-6, noise=noise, secret=secret.commitment))
        for noise in ("philox", "chacha20")
    }

    def whole(given: dict[str, torch.Tensor] | Sums, noise: str) -> object:
        return privatize(given, PLAN, books[noise], secret, step=next(steps), stage="train")

    return {
        "a copy": lambda: other.copy_(flat),
        "tag and finite check": lambda: tag_of(sums, secret, ("book", "train", 0)),
        "philox noise": lambda: to_philox_mean(flat, 1.0, 1000.0, key),
        "secure noise": lambda: to_secure_mean(flat, PLAN, key, flat.numel()),
        "adding a chunk": lambda: sums.add(apart),
        "privatize, philox": lambda: whole(sums, "philox"),
        "privatize, secure": lambda: whole(sums, "chacha20"),
        "privatize, secure, tensors apart": lambda: whole(apart, "chacha20"),
    }


def main() -> None:
    """Measure and print."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ask.add_argument("--numbers", type=int, default=300_000_000)
    ask.add_argument("--repeats", type=int, default=10)
    words = ask.parse_args()
    device = torch.device(words.device)
    size = max(1, words.numbers // PARAMETERS)
    like = {f"p{n}": torch.empty(size, device=device) for n in range(PARAMETERS)}
    sums = Sums.zeros(like)
    del like
    sums.flats[0].normal_()
    print(f"{PARAMETERS * size:,} numbers in {PARAMETERS} tensors, {device.type}, ", end="")
    print(f"torch {torch.__version__}; median of {words.repeats}")
    print("\n| what | ms | copies |\n|---|---|---|")
    copy = 0.0
    for name, work in works(sums, SessionKey.draw()).items():
        took = milliseconds(work, device, words.repeats)
        copy = copy or took
        print(f"| {name} | {took:.3f} | {took / copy:.1f} |", flush=True)
        sums.flats[0].zero_()


if __name__ == "__main__":
    main()
