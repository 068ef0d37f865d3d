"""Where files come from: what was made from private images does not come back as public.

Weights and images that people bring count as public, at their word. Where sfumato itself made them
from the same data they are not: their ledger lies beside them, or a note in them says what they
cost. Weights bring their ledger along; images, which would only help, are refused. Data are known
by their name: who gives the same images another one is not found out.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import PrivacyError
from sfumato.recipes.train.settings import Config

if TYPE_CHECKING:
    from sfumato.privacy.ledger import Ledger


def book_of_weights(config: Config, data: str) -> "Ledger | None":
    """The ledger of the weights to begin with, if they learnt the same data; or why they cannot.

    What is learnt from them costs what they have cost, and more.
    """
    if config.weights is None or config.mode == "non-private":
        return None
    book = ledger_beside(config.weights.expanduser())
    if book is None or not _same(data, book.header.data, *(event.data for event in book.events)):
        return None
    delta = book.header.delta if config.delta is None else config.delta
    spent = book.epsilon(delta)
    if spent == float("inf"):
        raise PrivacyError(
            f"{config.weights} has learnt {data} without privacy, so nothing that begins with it "
            "can promise anything. Begin with other weights, or train with --mode non-private."
        )
    if config.epsilon is not None and spent >= config.epsilon:
        raise PrivacyError(
            f"{config.weights} has learnt {data} under epsilon {spent:.3g} already, and --epsilon "
            f"{config.epsilon:g} is for that and for what comes: raise it, or begin with others."
        )
    return book


def name_of(weights: Path) -> str:
    """Weights by their folder too, or the stage that made them: all runs call the file the same."""
    return "/".join(weights.parts[-3 if weights.parts[-3:-2] == ("stages",) else -2 :])


def require_strange(config: Config, data: str) -> None:
    """Refuse weights that learnt the same data, for a verb that has no ledger to go on with."""
    if book_of_weights(config, data) is not None:
        raise PrivacyError(
            f"{config.weights} has learnt {data}, and here it would count as public: the ledger "
            "would leave out what that cost. Begin with other weights."
        )


def require_covered(config: Config) -> None:
    """Refuse weights of a run on the same data that no ledger speaks of, or that of a part alone.

    Such are those in a run's `private/`, and those of a warm-up that took a share of the data for
    public: a promise to all examples would be one to that share too, learnt without noise.
    """
    if config.weights is None or config.mode == "non-private":
        return
    file = config.weights.expanduser().resolve()
    run = next((folder for folder in file.parents if _settings_of(folder)), file.parent)
    record = _settings_of(run)
    before = record.get("config", {})
    if not record or not _same_source(config.data, str(before.get("data"))):
        return
    if record["verb"] == "warmup" and before.get("public_share") is not None:
        raise PrivacyError(
            f"{config.weights} has learnt a public share of {config.data}, without noise: sfumato "
            "would promise privacy to the images of that share too. Go on with sfumato warmup "
            f"train --out {run}, which leaves them out."
        )
    lost = "private" in file.relative_to(run).parts
    if lost or (record["verb"] != "warmup" and ledger_beside(file) is None):
        raise PrivacyError(
            f"{config.weights} is of a run on {config.data}, and no ledger says what it cost: what "
            "begins with it can promise nothing. Begin with other weights."
        )


def require_unpaid(source: str | Path, data: str) -> None:
    """Refuse images that one of our ledgers paid for: here they would count as public.

    `data` are the private images beside them. What was made from others is covered by its own
    ledger.
    """
    made = promise_of_images(Path(source).expanduser())
    if _same(data, str(made.get("data"))):
        cost = f"{made['data']} under epsilon {made['epsilon']:.3g}"
        raise PrivacyError(
            f"{source} was made from {cost}. Here such images would count as public, and the "
            "ledger would leave that cost out. Train on them by sfumato train --data, or bring "
            "others."
        )


def promise_of_images(source: Path) -> dict[str, Any]:
    """What a note in the file, or the ledger of its bundle, says that they cost; or nothing."""
    from sfumato.data.arrays import read_note

    try:
        note = json.loads((read_note(source) if source.is_file() else None) or "{}")
    except ValueError:
        note = {}
    if "epsilon" in note:
        return note
    book = ledger_beside(source)
    return {} if book is None else {"epsilon": book.epsilon(), "data": book.header.data}


def ledger_beside(place: Path) -> "Ledger | None":
    """The ledger of the bundle, stage or run that a file or folder belongs to, if it is there."""
    from sfumato.files import read_lines
    from sfumato.privacy.ledger import Ledger

    folder = (place if place.is_dir() else place.parent).resolve()
    run = folder.parent.parent if folder.parent.name == "stages" else folder
    for one in (folder, run):
        records = read_lines(one / "ledger.jsonl")
        if records:
            return Ledger.from_records(records)
    return None


def _settings_of(folder: Path) -> dict[str, Any]:
    """The verb and the settings of the run in a folder; nothing where there is none."""
    from sfumato.files import read_json

    record = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return record if isinstance(record, dict) and "verb" in record else {}


def _same_source(one: str, other: str) -> bool:
    """Whether two --data are one: perhaps in other words, or with other classes of it."""
    paths = [Path(source.partition("@")[0]).expanduser().resolve() for source in (one, other)]
    return paths[0] == paths[1]


def _same(data: str, *others: str) -> bool:
    """Whether one of these is the name of the same data, or of a part of it."""
    return _whole(data) in map(_whole, others)


def _whole(name: str) -> str:
    """The name without what says which part is meant: photos@0-4-train, photos-train-without-4%."""
    return name.partition("-without-")[0].partition("@")[0].removesuffix("-train")
