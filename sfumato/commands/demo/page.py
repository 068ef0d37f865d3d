"""The page of `sfumato demo`. Every number on it is read from the runs of this demo."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.runs import Run

if TYPE_CHECKING:
    from sfumato.reporting.card import Card
    from sfumato.reporting.story import Chapter, Story
    from sfumato.results import Finding, Findings

TITLE = "What a model gives away, and what it does not"
LEDE = (
    "Attackers of four kinds try models that were trained on handwritten digits, with differential "
    "privacy and without it. This page was made in one go, on this machine."
)
COMMANDS = (
    "sfumato train --data my_photos/ --image-size 64 --model resnet18 --epsilon 8 --canaries 1000",
    "sfumato audit --run RUN",
    "sfumato report RUN --include-private",
)


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
    from sfumato.commands.report import write_report
    from sfumato.files import atomic
    from sfumato.reporting.card import read_card
    from sfumato.reporting.story import render_story

    cards = {name: read_card(path, include_private=True) for name, path in vars(parts).items()}
    for folders, out in (
        ([parts.private, parts.plain], run.private / "both"),
        ([parts.few_private, parts.few_plain], run.private / "few"),
        *(([path], path) for path in vars(parts).values()),
    ):
        write_report(folders, out, include_private=True)
    page = run.private / "demo.html"
    with atomic(page) as file:
        file.write(render_story(tell(cards, parts, run.private)).encode())
    return page


def tell(cards: "Mapping[str, Card]", parts: Parts, home: Path) -> "Story":
    """The story of these runs, on a page that lies in `home`."""
    from sfumato.reporting.limits import limits
    from sfumato.reporting.story import Story
    from sfumato.reporting.words import promise_words, proof_words, up

    number, terms = promise_words(cards["shared"])
    proof, trained = proof_words(cards["audited"]), up(promised(cards["private"]))
    pair = (
        ("promised", number, f"{terms}, for all that may be shared: the private network and the "
         f"images it made. The network alone: {trained} at the same δ."),
        ("proved by attack", proof[0], f"of the network's {trained}, {proof[1]}"),
    )  # fmt: skip
    return Story(
        title=TITLE, lede=LEDE, pair=pair, limits=tuple(limits(cards["shared"])), commands=COMMANDS,
        chapters=(
            theft(cards["stolen"], parts, home), members(cards), twice(cards),
            audit(cards["audited"], parts, home), inversion(cards["inverted"], parts, home),
            sharing(cards["shared"], parts, home),
        ),
    )  # fmt: skip


def members(cards: "Mapping[str, Card]") -> "Chapter":
    """Who was among a few digits, told from the losses of two networks."""
    from sfumato.reporting.story import Chapter
    from sfumato.reporting.words import interval, up

    pair = cards["few_plain"], cards["few_private"]
    attacks = [loss_attack(found(cards[name])) for name in ("members_plain", "members_private")]
    promise = f"at most {up(promised(pair[1]))} {delta_of(pair[1])}"
    rows = [
        ("", "without privacy", "with privacy"),
        ("AUC of the attack (0.5 is guessing)", *(interval(a.value) for a in attacks)),
        ("test accuracy", *(interval(found(c).of("accuracy")[0].value) for c in pair)),
        ("epsilon, guaranteed", "no guarantee", promise),
    ]
    return Chapter(
        title="Who was in the training set?",
        words=(
            "The same network is trained twice on the same 100 digits. A model of so few examples "
            "learns each of them, so it is surer of them than of others, and an attacker who sees "
            f"its losses tells who was in: {guessing(attacks[0])} without privacy, "
            f"{guessing(attacks[1])} with it.",
            "We chose few digits to show this: on all 4,000 this network hardly leaks to this "
            "attack even without privacy. And privacy has its price here, because noise that hides "
            "one of 100 digits hides much of what they have in common.",
        ),
        rows=rows, links=[("both in detail", "few/private/report.html")],
    )  # fmt: skip


def twice(cards: "Mapping[str, Card]") -> "Chapter":
    """All digits, with privacy and without."""
    from sfumato.reporting.costs import per_example
    from sfumato.reporting.story import Chapter
    from sfumato.reporting.words import best_of, down, interval, proved, short, up

    private, plain = cards["private"], cards["plain"]
    proof = best_of(found(cards["audited"]).of("bound"))
    rows = [
        ("", "without privacy", "with privacy"),
        ("test accuracy", *(interval(found(c).of("accuracy")[0].value) for c in (plain, private))),
        ("epsilon, guaranteed", "no guarantee",
         f"at most {up(promised(private))} {delta_of(private)}"),
        ("epsilon, proved", "not audited",
         f"at least {down(proved(proof))} at δ = {short(proof.delta)}"),
        ("training, for each example",
         *(f"{per_example(card) or 'not measured'} (median)" for card in (plain, private))),
    ]  # fmt: skip
    return Chapter(
        title="With 4,000 digits privacy costs little",
        words=(
            "The same network again, with all digits and the same number of steps. The private one "
            "clips what each digit adds to a step and adds noise, and every use of the digits is "
            "written in a ledger. One digit is a small part of what 4,000 have in common, so the "
            "noise costs little accuracy.",
        ),
        rows=rows, links=[("both in detail", "both/private/report.html")],
    )  # fmt: skip


def theft(card: "Card", parts: Parts, home: Path) -> "Chapter":
    """Training digits out of the weights of a head."""
    from sfumato.reporting.story import Chapter

    clear, noisy = found(card).of("attack")
    accuracies = [middle(rate.value) for rate in found(card).of("accuracy")]
    return Chapter(
        title="Digits stolen from weights",
        words=(
            "Somebody trains the last layer of a public network on ten digits, and publishes its "
            "weights. An attacker who has seen many such layers learns to see digits in them.",
            f"Without noise, {100 * rate_of(clear):.1f} % of the digits are told from others at 1 "
            f"% false alarms (AUC {middle(clear.value):.2f}): {guessing(clear)}. With noise, "
            f"{100 * rate_of(noisy):.1f} % are (AUC {middle(noisy.value):.2f}): {guessing(noisy)}. "
            f"It has its price: {accuracies[0]:.0%} of test digits are named rightly by such a "
            f"layer without noise, {accuracies[1]:.0%} with it. Privacy needs more than ten "
            "digits.",
        ),
        pictures=[(parts.stolen / "private" / "pictures.png",
                   "The digits that heads were trained on, and what the attacker saw in their "
                   "weights, without noise and with it.")],
        links=[("this attack in detail", address(parts.stolen, home))],
    )  # fmt: skip


def inversion(card: "Card", parts: Parts, home: Path) -> "Chapter":
    """What a class looks like, by a network's answers."""
    from sfumato.reporting.story import Chapter

    rates = {rate.name: middle(rate.value) for rate in found(card).of("accuracy")}
    named, floor = (
        next(value for name, value in rates.items() if name.startswith(start))
        for start in ("guesses that judges", "public images that")
    )
    return Chapter(
        title="A class, read out of a network",
        words=(
            "Another attacker only asks a network that learnt 0 to 4, and has pictures of 5 to 9 "
            f"alone. Of its guesses, {100 * named:.0f} % are taken for the right digit by two "
            f"judges that learnt other images; of pictures of 5 to 9, {100 * floor:.0f} %.",
            "This network made no promise. But a promise about single images would not forbid it: "
            "what a 3 looks like is true of all threes.",
        ),
        pictures=[(parts.inverted / "private" / "guesses.png",
                   "Training digits above, guesses below.")],
        links=[("this attack in detail", address(parts.inverted, home))],
    )  # fmt: skip


def audit(card: "Card", parts: Parts, home: Path) -> "Chapter":
    """What can be proved about the private network."""
    from sfumato.reporting import chart
    from sfumato.reporting.story import Chapter
    from sfumato.reporting.words import down, proved, up, verdict

    findings = found(card)
    bounds, checks = findings.of("bound"), findings.of("check")
    failed = [check.name for check in checks if check.passed is False]
    bars = [(bound.name, proved(bound), bound.guaranteed) for bound in bounds]
    passed = [check for check in checks if check.passed]
    says = ". ".join(f"{b.name}: at least {down(proved(b))}" for b in bounds)
    most = max(bound.guaranteed or 0 for bound in bounds)
    at = "" if findings.guarantee is None else f" at δ = {findings.guarantee.delta:g}"
    return Chapter(
        title="Is the promise kept?",
        words=(
            "Among the digits were canaries: examples that are nobody's, each in the training set "
            "or not by the toss of a coin. An auditor who saw every noisy step guesses the coins. "
            "The better it guesses, the larger epsilon must be.",
            "The noise itself is measured too, where no canary was. "
            f"{verdict(bounds)} {len(passed)} of {len(checks)} checks of the "
            "mechanism passed: of the size of the noise and whether it is new in every step, of "
            "the norm bound, of how batches are drawn."
            + (f" FAILED: {'; '.join(failed)}" if failed else ""),
        ),
        chart=chart.bars(bars, says),
        chart_says=f"Epsilon that is proved (bars), beside the {up(most)} that was promised "
        f"(marks){at}, each at its own assumptions. A bar beyond its mark would break the promise.",
        links=[("the audit in detail", address(parts.audited, home))],
    )  # fmt: skip


def sharing(card: "Card", parts: Parts, home: Path) -> "Chapter":
    """Images for others."""
    from sfumato.reporting.story import Chapter
    from sfumato.reporting.words import up

    rates = {rate.name: middle(rate.value) for rate in found(card).of("accuracy")}
    return Chapter(
        title="Images that may be shared",
        words=(
            "The private network looked at pieces of two photographs, and these were moved until "
            "it saw in them what, with noise, it had seen in the digits. A new network that learns "
            "from them and the private one's answers alone names "
            f"{100 * rates['test accuracy']:.0f} % of real digits rightly, and all of it costs "
            f"epsilon {up(promised(card))} {delta_of(card)}.",
        ),
        pictures=[(parts.shared / "pictures.png", "Public pieces before, and as they are shared.")],
        links=[("the release in detail", address(parts.shared, home))],
    )  # fmt: skip


def found(card: "Card") -> "Findings":
    """What the private part of a run says: it was asked for."""
    assert card.private is not None
    return card.private


def promised(card: "Card") -> float:
    """The epsilon that a run's ledger adds up to."""
    return math.inf if card.promise is None else card.promise.epsilon


def delta_of(card: "Card") -> str:
    """And its delta, without which that means nothing."""
    return "" if card.promise is None else f"at δ = {card.promise.delta:g}"


def loss_attack(findings: "Findings") -> "Finding":
    """The attack that both networks were put to."""
    return next(attack for attack in findings.of("attack") if attack.name == "loss")


def rate_of(attack: "Finding") -> float:
    """What it catches at 1 % false alarms."""
    return middle(attack.tpr_at_1_percent_fpr)


def middle(value: tuple[float, float | None, float | None] | None) -> float:
    """The value itself, without its interval."""
    return math.nan if value is None else value[0]


def guessing(attack: "Finding") -> str:
    """Whether an attack is better than none, by the interval of its AUC."""
    found, low, _ = attack.value or (0.5, 0.5, 0.5)
    if low is None or low <= 0.5:
        return "no better than guessing"
    return "better than guessing" if found > 0.55 else "hardly better than guessing"


def address(part: Path, home: Path) -> str:
    """A part's own report, seen from the page."""
    import os

    return os.path.relpath(part / "private" / "report.html", home)
