"""What a step costs, in words, and against plain training of the same."""

import math
from collections.abc import Sequence
from typing import Any

from sfumato.reporting.card import Card

COMPARABLE = (
    "model", "data", "image_size", "grey", "batch_size", "physical_batch_size", "precision",
    "compile", "augmult", "train_only", "device",
)  # fmt: skip


def costs(cards: Sequence[Card]) -> list[str]:
    """Time of a step for each card, against plain training of the same where that is there too."""
    plain = [card for card in cards if _seconds(card) and _is_plain(card)]
    found = []
    for card in cards:
        own = _seconds(card)
        words = "" if own is None else f"{_duration(own)} a step{_each(card)} (median)"
        if own is not None and not _is_plain(card):
            alike = [other for other in plain if _work(other) == _work(card)]
            if alike:
                times = own / (_seconds(alike[0]) or own)
                words += f", {times:.2f} times that of {alike[0].name}, which has no privacy"
        found.append(words)
    return found


def per_example(card: Card) -> str:
    """Time of a step over its examples, which can be compared where batches cannot."""
    (cost, *_) = (*([] if card.private is None else card.private.of("cost")), None)
    each = None if cost is None else cost.seconds_per_example
    return "" if each is None else _duration(each)


def _each(card: Card) -> str:
    each = per_example(card)
    return f", {each} an example" if each else ""


def _is_plain(card: Card) -> bool:
    return card.promise is not None and math.isinf(card.promise.epsilon)


def _seconds(card: Card) -> float | None:
    found = [] if card.private is None else card.private.of("cost")
    return found[0].seconds_per_step if found else None


def _work(card: Card) -> tuple[Any, ...]:
    return (card.verb, *(card.settings.get(name) for name in COMPARABLE))


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
