"""What the presets reach: last epoch, several seeds, nothing chosen on test data.

    python benchmarks/accuracy.py mnist-eps1 --seeds 3 --data-root data    one line a seed
    python benchmarks/accuracy.py mnist-eps1 --tune '{"lr": 2}' '{"lr": 4}'

Settings were chosen by `--tune`, which trains on nine tenths of the training images and scores on
the last tenth; test images are not looked at. A seed that was cut goes on where it was.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sfumato.commands.train import command as train
from sfumato.data.images import Images
from sfumato.data.load import load_splits
from sfumato.runs import open_run
from sfumato.training.evaluate import accuracy
from sfumato.training.process_group import ProcessGroup
from sfumato.training.setup import pick_device


def measure(config: train.Config, images: Images, test: Images, out: Path) -> dict[str, Any]:
    """Train as the command line does, on images that are loaded already."""
    started, processes = time.monotonic(), ProcessGroup()
    with open_run(config, verb="train", out=out, say=print) as run:
        train_state, inputs = train.prepare_classifier(config, images, pick_device(config.device))
        if not run.finished:
            planned = train.plan_for(config, len(inputs))
            mechanism = train.open_ledger(config, inputs, run, processes, planned)
            train.train_model(config, train_state, inputs, mechanism, run, processes)
            tested = replace(inputs, images=test)
            train.finish_training(config, train_state, tested, mechanism, run)
            if train_state.average is not None:
                print("  without averaging:", accuracy(train_state.model, tested))
        summary = run.summary
    score = json.loads((out / "private" / "scores.json").read_text())["test_accuracy"]
    seconds = round(time.monotonic() - started)
    keys = ("epsilon", "delta", "noise_multiplier", "steps")
    return {"accuracy": score, **{key: summary[key] for key in keys}, "seconds": seconds}


def experiments(words: Any) -> Iterator[tuple[str, train.Config]]:
    """Names and settings of what is to be measured."""
    preset = replace(
        train.PRESETS[words.preset](), data_root=words.data_root, weights=words.weights,
        **json.loads(words.set),
    )  # fmt: skip
    for number, change in enumerate(words.tune or []):
        yield f"{words.preset}-try-{number} {change}", replace(preset, **json.loads(change))
    for seed in range(words.first_seed, words.first_seed + words.seeds):
        if words.tune is None:
            yield f"{words.preset}-{preset.epsilon:g}-seed-{seed}", replace(preset, seed=seed)


def main() -> None:
    """Measure a preset, or compare changes of it."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("preset")
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--first-seed", type=int, default=0)
    ask.add_argument("--tune", nargs="*", help="changes of the preset, as JSON")
    ask.add_argument("--set", default="{}", help="changes for all of them, as JSON")
    ask.add_argument("--weights", type=Path)
    ask.add_argument("--data-root", type=Path, default=Path("data"))
    ask.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    words = ask.parse_args()
    loaded: dict[Any, Any] = {}
    for name, config in experiments(words):
        key = (config.data, config.image_size)
        if key not in loaded:
            loaded[key] = load_splits(
                config.data, image_size=config.image_size, data_root=config.data_root
            )
        images, test = loaded[key]
        if words.tune is not None:
            test, images = images.split(0.1, seed=0)
        out = words.out / name.partition(" ")[0]
        print(name, json.dumps(measure(config, images, test, out)), flush=True)


if __name__ == "__main__":
    main()
