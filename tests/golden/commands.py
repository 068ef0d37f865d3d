"""One small seeded run of every command, on digits that come with the package."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from golden import adapter

DIGITS = "--data digits@0-2 --image-size 16 --device cpu"
SMALL = f"{DIGITS} --model group-cnn-small"
PUBLIC = "--public digits@5-7"
GAN = (
    "--iterations 4 --gan-batch 16 --d-steps 1 --gan-width 4 --latent 8 --look-every 2 "
    "--patience 0 --restarts 2 --z-steps 3 --no-mirror"
)
DIFFUSION = (
    "--gen-width 8 --gen-multipliers 1 --gen-blocks 1 --gen-images 64 --gen-batch 16 --gen-ramp 16 "
    "--gen-half-life 32 --no-gen-mirror --gen-looks 2 --gen-patience 0 --gen-held-out 0.2"
)
MATCHING = (
    "--k 2 --match-batch 20 --student group-cnn-small --student-epochs 1 --student-batch 20 "
    "--public-images 60"
)
HEADS = (
    "--data digits@0-3 --classes 4 --image-size 16 --device cpu --base group-cnn-small --lr 0.1 "
    "--feature-norm 10 --base-epochs 0.2 --base-share 0.1 --base-tries 1 --gate 0 --steps 3 "
    "--batch-heads 8 --width 2 --stats-heads 256 --trials 20"
)
PRIVATE = f"{SMALL} --epsilon 8 --batch-size 60 --physical-batch-size 40 --steps 4 --lr 1"
PLAIN = f"{SMALL} --mode non-private --batch-size 60 --steps 6 --optimizer adam --lr 0.003"

COMMANDS = {
    "train": f"train {PRIVATE} --crop 1 --augmult 2 --ema 0.5 --noise-seed 1",
    "plain": f"train {PLAIN} --noise-seed 1",
    "canaries": f"train {PRIVATE} --canaries 20 --noise-seed 2",
    "warmup": f"warmup {PRIVATE} --noise-seed 3 --public-share 0.3 --number 30 --solver dpm "
    "--sample-steps 3 --warm-epochs 1 --warm-batch 16 --warm-lr 0.05 --warm-rho 0.05 "
    f"--warm-cutout 4 --guide-weight 1 --guide-epochs 0.2 {DIFFUSION}",
    "release": f"release {PRIVATE} --noise-seed 4 {PUBLIC} {MATCHING}",
    "invert": f"invert {PLAIN} --noise-seed 5 {PUBLIC} --judges group-cnn-small "
    f"--judge-epochs 0.5 --n 20 {GAN}",
    "reconstruct": f"reconstruct {HEADS}",
    "audit": "audit --run train --shadows 2 --device cpu",
    "audit-canaries": "audit --run canaries --shadows 0 --device cpu",
    "report": "report train release invert --include-private",
}
"""In this order: the last ones read those before. The name is also `--out`."""

ACCOUNTS = {
    "of a run": "account --ledger train --json",
    "of settings": "account --epsilon 2 --size 4000 --batch-size 100 --epochs 3 --json",
}


@contextmanager
def inside(place: Path) -> Iterator[None]:
    """With that folder as the working directory, so that no path of a machine is written down."""
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def do(name: str, words: str, place: Path) -> str:
    """Run a command in `place`; what it prints."""
    out = [] if name in ACCOUNTS else ["--out", name]
    with inside(place):
        code, printed = adapter.command([*words.split(), *out])
    assert code == 0, f"{name} ended with {code}:\n{printed}"
    return printed
