"""A generator that a test kills over and over while it learns, shows pictures, and draws.

`python killed_warmup.py FOLDER KILLS SEED` makes the run FOLDER/undisturbed, which also imports all
that children need, then FOLDER/killed, in children that are killed at random instants.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from killed import kill_over_and_over
from warmups import TINY, tiny, warm


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    settings = replace(
        tiny(folder), epsilon=None, stage="sample", image_size=8, number=70,
        diffusion=replace(TINY, gen_images=64),
    )  # fmt: skip
    for name in ("undisturbed", "again"):  # the first one has imports to do
        before = time.monotonic()
        warm(settings, folder / name)
    takes = time.monotonic() - before
    print(kill_over_and_over(lambda: warm(settings, folder / "killed"), kills, seed, takes / 3))


if __name__ == "__main__":
    main()
