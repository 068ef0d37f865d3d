"""Drawing from a generator that is there: the stage sample, and `sfumato warmup draw RUN`.

The command needs the run's generator and none of its images. It leaves one file, which is a data
set like any other: `--data images.npz`, or `--extender-images images.npz`.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sfumato.commands.warmup.watch import watch_file
from sfumato.config import differences, dumps
from sfumato.data.arrays import read_npz_note, save_npz_pieces
from sfumato.data.images import Images
from sfumato.diffusion.image_shards import ImageShards, image_seeds, piece_size
from sfumato.diffusion.sampler import draw_images
from sfumato.diffusion.stored_generator import StoredGenerator, read_stored
from sfumato.errors import ConfigError, RunError
from sfumato.files import atomic, lock, read_json, sha256
from sfumato.integrity import require_whole
from sfumato.reporting.words import round_up
from sfumato.settings.warmup import Draw, Warmup
from sfumato.training.process_group import ProcessGroup, join_processes, leave_processes
from sfumato.training.setup import pick_device, quick_precision

HEEDED = ("number", "solver", "sample_steps", "guide_weight", "seed")
"""Settings that say what is drawn; the weights do too."""
TEST = 10
"""For this many images one more is drawn for testing: a data set has both."""
NOTHING = "nothing is guaranteed about the public images it was trained on, and it may replay them"
APART = 2**31
"""Where the numbers of those begin."""


def draw_to_file(config: Draw, out: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Draw from the generator of `config.run` into `out`, by as many processes as there are.

    Guarantee: the file is there whole, or not at all, and no other is replaced. What was drawn
    before the command was cut lies beside it meanwhile and is not drawn again.
    """
    out = require_file(out)
    device = pick_device(config.device)
    processes = join_processes(device)
    try:
        assert config.run is not None
        stored, summary = processes.ask(partial(open_generator, config.run, config))
        if not processes.ask(partial(is_drawn, out, summary)):
            draw_file(stored, config, out, summary, device, processes, say)
        elif processes.leads:
            say(f"{out} is drawn already.")
            shutil.rmtree(
                pieces_folder(out), ignore_errors=True
            )  # of a command killed at its very end
        if processes.leads:
            watch_file(out, config.run, stored, say)
        processes.any(False)  # all leave at once
    finally:
        leave_processes()
    return {**summary, "file": str(out)}


def require_file(out: Path | None) -> Path:
    """The file to write, or why it cannot be one."""
    if out is None or out.suffix != ".npz":
        given = "no --out" if out is None else f"--out {out}"
        raise ConfigError(f"images are drawn into one file, and there is {given}. Give FILE.npz.")
    return out


def open_generator(folder: Path, config: Draw) -> tuple[StoredGenerator, dict[str, Any]]:
    """The generator of a run of `sfumato warmup`, and what will be said of images from it."""
    record = folder / "config.json"
    if not record.exists():
        stage = folder.parent.name == "stages"
        hint = f" Its run is {folder.parent.parent}: give that." if stage else ""
        raise RunError(f"{folder} is no run directory: config.json is missing.{hint}")
    verb = read_json(record)["verb"]
    if verb != "warmup":
        raise RunError(f"{folder} is a run of sfumato {verb}: one of sfumato warmup is wanted.")
    place, bend = folder / "stages" / "generator", folder / "stages" / "guide"
    if not (place / "done.json").exists():
        raise RunError(
            f"{folder} has no finished generator. sfumato warmup generator --out {folder} goes on "
            "with it, unless that run draws no images (--number 0, or --samples)."
        )
    stored = read_stored(place, bend if (bend / "done.json").exists() else None)
    require_all_classes(config.number, stored.blueprint.classes)
    if config.guide_weight and stored.guide_weights is None:
        raise RunError(f"{folder} has no trained guide. Draw without: --guide-weight 0.")
    weights = {"generator": sha256(place / "model.safetensors")}
    if config.guide_weight:
        weights["guide"] = sha256(bend / "model.safetensors")
    made = {**{name: getattr(config, name) for name in HEEDED}, **weights}
    counts = {"run": str(folder), "drawn": config.number, "tests": images_to_test(config)}
    return stored, {**counts, **generator_guarantee(place, stored.blueprint.ledger), "made": made}


def generator_guarantee(folder: Path, ledger: bool) -> dict[str, Any]:
    """What the generator's ledger says; that nothing is guaranteed, if it was trained on public
    images."""
    if not ledger:
        return {"promise": NOTHING}
    if not (folder / "ledger.jsonl").exists():
        raise RunError(
            f"{folder / 'ledger.jsonl'} is gone, and the generator was trained on private images: "
            "what is drawn from it could not be covered by anything."
        )
    whole = require_whole(folder)
    assert whole is not None
    guarantee = whole.guarantee()
    return {name: value for name, value in guarantee.items() if name != "relation"}


def is_drawn(out: Path, summary: Mapping[str, Any]) -> bool:
    """Whether the file is there, with these settings; any other is refused."""
    if not out.exists():
        return False
    try:
        made = json.loads(read_npz_note(out) or "")["made"]
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"{out} is there already, and was not drawn by this command. Choose another --out."
        ) from None
    require_same_settings(out, made, summary["made"])
    return True


def require_same_settings(place: Path, before: Any, after: Any) -> None:
    """Refuse to mix images that were drawn by different settings."""
    changed = differences(before, after)
    if changed:
        raise RunError(
            f"{place} was drawn with other settings:\n  " + "\n  ".join(changed) + "\n"
            "Repeat the command as it was, or choose another --out."
        )


def draw_file(
    stored: StoredGenerator,
    config: Draw,
    out: Path,
    summary: Mapping[str, Any],
    device: torch.device,
    processes: ProcessGroup,
    say: Callable[[str], None],
) -> None:
    """Draw in pieces beside the file, then write it from them."""
    parts = pieces_folder(out)
    held = processes.ask(partial(claim_pieces_folder, parts, out, summary["made"]))
    try:
        draw, classes = describe_drawing(stored, config, device), stored.blueprint.classes
        splits, size = {}, piece_size(device)
        for split, count, apart in (
            ("train", config.number, 0),
            ("test", images_to_test(config), APART),
        ):
            pieces = ImageShards(parts / split if processes.leads else None, count, size)
            pieces.draw(partial(draw, apart=apart), processes, say)
            splits[split] = (torch.arange(count) % len(classes), pieces)
        if processes.leads:
            note = {name: value for name, value in summary.items() if name != "run"}
            save_npz_pieces(
                out, splits, classes=classes, shape=stored.blueprint.shape, note=dumps(note)
            )
            shutil.rmtree(parts)
    finally:
        if processes.leads:
            os.close(held)


def pieces_folder(out: Path) -> Path:
    """Where pieces of a file lie until it is whole."""
    return out.with_name(f"{out.name}.parts")


def images_to_test(config: Draw) -> int:
    """How many images are drawn to test on."""
    return math.ceil(config.number / TEST)


def claim_pieces_folder(parts: Path, out: Path, made: Mapping[str, Any]) -> int:
    """A folder for pieces that no other process has: new, or the one that was left; its lock."""
    for split in ("train", "test"):
        (parts / split).mkdir(parents=True, exist_ok=True)
    held, record = lock(parts), parts / "made.json"
    try:
        require_same_settings(parts, read_json(record) if record.exists() else made, made)
        with atomic(record) as file:
            file.write(json.dumps(made).encode())
    except BaseException:
        os.close(held)
        raise
    for draft in out.parent.glob(f".{out.name}.*.draft"):  # of a command that was killed
        draft.unlink(missing_ok=True)
    return held


def describe_drawing(
    stored: StoredGenerator,
    config: Warmup | Draw,
    device: torch.device,
    public: Images | None = None,
    vary: float = 0.0,
) -> Callable[..., torch.Tensor]:
    """How images are drawn by their numbers: classes take turns, and chance is in the number.

    With --vary they begin as public images under noise, those of each class in turn.
    """
    blueprint, precision = stored.blueprint, quick_precision(device)
    denoiser = stored.denoiser(device)
    if config.compile:
        denoiser.compile()
    bend = stored.guide(device, precision) if config.guide_weight else None
    start: dict[str, Any] = {"sigma": vary} if vary else {}

    def draw(first: int, last: int, apart: int = 0) -> torch.Tensor:
        numbers = torch.arange(first, last)
        if vary:
            assert public is not None, "settings without public images are refused"
            start["base"] = public.pixels[in_turn(public, numbers)]
        return draw_images(
            denoiser,
            numbers % len(blueprint.classes),
            image_seeds(config.seed, numbers + apart),
            blueprint.shape,
            solver=config.solver,
            steps=config.sample_steps,
            guide=bend,
            guide_weight=config.guide_weight,
            precision=precision,
            **start,
        )

    return draw


def in_turn(images: Images, numbers: torch.Tensor) -> torch.Tensor:
    """For each number the place of an image: classes take turns, and in each its images do."""
    classes = len(images.classes)
    places = [(images.labels == label).nonzero()[:, 0] for label in range(classes)]
    turns = [(places[n % classes], n // classes) for n in numbers.tolist()]
    return torch.stack([own[turn % len(own)] for own, turn in turns])


def show_drawn(summary: Mapping[str, Any]) -> str:
    """What is in the file, and what is guaranteed about it."""
    guarantee = NOTHING
    if "epsilon" in summary:
        guarantee = (
            f"epsilon {round_up(summary['epsilon'])}, delta {summary['delta']:.2g}, for each "
            f"{summary['unit']} of {summary['data']}"
        )
    lines = [
        f"{summary['drawn']} images, and {summary['tests']} to test on: {summary['file']}",
        f"  generator {summary['run']}/stages/generator",
        f"  guarantee {guarantee}",
    ]
    lines += [f"  NOT FOR RELEASE: {text}" for text in summary.get("not_for_release", ())]
    return "\n".join(lines)


def require_all_classes(number: int, classes: Sequence[str]) -> None:
    """Refuse to draw less than an image of each class."""
    if number < len(classes):
        raise ConfigError(
            f"--number {number} is less than an image of each of {len(classes)} classes."
        )
