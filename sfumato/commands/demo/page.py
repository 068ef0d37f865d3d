"""The page of `sfumato demo`: `reporting/demo.html.jinja`, with numbers of this demo's runs."""

import os
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from sfumato.commands.report import write_report
from sfumato.files import atomic
from sfumato.reporting import words
from sfumato.reporting.card import read_card
from sfumato.reporting.render import MADE_BY, caveats, pictures_of, proof_bars, template
from sfumato.results import Finding
from sfumato.runs import Run

PICTURES = {
    "stolen": "private/pictures.png",
    "inverted": "private/guesses.png",
    "shared": "pictures.png",
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The runs that the page speaks of."""

    stolen: Path
    few_plain: Path
    few_private: Path
    members_plain: Path
    members_private: Path
    private: Path
    plain: Path
    audited: Path
    inverted: Path
    shared: Path


def write_page(parts: Parts, run: Run) -> Path:
    """Tell the story, with a report on every part of it to click on; where it is."""
    for folders, out in (
        ([parts.private, parts.plain], run.private / "both"),
        ([parts.few_private, parts.few_plain], run.private / "few"),
        *(([path], path) for path in vars(parts).values()),
    ):
        write_report(folders, out, include_private=True)
    page = run.private / "demo.html"
    with atomic(page) as file:
        file.write(render_story(parts, run.private).encode())
    return page


def render_story(parts: Parts, home: Path) -> str:
    """The story of these runs, on a page that lies in `home`."""
    places = vars(parts)
    cards = {name: read_card(path, include_private=True) for name, path in places.items()}
    found = {name: card.private for name, card in cards.items() if card.private is not None}
    bounds = found["audited"].of("bound")
    losses = {
        name: next(one for one in found[name].of("attack") if one.name == "loss")
        for name in ("members_plain", "members_private")
    }
    return template("demo.html.jinja").render(
        **losses,
        cards=cards,
        guessing=attack_verdict,
        guarantee=words.guarantee_words(cards["shared"]),
        proof=words.proof_words(cards["audited"]),
        best=words.best_of(bounds),
        bars=Markup(proof_bars(bounds)),  # names in it are escaped
        caveats=caveats(cards["shared"]),
        drawn={name: pictures_of(places[name], [file]) for name, file in PICTURES.items()},
        links={
            name: os.path.relpath(path / "private" / "report.html", home)
            for name, path in places.items()
        },
        private=words.PRIVATE,
        made_by=MADE_BY,
    )


def attack_verdict(attack: Finding) -> str:
    """Whether an attack is better than none, by the interval of its AUC."""
    found, low, _ = attack.value or (0.5, 0.5, 0.5)
    if low is None or low <= 0.5:
        return "no better than guessing"
    return "better than guessing" if found > 0.55 else "hardly better than guessing"
