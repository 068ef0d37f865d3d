"""What the presets reach: last epoch, several seeds, nothing chosen on test data.

    python benchmarks/accuracy.py mnist-eps1 --seeds 3 --data-root data    one line a seed
    python benchmarks/accuracy.py mnist-eps1 --tune '{"lr": 2}' '{"lr": 4}'

Settings were chosen by `--tune`, which trains on nine tenths of the training images and scores on
the last tenth; test images are not loaded. A seed that was cut goes on where it was.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from sfumato.recipes import train
from sfumato.runs import Run, open_run


def measure(config: train.Config, out: Path) -> dict[str, Any]:
    """Train as the command line does, and read the score that stays private."""
    started = time.monotonic()
    with open_run(config, verb="train", out=out, say=print) as run:
        summary = run.summary if run.finished else train.run(config, run)
    score = json.loads((out / "private" / "scores.json").read_text())["test_accuracy"]
    seconds = time.monotonic() - started
    return {"epsilon": summary["epsilon"], "test_accuracy": score, "seconds": round(seconds)}


def tune(config: train.Config) -> dict[str, Any]:
    """The score on a tenth of the training images, after training on the others."""
    from tempfile import TemporaryDirectory

    from sfumato.data.load import load_images
    from sfumato.train.setup import pick_device
    from sfumato.train.steps import accuracy
    from sfumato.train.world import World

    started = time.monotonic()
    images = load_images(config.data, image_size=config.image_size, data_root=config.data_root)
    held_out, rest = images.split(0.1, seed=0)
    learner, reading = train.prepare(config, rest, pick_device(config.device))
    with TemporaryDirectory() as folder:
        run = Run(Path(folder))
        secret = train.draw_secret(config, run, World())
        plan, ledger = train.promise(config, reading, secret, run, World())
        train.learn(config, learner, reading, plan, ledger, secret, run, World())
    reading = replace(reading, images=held_out, people=None)
    scores = {"held_out": accuracy(learner.best, reading)}
    if learner.average is not None:
        scores["last_weights"] = accuracy(learner.model, reading)
    seconds = round(time.monotonic() - started)
    return {**scores, "noise": round(plan.noise_multiplier, 3), "seconds": seconds}


def main() -> None:
    """Measure a preset, or compare changes of it."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("preset")
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--first-seed", type=int, default=0)
    ask.add_argument("--tune", nargs="*", help="changes of the preset, as JSON")
    ask.add_argument("--set", default="{}", help="settings of this machine, as JSON")
    ask.add_argument("--data-root", type=Path, default=Path("data"))
    ask.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    words = ask.parse_args()
    config = replace(
        train.PRESETS[words.preset](), data_root=words.data_root, **json.loads(words.set)
    )
    if words.tune is not None:
        for change in words.tune or ["{}"]:
            print(words.preset, change, tune(replace(config, **json.loads(change))), flush=True)
        return
    for seed in range(words.first_seed, words.first_seed + words.seeds):
        found = measure(replace(config, seed=seed), words.out / f"{words.preset}-{seed}")
        print(words.preset, "seed", seed, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
