"""The generator of `sfumato warmup`, as a report tells of it: what was kept, and what that draws.

A generator is looked at again and again while it learns, and looks that find it copying public
images do not count. So a report shows what was drawn, or what the weights that were kept draw, and
not the last look; beside it stands what the look at these weights found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.files import read_json


@dataclass(frozen=True, kw_only=True)
class Generator:
    """What the stages split, generator and sample left; None for what they do not say."""

    public_images: int | None
    """How many there are to learn from; None if it learns private ones, under a ledger."""
    images_seen: int | None
    images_at_best: int | None
    """Images that the weights which were kept had seen; None while it learns."""
    held_out_loss: float | None
    copies: float | None
    held_out_copies: float | None
    """What the look at these weights found: copies among samples, and by chance among images that
    were held out."""
    drawn: int | None
    drawn_copies: float | None
    drawn_held_out_copies: float | None
    """Images that were drawn, and the same shares among those that were looked at."""
    picture: str | None
    """What was drawn, or else what the weights that were kept draw, as a path in the run; while
    none are kept yet, the last look."""


def read_generator(path: Path) -> Generator | None:
    """The generator of the run in that directory; None if none was begun."""
    if not (path / "stages" / "generator").is_dir():
        return None
    split, learnt, drawn = (_summary(path, stage) for stage in ("split", "generator", "sample"))
    kept = _count(learnt, "images_at_best")
    return Generator(
        public_images=_count(split, "public"), images_seen=_count(learnt, "images_seen"),
        images_at_best=kept, held_out_loss=_number(learnt, "held_out_loss"),
        copies=_number(learnt, "copies"), held_out_copies=_number(learnt, "held_out_copies"),
        drawn=_count(drawn, "drawn"), drawn_copies=_number(drawn, "copies"),
        drawn_held_out_copies=_number(drawn, "copies_among_held_out"),
        picture=_picture(path, kept),
    )  # fmt: skip


def generator_facts(made: Generator) -> Iterator[tuple[str, str]]:
    """What there is to say of it, by name."""
    if made.public_images is not None:
        yield "public images", f"{made.public_images:,}"
    if made.images_at_best is not None:
        seen = "" if made.images_seen is None else f" of {made.images_seen:,}"
        loss = "" if made.held_out_loss is None else f", held-out loss {made.held_out_loss:.4g}"
        yield (
            "generator",
            f"kept are its weights after {made.images_at_best:,}{seen} images{loss}"
            f"{_copies(', ', made.copies, made.held_out_copies)}",
        )
    if made.drawn is not None:
        looked_at = "; among those that were looked at, "  # of very many, not all are
        copies = _copies(looked_at, made.drawn_copies, made.drawn_held_out_copies)
        yield "drawn", f"{made.drawn:,} images{copies}"


def _copies(before: str, share: float | None, by_chance: float | None) -> str:
    if share is None or by_chance is None:
        return ""
    return f"{before}copies {100 * share:.1f} % (of held-out images {100 * by_chance:.1f} %)"


def _picture(path: Path, kept: int | None) -> str | None:
    drawn, looks = (
        sorted((path / "stages" / stage / "samples").glob("*.png"))
        for stage in ("sample", "generator")
    )
    if kept is not None:
        looks = [look for look in looks if look.name == f"{kept:09d}.png"]
    shown = (drawn or looks)[-1:]
    return str(shown[0].relative_to(path)) if shown else None


def _summary(path: Path, stage: str) -> dict[str, Any]:
    done = path / "stages" / stage / "done.json"
    found = read_json(done) if done.exists() else {}
    return found if isinstance(found, dict) else {}


def _number(found: dict[str, Any], name: str) -> float | None:
    value = found.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(found: dict[str, Any], name: str) -> int | None:
    value = _number(found, name)
    return None if value is None else int(value)
