"""Whether drawn images replay the public ones a generator was trained on: said wherever some are
drawn.

Two figures, both of public images alone: the share of copies, beside that among images which nobody
trained on, and how well the weights that are kept denoise those.
"""

from collections.abc import Callable
from pathlib import Path

from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.diffusion.copies import MARGIN, copy_rates
from sfumato.diffusion.stored_generator import StoredGenerator
from sfumato.files import read_json

COUNTED = 2000
"""Drawn images among which copies are counted, at most."""


def check_for_copies(
    drawn: Images,
    trained_on: Images,
    held_out: Images,
    generator: Path,
    log: Callable[[str], None],
) -> dict[str, float]:
    """How many drawn images are copies, and what the generator's folder says of held-out images."""
    some = drawn.select(range(min(COUNTED, len(drawn))))
    rates = copy_rates(some, trained_on, held_out)
    made, by_chance = rates["copies"], rates["copies_among_held_out"]
    told = f"copies among {len(some)} drawn images: {made:.1%} (of held-out images {by_chance:.1%})"
    loss = read_json(generator / "done.json").get("held_out_loss")
    if loss is not None:
        told += f"; held-out loss of the generator {loss:.4f}"
    if made > by_chance + MARGIN:
        told += ". WARNING: they replay public images, and so may models trained on them"
    log(told)
    return rates


def watch_file(file: Path, run: Path, stored: StoredGenerator, say: Callable[[str], None]) -> None:
    """The same for images drawn from a run into a file, if the run has its public images still.

    What a private generator draws, its ledger covers.
    """
    kept = run / "stages" / "split" / "public.npz"
    if stored.blueprint.ledger or not kept.exists():
        return
    public = load_images(str(kept), "train", private=False)
    settings = read_json(run / "config.json")["config"]
    held_out, trained_on = public.split(stored.blueprint.diffusion.gen_held_out, settings["seed"])
    drawn = load_images(str(file), "train", private=False)
    check_for_copies(drawn, trained_on, held_out, run / "stages" / "generator", say)
