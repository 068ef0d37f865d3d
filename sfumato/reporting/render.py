"""Cards as a page and as Markdown: templates beside this file, on the same views of each run.

The page is one HTML file that needs nothing else: it opens from disk, in light, dark and print.
Everything from a run goes through a template's escaping. The door to jinja2.
"""

import base64
import html
import math
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sfumato import __version__
from sfumato.reporting import chart, words
from sfumato.reporting.card import RunCard
from sfumato.reporting.scores import findings_of
from sfumato.results import Finding, Findings

PICTURE_LIMIT = 4_000_000
"""Bytes of one picture; a larger one is left out."""
MADE_BY = f"sfumato {__version__}"
FILTERS = {
    "up": words.round_up,
    "down": words.round_down,
    "interval": words.interval,
    "short": words.short,
    "proved": words.proved,
    "confidence": words.confidence,
    "duration": words.duration,
    "beats_guessing": words.beats_guessing,
    "spent": words.spent_words,
    "verdict": words.verdict,
}
CAPTIONS = {
    "epsilon": "Epsilon over the steps of the plan",
    "pictures": "Public images before, released images after",
    "private/pictures": "The truth, and what the attacker got, setting by setting",
    "private/gallery": "The truth, and below it what the attacker got",
    "private/guesses": "Training images, and below them what the attacker guessed",
    "private/nearest": "Released images, and below them the nearest private ones",
    "private/roc": "How well true images are told from others, beside what privacy allows",
    "private/study": "What the attack reaches for each setting, beside what privacy allows",
    "private/tradeoff": "Trade-off curves of attacks, beside what the ledger allows",
}


def render_page(cards: Sequence[RunCard], folders: Sequence[Path]) -> str:
    """The page of these runs, whose pictures are in these folders."""
    views = [_view(card, cards) for card in cards]
    for view, card, folder in zip(views, cards, folders, strict=True):
        view |= _drawn(card, folder)
    return template("page.html.jinja").render(**_common(cards), runs=views)


def render_markdown(cards: Sequence[RunCard]) -> str:
    """One run, or several in columns."""
    views = [_view(card, cards) for card in cards]
    tables = [dict(view["facts"]) for view in views]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, *(table.get(name, "-") for table in tables)) for name in names]
    heads = (("guaranteed", "guarantee"), ("proved by attack", "proof"))
    headlines = [(name, *(": ".join(view[key]) for view in views)) for name, key in heads]
    hidden = any(card.has_private and card.private is None for card in cards)
    text = template("report.md.jinja").render(
        **_common(cards),
        runs=views,
        fact_rows=rows,
        headlines=headlines,
        hidden=words.HIDDEN if hidden else "",
        damaged=words.DAMAGED,
    )
    return text + "\n"


def caveats(card: RunCard) -> list[str]:
    """What is not guaranteed."""
    return template("caveats.txt.jinja").render(card=card, damaged=words.DAMAGED).splitlines()


def audit_text(found: Findings) -> str:
    """What an audit found, for the screen."""
    allowed = None if found.allowed is None else float(np.interp(0.01, *found.allowed))
    return (
        template("audit.txt.jinja")
        .render(
            found=found,
            guarantee=words.audited_words(found),
            proof=words.proof_of(found),
            allowed=allowed,
        )
        .rstrip()
    )


def summary_text(summary: Mapping[str, Any], head: str, lines: Mapping[str, str]) -> str:
    """What a command says at its end; the owner who sees it is also told what is private."""
    return (
        template("summary.txt.jinja")
        .render(summary=summary, head=head, lines=lines, found=findings_of(Path(summary["run"])))
        .rstrip()
    )


def _common(cards: Sequence[RunCard]) -> dict[str, Any]:
    """What both say of all runs together."""
    kinds = {
        "made from public images"
        if card.from_public
        else "that may be shared"
        if words.may_be_shared(card)
        else ""
        for card in cards
        if card.pictures
    }
    return {
        "several": len(cards) > 1,
        "card_names": [card.name for card in cards],
        "title": words.title(cards),
        "pictures_title": f"Pictures {kinds.pop() if len(kinds) == 1 else ''}".strip(),
        "private": words.PRIVATE if any(card.private is not None for card in cards) else "",
        "differing": words.differing(cards) if len(cards) > 1 else [],
        "made_by": MADE_BY,
    }


def _view(card: RunCard, cards: Sequence[RunCard]) -> dict[str, Any]:
    """What both say of one run."""

    def of(*kinds: str) -> tuple[Finding, ...]:
        found = card.private
        return () if found is None else tuple(f for kind in kinds for f in found.of(kind))

    attacks, bounds, checks = of("attack"), of("bound"), of("check")
    return {
        "card": card,
        "state": words.progress_words(card),
        "guarantee": words.guarantee_words(card),
        "proof": words.proof_words(card),
        "facts": words.facts(card, cards),
        "broken": card.private is not None and words.broken(card.private),
        "damaged": "; ".join(card.damage),
        "caveats": caveats(card),
        "rates": of("accuracy", "quality"),
        "attacks": attacks,
        "bounds": bounds,
        "checks": checks,
        "fine": any(attack.tpr_at_0_1_percent_fpr for attack in attacks),
        "has_audit": bool(bounds or checks),
        "attacked": bool(attacks or card.private_pictures),
        "unproved": words.unproved(card),
    }


def _drawn(card: RunCard, folder: Path) -> dict[str, Any]:
    """Charts and pictures of one run."""
    found, curve = card.private, card.curve
    attacks, bounds = ((), ()) if found is None else (found.of("attack"), found.of("bound"))
    rocs = {attack.name: attack.roc for attack in attacks if attack.roc is not None}
    bands = {attack.name: attack.band for attack in attacks if attack.band is not None}
    told = ". ".join(f"{a.name}: AUC {words.interval(a.value)}" for a in attacks)
    says = "" if curve is None else curve_says(card)
    drawn = {
        "curve": curve and chart.epsilon_curve(curve.steps, curve.epsilon, curve.done, says),
        "roc": rocs and found and chart.roc_chart(rocs, found.allowed, told, bands),
        "bars": bounds and proof_bars(bounds),
    }
    return {
        **{name: svg and Markup(svg) for name, svg in drawn.items()},  # names in it are escaped
        "curve_says": says,
        "roc_names": list(rocs),
        "has_bands": bool(bands),
        "pictures": pictures_of(folder, card.pictures),
        "private_pictures": pictures_of(folder, card.private_pictures),
    }


def curve_says(card: RunCard) -> str:
    """The curve in a sentence."""
    assert card.curve is not None
    assert card.guarantee is not None
    epsilon, planned = map(words.round_up, (card.guarantee.epsilon, card.guarantee.planned))
    says = f"Epsilon {epsilon} after {card.curve.done:,} uses of private data"
    if card.curve.done < card.curve.steps[-1]:
        says += f"; {planned} after all {card.curve.steps[-1]:,} (dashes)"
    return f"{says}, at δ = {card.guarantee.delta:g}, by the PLD accountant."


def proof_bars(bounds: Sequence[Finding]) -> str:
    """Bars of the epsilon that each bound proves, with marks of what was guaranteed."""
    rows = [(bound.name, words.proved(bound), bound.guaranteed) for bound in bounds]
    told = [
        f"{name}: at least {words.round_down(proved)}"
        + ("" if guaranteed is None else f", guaranteed {words.round_up(guaranteed)}")
        for name, proved, guaranteed in rows
    ]
    return chart.bars([row for row in rows if math.isfinite(row[1])], ". ".join(told))


def pictures_of(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """PNG files as a page can hold them; one that is none, or too large, is left out."""
    found = []
    for name in names:
        raw = (folder / name).read_bytes()
        if len(raw) > PICTURE_LIMIT or not raw.startswith(b"\x89PNG"):
            continue
        width, height = struct.unpack(">II", raw[16:24])
        source = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
        size = {"width": width, "height": height}
        found.append({"source": source, "caption": caption(name), **size})
    return found


def caption(picture: str) -> str:
    """What a picture of a run shows, by its path in the run."""
    place = picture.removesuffix(".png")
    folder, _, name = place.rpartition("/")
    if folder == "stages/sample/samples":
        return "Some of the images that were drawn"
    if folder == "stages/generator/samples" and name.isdecimal():
        return f"What the generator draws after about {int(name):,} images"
    return CAPTIONS.get(place, name.replace("_", " ").replace("-", " ").capitalize())


@cache
def template(name: str) -> Any:
    """A template of those beside this file, which escapes for its kind of file."""
    kind = name.split(".")[1]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=kind != "txt",
        undefined=StrictUndefined,
        finalize=_plain if kind == "md" else None,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals["infinity"] = math.inf
    return environment.get_template(name)


def _plain(value: Any) -> Markup:
    """Text that Markdown and HTML show as it is, on one line; what is safe already stays."""
    if isinstance(value, Markup):
        return value
    text = html.escape(" ".join(str(value).split()), quote=False)
    return Markup(re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text))
