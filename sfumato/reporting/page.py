"""Cards as one HTML page that needs nothing else: it opens from disk, in light, dark and print.

The template beside this file has the words' places and `style.css` the looks; here is what they
show. Everything from a run goes through the template's escaping. The door to jinja2.
"""

import base64
import math
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sfumato.reporting import captions, chart, words
from sfumato.reporting.card import Card
from sfumato.reporting.costs import costs
from sfumato.reporting.limits import limits

PICTURE_LIMIT = 4_000_000
"""Bytes of one picture; a larger one is left out."""


def render_page(cards: Sequence[Card], folders: Sequence[Path]) -> str:
    """The page of these runs, whose pictures are in these folders."""
    shown = [
        _run(card, folder, cost)
        for card, folder, cost in zip(cards, folders, costs(cards), strict=True)
    ]
    return template("page.html.jinja").render(
        runs=shown, several=len(cards) > 1, title=words.title(cards),
        pictures_title=captions.pictures_title(cards),
        private=words.PRIVATE if any(card.private is not None for card in cards) else "",
        differing=words.differing(cards), made_by=made_by(),
        interval=words.interval, down=words.down, proved=words.proved, confidence=words.confidence,
        spent_words=words.spent_words,
    )  # fmt: skip


def made_by() -> str:
    """Who writes reports here."""
    from sfumato import __version__

    return f"sfumato {__version__}"


def _run(card: Card, folder: Path, cost: str) -> dict[str, Any]:
    found = card.private
    curve = card.curve
    attacks = () if found is None else found.of("attack")
    curves = {attack.name: attack.roc for attack in attacks if attack.roc is not None}
    bands = {attack.name: attack.band for attack in attacks if attack.band is not None}
    bounds = () if found is None else found.of("bound")
    private_pictures = pictures_of(folder, card.private_pictures)
    return {
        "card": card,
        "state": words.state(card),
        "promise": words.promise_words(card),
        "proof": words.proof_words(card),
        "facts": words.facts(card),
        "broken": found is not None and words.broken(found),
        "reasons": words.warnings(card),
        "damaged": "; ".join(card.damage),
        "cost": cost,
        "limits": list(limits(card)),
        "settings": [(k.replace("_", " "), words.short(v)) for k, v in card.settings.items()],
        "pictures": pictures_of(folder, card.pictures),
        "pictures_note": captions.pictures_note(card),
        "private_pictures": private_pictures,
        "curve": curve and safe(_curve(card)),
        "curve_says": curve and curve_says(card),
        "roc": curves
        and found
        and safe(chart.roc_chart(curves, found.allowed, _roc_says(card), bands)),
        "has_bands": bool(bands),
        "unproved": words.unproved(card),
        "roc_names": list(curves),
        "bars": bounds and safe(_bars(card)),
        "any_promised": any(bound.guaranteed is not None for bound in bounds),
        "fine": any(attack.tpr_at_0_1_percent_fpr for attack in attacks),
        "rates": () if found is None else (*found.of("accuracy"), *found.of("quality")),
        "attacks": attacks,
        "bounds": bounds,
        "checks": () if found is None else found.of("check"),
        "has_attacks": found is not None and bool(attacks or private_pictures),
        "has_audit": found is not None and bool(bounds or found.of("check")),
    }


def curve_says(card: Card) -> str:
    """The curve in a sentence."""
    assert card.curve is not None
    assert card.promise is not None
    spent = words.up(card.promise.epsilon)
    says = f"Epsilon {spent} after {card.curve.done:,} uses of private data"
    if card.curve.done < card.curve.steps[-1]:
        says += f"; {words.up(card.promise.planned)} after all {card.curve.steps[-1]:,} (dashes)"
    return f"{says}, at δ = {card.promise.delta:g}, by the PLD accountant."


def _curve(card: Card) -> str:
    assert card.curve is not None
    curve = card.curve
    return chart.epsilon_curve(curve.steps, curve.epsilon, curve.done, curve_says(card))


def _roc_says(card: Card) -> str:
    assert card.private is not None
    told = [f"{a.name}: AUC {words.interval(a.value)}" for a in card.private.of("attack")]
    return ". ".join(told)


def _bars(card: Card) -> str:
    assert card.private is not None
    rows = [(b.name, words.proved(b), b.guaranteed) for b in card.private.of("bound")]
    told = [
        f"{name}: at least {words.down(proved)}"
        + ("" if promised is None else f", promised {words.up(promised)}")
        for name, proved, promised in rows
    ]
    finite = [(name, proved, promised) for name, proved, promised in rows if math.isfinite(proved)]
    return chart.bars(finite, ". ".join(told))


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
        found.append({"source": source, "caption": captions.caption(name), **size})
    return found


def safe(svg: str) -> Any:
    """Text that is HTML already: our own drawing, in which every name was escaped."""
    from markupsafe import Markup

    return Markup(svg)


@cache
def template(name: str) -> Any:
    """A template of those beside this file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(name)
