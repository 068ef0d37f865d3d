"""Where files come from: what was made from private images does not come back as public.

Weights and images that people bring count as public, at their word. Where sfumato itself made them
from the same data they are not: a note in the file says what they cost (`sfumato.lineage`), or
their ledger lies beside them. Weights bring their ledger along; images, which would only help, are
refused. Data are known by their name or, while the weights lie in their run, by a digest.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfumato.data.arrays import read_npz_note
from sfumato.data.fingerprint import DataFingerprint, known_data
from sfumato.data.images import Images
from sfumato.errors import ConfigError, PrivacyError
from sfumato.integrity import require_whole
from sfumato.lineage import START, Origin, data_name, ledger_lines, origin_of
from sfumato.privacy.ledger import Ledger
from sfumato.runs import Run
from sfumato.settings.train import Training


def book_of_weights(config: Training, images: Images) -> Ledger | None:
    """The ledger of the weights to begin with, if they were trained on the same data; or why they
    cannot.

    What is trained from them costs what they have cost, and more; so does what these began with.
    """
    if config.weights is None or config.mode == "non-private":
        return None
    book, data = _joined(_ledgers(config.weights, images)), images.name
    if book is None:
        return None
    delta = book.header.delta if config.delta is None else config.delta
    spent = book.epsilon(delta)
    if spent == float("inf"):
        raise PrivacyError(
            f"{config.weights} was trained on {data} without privacy, so nothing that begins with "
            "it can guarantee anything. Begin with other weights, or train with --mode non-private."
        )
    if config.epsilon is not None and spent >= config.epsilon:
        raise PrivacyError(
            f"{config.weights} was trained on {data} under epsilon {spent:.3g} already, and "
            f"--epsilon {config.epsilon:g} is for that and for what comes: raise "
            "it, or begin with others."
        )
    return book


def name_of(weights: Path) -> str:
    """Weights by their folder too, or the stage that made them: all runs call the file the same."""
    return "/".join(weights.parts[-3 if weights.parts[-3:-2] == ("stages",) else -2 :])


def note_start(weights: Path | None, run: Run) -> None:
    """Write down what is known of the weights that a run begins with: what it makes says so too."""
    origin = None if weights is None else origin_of(weights)
    if origin is not None:
        run.write_json(START, origin)


def log_origin(config: Training, images: Images, say: Callable[[str], None]) -> None:
    """Say what weights count as that did not learn the same data, by all that is known."""
    if config.weights is None or config.mode == "non-private":
        return
    if _ledgers(config.weights, images):
        return
    books, data = _ledgers(config.weights), images.name
    others = ", ".join(dict.fromkeys(book.header.data for book in books))
    if others:
        say(
            f"{config.weights} was trained on {others}, which is treated as other data than "
            f"{data}. If images are in both, what both have cost adds up for them, and the "
            "guarantee here leaves that out: give the data the name that they had."
        )
    elif origin_of(config.weights) is None:
        say(
            f"{config.weights} does not say what it was trained on, and counts as public. If it "
            f"has seen images of {data}, the guarantee leaves that out."
        )


def require_other_data(config: Training, images: Images) -> None:
    """Refuse weights that were trained on the same data, for a command that has no ledger to go on
    with."""
    if book_of_weights(config, images) is not None:
        raise PrivacyError(
            f"{config.weights} was trained on {images.name}, and here it would count as public: "
            "the ledger would leave out what that cost. Begin with other weights."
        )


def require_covered(config: Training) -> None:
    """Refuse weights of a run on the same data that no ledger speaks of, or that of a part alone.

    First of all, weights that are not there, or that lie in a damaged run (`sfumato.integrity`).

    Such are those in a run's `private/`, and those of a warm-up that took a share of the data for
    public: a guarantee to all examples would be one to that share too, which was used without
    noise.
    """
    if config.weights is None:
        return
    if not config.weights.is_file():
        raise ConfigError(f"--weights {config.weights}: there is no such file.")
    if config.mode == "non-private":
        return
    require_whole(config.weights.expanduser().resolve().parent)
    for origin in _origins(config.weights):
        # In private/ anything may come from the data that those before it were trained on.
        trained_on = {one.data for one in origin.all} if origin.private else {origin.data}
        if data_name(config.data) not in trained_on:
            continue
        if origin.verb == "warmup" and origin.public_share:
            raise PrivacyError(
                f"{config.weights} was trained on a public share of {config.data}, without noise: "
                "sfumato would guarantee privacy to the images of that share too. Go on with "
                "sfumato warmup train --out and the run of that warm-up, which leaves them out."
            )
        if origin.private or (origin.verb != "warmup" and not origin.ledger):
            raise PrivacyError(
                f"{config.weights} is of a run on {config.data}, and no ledger says what it cost: "
                "what begins with it can guarantee nothing. Begin with other weights."
            )


def require_no_ledger(source: str | Path, data: str) -> None:
    """Refuse images that one of our ledgers paid for: here they would count as public.

    `data` are the private images beside them. What was made from others is covered by its own
    ledger.
    """
    made = guarantee_of_images(Path(source).expanduser())
    if _same(data, str(made.get("data"))):
        cost = f"{made['data']} under epsilon {made['epsilon']:.3g}"
        raise PrivacyError(
            f"{source} was made from {cost}. Here such images would count as public, and the "
            "ledger would leave that cost out. Train on them by sfumato train --data, or bring "
            "others."
        )


def guarantee_of_images(source: Path) -> dict[str, Any]:
    """What a note in the file, or the ledger of its bundle, says that they cost; or nothing."""
    try:
        note = json.loads((read_npz_note(source) if source.is_file() else None) or "{}")
    except ValueError:
        note = {}
    if "epsilon" in note:
        return note
    book = find_ledger(source)
    return {} if book is None else {"epsilon": book.epsilon(), "data": book.header.data}


def find_ledger(place: Path) -> Ledger | None:
    """The ledger of the bundle, stage or run that a file or folder belongs to, if it is there."""
    place = place.resolve()
    lines = ledger_lines(place if place.is_dir() else place.parent)
    return Ledger.from_records(lines) if lines else None


def _origins(weights: Path) -> list[Origin]:
    """Where weights come from, and where those that they began with do; nothing if not from us."""
    origin = origin_of(weights)
    return [] if origin is None else list(origin.all)


def _ledgers(weights: Path, images: Images | None = None) -> list[Ledger]:
    """What they have cost, and what those have cost that they began with; that of images alone."""
    books = [Ledger.from_records(origin.lines) for origin in _origins(weights) if origin.ledger]
    if images is None:
        return books
    names = {images.name}
    if _has_learnt(weights, images) and (own := origin_of(weights)) is not None and own.ledger:
        names |= _names(Ledger.from_records(own.lines))  # the same images, by another name
    return [book for book in books if any(_same(name, *_names(book)) for name in names)]


def _has_learnt(weights: Path, images: Images) -> bool:
    """Whether the run that weights lie in was trained on these very images, whatever their name."""
    known = known_data(weights.expanduser().resolve().parent)
    return known is not None and known == DataFingerprint.of(images)


def _joined(books: list[Ledger]) -> Ledger | None:
    """All their lines in one; None of none."""
    for book in books[1:]:
        books[0].inherit(book)
    return books[0] if books else None


def _names(book: Ledger) -> set[str]:
    """The names of the data that a ledger speaks of."""
    return {book.header.data, *(release.data for release in book.releases)}


def _same(data: str, *others: str) -> bool:
    """Whether one of these is the name of the same data, or of a part of it."""
    return _whole(data) in map(_whole, others)


def _whole(name: str) -> str:
    """The name without what says which part is meant: photos@0-4-train, photos-train-without-4%."""
    return name.partition("-without-")[0].partition("@")[0].removesuffix("-train")
