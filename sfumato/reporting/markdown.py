"""The same report in Markdown, in short: report.md, for repositories.

Names come from the outside, so every one is escaped: none can end a table or begin a tag.
"""

import html
import re
from collections.abc import Iterator, Sequence

from sfumato.reporting import words
from sfumato.reporting.card import Card
from sfumato.reporting.costs import costs
from sfumato.reporting.limits import limits
from sfumato.reporting.page import made_by


def render_markdown(cards: Sequence[Card]) -> str:
    """One run, or several in columns."""
    parts = [f"# {_plain(words.title(cards))}"]
    if any(card.private is not None for card in cards):
        parts.append(f"> **PRIVATE. DO NOT SHARE THIS FILE.** {words.PRIVATE}")
    parts += [
        f"> **DAMAGED: {_plain(card.name)}.** {words.DAMAGED} "
        f"Found: {_plain('; '.join(card.damage))}."
        for card in cards
        if card.damage
    ]
    parts += [
        "## The promise beside the proof",
        _columns(cards, _headlines(cards)),
        "## What was trained on what",
        _columns(cards, _facts(cards)),
    ]
    if len(cards) > 1 and (rows := words.differing(cards)):
        parts += ["## Where they differ", _columns(cards, rows)]
    for card in cards:
        parts += _own(card, several=len(cards) > 1)
    hidden = f" {words.HIDDEN}" if any(c.has_private and c.private is None for c in cards) else ""
    parts.append(f"*Made by {made_by()} from the run directory alone.{hidden}*")
    return "\n\n".join(parts) + "\n"


def _headlines(cards: Sequence[Card]) -> list[tuple[str, tuple[str, ...]]]:
    promises, proofs = map(words.promise_words, cards), map(words.proof_words, cards)
    return [
        ("promised", tuple(f"{number}: {about}" for number, about in promises)),
        ("proved by attack", tuple(f"{number}: {about}" for number, about in proofs)),
    ]


def _facts(cards: Sequence[Card]) -> list[tuple[str, tuple[str, ...]]]:
    tables = [dict(words.facts(card)) for card in cards]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, tuple(table.get(name, "-") for table in tables)) for name in names]
    found = costs(cards)
    return [*rows, ("cost", tuple(cost or "-" for cost in found))] if any(found) else rows


def _own(card: Card, *, several: bool) -> Iterator[str]:
    """What is said of each run alone."""
    if several:
        yield f"## {_plain(card.name)}"
    level = "###" if several else "##"
    if card.private is not None:
        yield from _private(card, level)
    if card.events:
        rows = [(spent.stage, (words.spent_words(spent),)) for spent in card.events]
        yield f"{level} Every use of private data"
        yield _table(("stage", "what was released"), rows)
    yield f"{level} What is not promised"
    yield "\n".join(f"- {_plain(limit)}" for limit in limits(card))
    if card.command:
        yield f"{level} Do it again"
        # Indented, not fenced: no name in a command can end the block.
        yield "\n".join(f"    {line}" for line in card.command.splitlines())


def _private(card: Card, level: str) -> Iterator[str]:
    found = card.private
    assert found is not None
    if rates := (*found.of("accuracy"), *found.of("quality")):
        yield f"{level} How well it works"
        rows = [(rate.name, (words.interval(rate.value), rate.means)) for rate in rates]
        yield _table(("share", "value (interval)", "of"), rows)
    if attacks := found.of("attack"):
        yield f"{level} What attackers get"
        yield _table(
            ("attack", "AUC", "TPR at 1 % FPR"),
            [
                (a.name, (words.interval(a.value), words.interval(a.tpr_at_1_percent_fpr)))
                for a in attacks
            ],
        )
    if bounds := found.of("bound"):
        yield f"{level} What is proved"
        yield _table(
            ("method", "epsilon at least", "promised", "delta", "confidence", "what it rests on"),
            [
                (
                    b.name,
                    (
                        words.down(words.proved(b)),
                        "-" if b.guaranteed is None else words.up(b.guaranteed),
                        words.short(b.delta), words.confidence(b), b.means,
                    ),
                )
                for b in bounds
            ],
        )  # fmt: skip
    if checks := found.of("check"):
        answers = {True: "passed", False: "FAILED", None: "not known"}
        rows = [(c.name, (answers[c.passed], c.means)) for c in checks]
        yield _table(("check", "answer", "what it says"), rows)


def _columns(cards: Sequence[Card], rows: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    head = tuple(card.name for card in cards) if len(cards) > 1 else ("",)
    return _table(("", *head), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    lines = [tuple(map(_plain, head)), tuple("---" for _ in head)]
    lines += [(_plain(name), *map(_plain, values)) for name, values in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
