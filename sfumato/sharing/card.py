"""The data card of a release: what is guaranteed, what it was paid with, what it does not cover.

Every number of the guarantee is derived from the ledger, once when the card is written and again by
the check. So a card cannot guarantee more than its ledger paid for without being found out.
"""

import math
from dataclasses import dataclass
from typing import Literal

from sfumato import __version__
from sfumato.data.images import Images
from sfumato.errors import ConfigError
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.releases import Relation, Release

MOVED = ("mean", "largest")
NEAR_COPIES = ("share", "threshold", "standard_error")
AGAIN = "Write the bundle again from its ledger."


@dataclass(frozen=True, kw_only=True)
class SpentStage:
    """What one stage released: how often, and by which mechanism, in words."""

    events: int
    what: str


@dataclass(frozen=True, kw_only=True)
class BundleCard:
    """What a bundle says about itself."""

    public: str
    """Name of the public images that these were made from."""
    private: str
    """Name of the private data that the guarantee is about."""
    images: int
    """How many images there are."""
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Channels, height and width."""
    k: int
    """Steps by which the images were matched to feature statistics; 0 for none."""
    model: str
    """The teacher."""
    epsilon: float
    delta: float
    relation: Relation
    unit: Literal["example", "person"]
    neighbours: Literal["data sets", "training parts"]
    """Between what the guarantee holds: training parts where sfumato split the private data."""
    accountant: Literal["pld"]
    epsilon_by_rdp: float
    """The same by the second accountant; NaN where that has no formula."""
    noise: Literal["philox", "chacha20"]
    stages: dict[str, SpentStage]
    """What was released, by stage of the ledger."""
    moved: dict[str, float]
    """How far images moved from their public originals, in grey levels: mean and largest."""
    near_copies: dict[str, float] | None
    """The noisy share of private images with a released one closer than a public threshold, that
    threshold, and the noise's standard error."""
    scores: dict[str, float] | None
    """Measured on private images without a mechanism: the ledger does not cover them. Only cards
    of earlier versions have any."""
    not_for_release: tuple[str, ...]
    """Why nobody else may have this; empty if they may."""
    files: dict[str, str]
    """SHA-256 of every file of the bundle but card.json, by name."""
    made_by: str

    def __post_init__(self) -> None:
        for name, wanted in (("moved", MOVED), ("near_copies", NEAR_COPIES)):
            found = getattr(self, name)
            if found is not None and set(found) != set(wanted):
                raise ConfigError(f"{name} must hold {', '.join(wanted)}, and holds {[*found]}.")
        if self.k < 0:
            raise ConfigError(f"k={self.k} must be 0 or more.")


def make_card(
    images: Images,
    ledger: Ledger,
    *,
    k: int,
    model: str,
    public: str,
    moved: dict[str, float],
    near_copies: dict[str, float] | None,
) -> BundleCard:
    """The card of images that `ledger` has paid for, with no files on it yet."""
    header = ledger.header
    return BundleCard(
        public=public,
        private=header.data,
        images=len(images),
        classes=images.classes,
        shape=images.shape,
        k=k,
        model=model,
        epsilon=ledger.epsilon(),
        delta=header.delta,
        relation=header.relation,
        unit=header.unit,
        neighbours=header.neighbours,
        accountant="pld",
        epsilon_by_rdp=ledger.epsilon(accountant="rdp"),
        noise=header.noise,
        stages=_spent(ledger.releases),
        moved=moved,
        near_copies=near_copies,
        scores=None,
        not_for_release=tuple(_objections(ledger, k, near_copies is not None)),
        files={},
        made_by=this_version(),
    )


def this_version() -> str:
    """Who writes cards here."""
    return f"sfumato {__version__}"


def card_problems(card: BundleCard, ledger: Ledger) -> list[str]:
    """Where a card guarantees more than its ledger paid for, or its ledger forbids the release."""
    reasons = [*_objections(ledger, card.k, card.near_copies is not None), *card.not_for_release]
    return [
        *_disagreements(card, ledger),
        *_price_problems(card, ledger),
        *(
            f"not for release: {reason}. Make the bundle again from a run without that."
            for reason in dict.fromkeys(reasons)
        ),
    ]


def card_remarks(card: BundleCard) -> list[str]:
    """What is no fault, and must be known before the bundle is handed on."""
    remarks = []
    if card.scores:
        remarks.append(
            f"{', '.join(card.scores)}: measured on private images without noise. The ledger does "
            "not cover them; whoever publishes them vouches for them."
        )
    if card.noise != "chacha20":
        remarks.append(
            f"the noise came from {card.noise}, a generator that is not cryptographic: good for "
            "research. Use chacha20 where somebody may try to predict it."
        )
    if math.isfinite(card.epsilon) and card.epsilon > 10:
        remarks.append(f"epsilon={card.epsilon:.4g} is above 10, which promises little.")
    if card.made_by != this_version():
        remarks.append(
            f"the card was written by {card.made_by} and checked by {this_version()}: that its "
            "words fit its numbers was not checked."
        )
    return remarks


def _disagreements(card: BundleCard, ledger: Ledger) -> list[str]:
    """Where the card and the ledger's lines speak of different things."""
    header, problems = ledger.header, []
    for name, theirs in (
        ("private", header.data),
        ("delta", header.delta),
        ("relation", header.relation),
        ("unit", header.unit),
        ("neighbours", header.neighbours),
        ("noise", header.noise),
    ):
        if getattr(card, name) != theirs:
            problems.append(
                f"card.json says {name}={getattr(card, name)!r}, and the ledger says {theirs!r}. "
                f"{AGAIN}"
            )
    paid = _spent(ledger.releases)
    if _as_written(card, card.stages) != _as_written(card, paid):
        problems.append(
            f"card.json lists {_stats(card.stages)}, and the ledger holds {_stats(paid)}: lines "
            f"were lost or changed. {AGAIN}"
        )
    return problems


def _price_problems(card: BundleCard, ledger: Ledger) -> list[str]:
    """Where the card's epsilon is less than the ledger costs, or means nothing."""
    pld, rdp = ledger.epsilon(), ledger.epsilon(accountant="rdp")
    problems = []
    for name, stated, found in (
        ("epsilon", card.epsilon, pld),
        ("epsilon_by_rdp", card.epsilon_by_rdp, rdp),
    ):
        # Turned round, so that a stated NaN counts as too little.
        if not math.isnan(found) and not stated >= found * (1 - 1e-6):
            problems.append(
                f"card.json states {name}={stated:g}, and its ledger costs {found:g}: the card "
                f"guarantees more than was paid for. {AGAIN}"
            )
    if math.isfinite(rdp) and rdp < 0.99 * pld:
        problems.append(
            f"the accountants contradict each other: PLD gives epsilon {pld:g}, which should be "
            f"the smaller bound, and RDP gives {rdp:g}. Check the versions of sfumato and "
            "dp-accounting, and trust neither number until they agree."
        )
    if math.isinf(pld):
        exact = dict.fromkeys(release.stage for release in ledger.releases if release.is_exact)
        problems.append(
            f"epsilon is infinite: no noise hides what stage {', '.join(map(repr, exact))} "
            "released. Give it noise and make the bundle again."
        )
    return problems


def _objections(ledger: Ledger, k: int, counts_copies: bool) -> list[str]:
    """Why what `ledger` pays for must not be released as a bundle."""
    found = list(ledger.objections)
    stages = {release.stage for release in ledger.releases}
    inherited = any(release.ledger != ledger.header.id for release in ledger.releases)
    unpaid = 'and the ledger has no event of stage "{}": nobody paid for that'
    if "train" not in stages and not inherited:
        found.append("a teacher was trained on private images, " + unpaid.format("train"))
    if k > 0 and "moments" not in stages:
        found.append(f"k={k} steps matched feature statistics, " + unpaid.format("moments"))
    if counts_copies and "card" not in stages:
        found.append("near copies of private images were counted, " + unpaid.format("card"))
    return found


def _spent(releases: tuple[Release, ...]) -> dict[str, SpentStage]:
    words: dict[str, list[str]] = {}
    for release in releases:
        words.setdefault(release.stage, []).append(release.describe())
    return {
        stage: SpentStage(events=len(said), what=_shortly(said)) for stage, said in words.items()
    }


def _shortly(said: list[str]) -> str:
    kinds = list(dict.fromkeys(said))
    more = f"; and {len(kinds) - 3} other mechanisms" if len(kinds) > 3 else ""
    return "; ".join(kinds[:3]) + more


def _as_written(card: BundleCard, stages: dict[str, SpentStage]) -> object:
    """Stages as far as they must agree: other versions may use other words for the same events."""
    same = card.made_by == this_version()
    return stages if same else {name: spent.events for name, spent in stages.items()}


def _stats(stages: dict[str, SpentStage]) -> str:
    found = [f'{spent.events} of stage "{name}" ({spent.what})' for name, spent in stages.items()]
    return ", ".join(found) or "no events"
