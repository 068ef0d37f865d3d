"""What is not promised, in words: it follows from the first line of the ledger, and the run."""

import math
from collections.abc import Iterator

from sfumato.reporting.card import Card
from sfumato.reporting.promise import Promise
from sfumato.reporting.words import DAMAGED, up

NO_LEDGER = {
    "account": "A plan is arithmetic: it promises something when it is carried out.",
    "audit": "An audit promises nothing itself. What it finds is as private as the images.",
    "invert": "An attack promises nothing. What it finds is as private as the images.",
    "reconstruct": (
        "An attack promises nothing. What it finds is as private as the images. The run also holds "
        "features and networks learnt without privacy from the train split: share it only if that "
        "split is public."
    ),
    "warmup": (
        "There is no ledger: no private image was learnt so far. Nothing is promised about public "
        "ones, and a generator of them may replay them."
    ),
}


def limits(card: Card) -> Iterator[str]:
    """What is not promised."""
    promise = card.promise
    if card.damage:
        yield f"{DAMAGED} {'; '.join(card.damage)}."
    elif promise is None:
        yield NO_LEDGER.get(card.verb, "There is no ledger, so nothing is promised.")
    elif math.isinf(promise.epsilon):
        yield (
            "Nothing is promised. Whoever has the model may find out which images it learnt, and "
            "what is on them."
        )
    else:
        yield from _limits_of(promise)
    promised = card.verb == "audit" or (promise is not None and math.isfinite(promise.epsilon))
    if promised and card.private is not None and card.private.of("bound"):
        yield (
            "A lower bound within the promise does not prove the promise: it says that this "
            "attack did not break it. Another might come closer."
        )
    for reason in () if promise is None else promise.not_for_release:
        yield f"Not for release: {reason}."
    if not card.finished and promise is not None and math.isfinite(promise.epsilon):
        yield "The run is not finished: what it will have spent at its end is more than this."
    if card.private is not None:
        yield "Scores, attacks and pictures from private/ are covered by no promise at all."


def _limits_of(promise: Promise) -> Iterator[str]:
    whom = "one image" if promise.unit == "example" else "one person, with all of their images,"
    yield (
        f"Hidden is whether {whom} took part. What {promise.data} shows as a whole is not hidden: "
        "that is what was learnt."
    )
    if promise.unit == "example":
        yield (
            "Somebody on several images is hidden less: with k of them, by about k times epsilon. "
            "Train with --unit person to hide people."
        )
    if promise.relation == "add-or-remove":
        one = "image" if promise.unit == "example" else "person"
        yield (
            f"One {one} replaced by another is two changes: up to twice epsilon, at a larger delta."
        )
    if promise.neighbours == "training parts":
        yield (
            "Neighbours are training parts: sfumato split the data itself, and one more image may "
            "move others between train and test."
        )
    yield f"Taken as public: {promise.public}."
    yield f"With a chance of about delta, {promise.delta:g}, more than epsilon says may be told."
    yield (
        "How settings were chosen is not covered: whoever tries many on private images and keeps "
        "the best has learnt a little more."
    )
    if promise.epsilon > 10:
        yield f"An epsilon of {up(promise.epsilon)} promises little; attacks say more than it does."
    if promise.noise != "chacha20":
        yield (
            f"The noise came from {promise.noise}, which is not cryptographic: good for research. "
            "Use --secure where somebody may try to predict it."
        )
