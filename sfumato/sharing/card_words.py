"""The data card in sentences: `card.md`, for people, from the values that `card.json` has.

Names come from the outside, so every one is escaped: none can end a table or begin a tag.
"""

import html
import math
import re

from sfumato.sharing.card import NEAR_COPIES, BundleCard


def markdown(card: BundleCard) -> str:
    """The card for people."""
    public, private = _plain(card.public), _plain(card.private)
    channels, height, width = card.shape
    moved = f"They are images of {public} as they were (k = 0)."
    if card.k:
        moved = (
            f"They began as images of {public} and were matched to feature statistics of "
            f"{private} in k = {card.k} steps, which moved them by {card.moved['mean']:.3g} grey "
            f"levels of 255 on average and by {card.moved['largest']:.3g} at most."
        )
    parts = [
        f"# Images made from {public} for the task of {private}",
        *_warning(card),
        f"{card.images} images of {width} x {height} pixels and {channels} channel"
        f"{'s' * (channels > 1)}, in {len(card.classes)} classes, with soft labels (logits) of a "
        f"teacher, {_plain(card.model)}. {moved}",
        *_promise(card),
        "## What it was paid with",
        _table(
            ("stage", "events", "what was released"),
            [(name, str(spent.events), spent.what) for name, spent in card.stages.items()],
        ),
        *_near_copies(card),
        *_scores(card),
        "## Files",
        "`card.json` holds these facts for programs, with the SHA-256 of every file; "
        "`ledger.jsonl` holds each use of private data, so that epsilon can be computed again. "
        f"Both say what was done, and neither is a signature. Made by {_plain(card.made_by)}.",
    ]
    return "\n\n".join(parts) + "\n"


def _warning(card: BundleCard) -> list[str]:
    reasons = [f"> - {_plain(reason)}" for reason in card.not_for_release]
    return ["\n".join(["> **NOT FOR RELEASE**", ">", *reasons])] if reasons else []


def _promise(card: BundleCard) -> list[str]:
    private = _plain(card.private)
    whom = {"example": "one image", "person": "all images of one person"}[card.unit]
    told = {
        "add-or-remove": f"whether {whom} of {private} took part at all",
        "replace": f"whether {whom} of {private} took part, or another in its place",
    }[card.relation]
    promise = (
        f"How much this whole folder tells about {told} is bounded by differential privacy, "
        "whatever else its reader knows:"
    )
    if math.isinf(card.epsilon):
        promise = f"Nothing: this folder may tell {told}."
    rows = [
        ("epsilon (PLD accountant)", _at_most(card.epsilon)),
        ("epsilon (RDP accountant, a looser bound)", _at_most(card.epsilon_by_rdp)),
        ("delta", f"{card.delta:g}"),
        (f"neighbouring {card.neighbours}", f"{card.relation}, by {card.unit}"),
        ("noise", card.noise),
    ]
    split = (
        "The private images were split by sfumato, and one more image may move others between "
        "train and test: neighbours are training parts."
    )
    rest = (
        "It covers what was released, and not how settings were chosen: whoever tries many of them "
        "on private images and keeps the best has learnt a little more."
    )
    told = [split] if card.neighbours == "training parts" else []
    return ["## What is promised", promise, _table(("", "value"), rows), *told, rest]


def _near_copies(card: BundleCard) -> list[str]:
    if card.near_copies is None:
        return []
    share, threshold, error = (card.near_copies[name] for name in NEAR_COPIES)
    whose = {"example": "of the private images", "person": "of the people on private images"}
    found = f"{100 * share:.2f} % {whose[card.unit]} have a released image"
    if share < 2 * error:
        found = f"No more than the noise can explain: {found}"
    return [
        "## Near copies",
        f"{found} closer than {threshold:.3g} grey levels of 255 (root mean square), a threshold "
        "that is public. The count carries noise, with a standard error of "
        f'{100 * error:.2f} %, and the ledger pays for it under stage "card".',
    ]


def _scores(card: BundleCard) -> list[str]:
    if not card.scores:
        return []
    return [
        "## Scores that the ledger does not cover",
        "These were measured on private images without any noise. The owner of the images chose "
        "to publish them; the promise above does not speak of them.",
        _table(("score", "value"), [(name, f"{score:.4g}") for name, score in card.scores.items()]),
    ]


def _at_most(epsilon: float) -> str:
    if math.isnan(epsilon):
        return "has no formula for this"
    # Rounded up: a rounded promise is still kept.
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}" if math.isfinite(epsilon) else "infinite"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *(tuple(map(_plain, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
