"""What is said of pictures: what each shows, and what they were made from."""

from collections.abc import Sequence

from sfumato.reporting.card import Card
from sfumato.reporting.words import may_be_shared

FROM_PUBLIC = (
    "Made from public images: nothing private went in. Nothing is promised about those, and a "
    "picture may show some of them again."
)
CAPTIONS = {
    "epsilon.png": "Epsilon over the steps of the plan",
    "pictures.png": "Public images before, released images after",
    "private/pictures.png": "The truth, and what the attacker got, setting by setting",
    "private/gallery.png": "The truth, and below it what the attacker got",
    "private/guesses.png": "Training images, and below them what the attacker guessed",
    "private/nearest.png": "Released images, and below them the nearest private ones",
    "private/roc.png": "How well true images are told from others, beside what privacy allows",
    "private/study.png": "What the attack reaches for each setting, beside what privacy allows",
    "private/tradeoff.png": "Trade-off curves of attacks, beside what the ledger allows",
}


def from_public(card: Card) -> bool:
    """Whether the open pictures were made from public images, which no promise speaks of."""
    return card.generator is not None and card.generator.public_images is not None


def pictures_title(cards: Sequence[Card]) -> str:
    """The heading over open pictures, which is true of all of them."""
    kinds = {
        "made from public images" if from_public(card)
        else "that may be shared" if may_be_shared(card) else ""
        for card in cards if card.pictures
    }  # fmt: skip
    return f"Pictures {kinds.pop() if len(kinds) == 1 else ''}".strip()


def pictures_note(card: Card) -> str:
    """What else is to be known about them."""
    return FROM_PUBLIC if from_public(card) else ""


def caption(picture: str) -> str:
    """What a picture of a run shows, by its path in the run."""
    folder, _, name = picture.rpartition("/")
    stem = name.removesuffix(".png")
    if picture in CAPTIONS:
        return CAPTIONS[picture]
    if folder == "stages/sample/samples":
        return "Some of the images that were drawn"
    if folder == "stages/generator/samples" and stem.isdecimal():
        return f"What the generator draws after about {int(stem):,} images"
    return stem.replace("_", " ").replace("-", " ").capitalize()
