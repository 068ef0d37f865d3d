"""What a card means, in sentences: the page and report.md say the same things.

Numbers are rounded so that they stay true: what is guaranteed goes up, what is proved goes down.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sfumato.reporting.card import STATED, RunCard, SpentEvents
from sfumato.reporting.guarantee import Guarantee
from sfumato.reporting.subject import Subject
from sfumato.results import Audited, Finding, Findings, Limits

PRIVATE = (
    "This page holds what was computed from private images without any noise: scores, pictures, "
    "attacks. No ledger covers it. Do not share it."
)
HIDDEN = (
    "What was measured on private images (accuracy, attacks, audits) is not here. "
    "--include-private puts it on a page of its own, which must not be shared."
)
DAMAGED = "This run is damaged: what is left of it is no guarantee. Do not rely on it."
UNPROVED = "There is no lower bound on epsilon here."
COMPARABLE = (
    "model",
    "data",
    "image_size",
    "grey",
    "batch_size",
    "physical_batch_size",
    "precision",
    "compile",
    "augmult",
    "train_only",
    "device",
)
"""Settings that the time of a step depends on, besides privacy."""
ABOUT = {
    "account": "A plan and its price",
    "audit": "An audit of {data}",
    "demo": "The story of {data}",
    "invert": "Classes of {data}, as a model sees them",
    "reconstruct": "Images of {data}, sought in weights",
    "release": "Images to share, for the task of {data}",
    "warmup": "A generator for {data}, and what is trained from there",
}
"""Titles of runs that do something else than train one model."""


def title(cards: Sequence[RunCard]) -> str:
    """The name of the page."""
    if len(cards) > 1:
        return f"{len(cards)} runs, side by side"
    model, data, verb = model_of(cards[0]), data_of(cards[0]), cards[0].verb
    if verb in ABOUT:
        return ABOUT[verb].format(data=data)
    return f"{model} on {data}" if model else f"{verb}: {data}"


def model_of(card: RunCard) -> str:
    """The model that the run is about."""
    if card.subject is not None:
        return card.subject.model
    return str(card.summary.get("model") or card.settings.get("model") or "")


def data_of(card: RunCard) -> str:
    """The images that the run is about."""
    if card.guarantee is not None:
        return card.guarantee.data
    known = card.summary
    return str(known.get("data") or known.get("target") or card.settings.get("data") or card.name)


def guarantee_words(card: RunCard) -> tuple[str, str]:
    """The guarantee: a number for the headline, and what it is about."""
    guarantee = card.guarantee
    if card.damage:
        return "not known", DAMAGED
    if card.verb == "audit" and card.private is not None:
        return audited_words(card.private)
    if guarantee is None and card.verb == "audit":
        return (
            "not shown",
            "What was guaranteed and what is proved is private: --include-private shows it.",
        )
    if card.verb == "invert" and card.subject is not None:
        return _attacked_words(card.subject)
    if guarantee is None:
        return "none", "There is no ledger: this run guarantees nothing about private images."
    if math.isinf(guarantee.epsilon):
        return "ε = ∞", f"No guarantee: images of {guarantee.data} were used without noise."
    now = f"ε ≤ {round_up(guarantee.epsilon)}"
    about = terms(guarantee)
    if not card.finished:
        more = (
            ""
            if guarantee.planned == guarantee.epsilon
            else f"; {round_up(guarantee.planned)} planned"
        )
        return now, f"so far{more}, {about}"
    return now, about


def _attacked_words(subject: Subject) -> tuple[str, str]:
    """The guarantee of a model under attack: the attack has none."""
    guarantee, nothing = subject.guarantee, "The attack itself guarantees nothing."
    if guarantee is None:
        return subject.instead[0], f"{subject.instead[1]} {nothing}"
    about = f"guaranteed by the target, {terms(guarantee)}"
    return f"ε ≤ {round_up(guarantee.epsilon)}", f"{about}. {nothing}"


def audited_words(found: Findings) -> tuple[str, str]:
    """The guarantee that an audit put to the test."""
    if found.guarantee is None:
        return "none", f"{found.target} guarantees nothing: it was made without noise."
    by = "as claimed for" if found.guarantee.claimed else "by the ledger of"
    about = f"{by} {found.target}, {terms(found.guarantee)}"
    return f"ε ≤ {round_up(found.guarantee.epsilon)}", about


def proof_words(card: RunCard) -> tuple[str, str]:
    """What was proved against the guarantee: a number for the headline, and what it rests on."""
    if card.private is not None:
        return proof_of(card.private, unproved(card))
    return ("not shown", HIDDEN) if card.has_private else ("not measured", unproved(card))


def proof_of(found: Findings, otherwise: str = UNPROVED) -> tuple[str, str]:
    """The same of findings; `otherwise` is said where nothing is proved."""
    bounds, checks = found.of("bound"), found.of("check")
    own = [bound for bound in bounds if bound.own]
    failed = [check.name for check in checks if check.passed is False]
    if failed:
        about = f"{len(failed)} of {len(checks)} checks of the mechanism: {'; '.join(failed)}"
        broke = any(bound.kept is False for bound in own)
        return "check FAILED", f"{about}. {verdict(own)}" if broke else about
    if not own and bounds:
        return "see below", "What is proved is about other models than this run's own."
    if not own:
        return "not measured", otherwise
    best, measured = best_of(own), [bound for bound in own if not bound.by_attack]
    at = "" if best.delta is None else f"at δ = {best.delta:.3g}, "
    words = f"{at}{confidence(best)}: {best.name}"
    words += "".join(f"; {b.name}, measured: ε ≥ {round_down(proved(b))}" for b in measured)
    return f"ε ≥ {round_down(proved(best))}", f"{words}. {verdict(own)}"


def proved(bound: Finding) -> float:
    """The epsilon that a bound proves."""
    return 0.0 if bound.value is None else bound.value[0]


def best_of(bounds: Sequence[Finding]) -> Finding:
    """What proves most among attacks; among measurements where nobody attacked."""
    return max(bounds, key=lambda bound: (bound.by_attack, proved(bound)))


def unproved(card: RunCard) -> str:
    """That nothing is proved, and what that would take."""
    if card.verb != "train":
        return UNPROVED
    if card.settings.get("unit") == "person":
        return f"{UNPROVED} None can be had: canaries are single images, and this run hides people."
    if card.settings.get("canaries"):
        return f"{UNPROVED} sfumato audit --run asks the canaries for one."
    return (
        f"{UNPROVED} Attacks alone prove none. It takes canaries: train with --canaries 1000, then "
        "sfumato audit --run."
    )


def broken(found: Findings) -> bool:
    """Whether the run's own guarantee is disproved, or a check of its mechanism failed."""
    disproved = any(bound.own and bound.kept is False for bound in found.of("bound"))
    return disproved or any(check.passed is False for check in found.of("check"))


def may_be_shared(card: RunCard) -> bool:
    """Whether a guarantee covers what lies open in the run."""
    guarantee = card.guarantee
    if card.damage:
        return False
    if guarantee is None:
        return card.verb not in ("train", "reconstruct", "warmup")
    return math.isfinite(guarantee.epsilon) and not guarantee.not_for_release


def verdict(bounds: Sequence[Finding]) -> str:
    """Whether the guarantee stands."""
    if broken_by := [bound.name for bound in bounds if bound.kept is False]:
        return (
            f"THE GUARANTEE IS BROKEN (by {', '.join(broken_by)}): more is proved than guaranteed."
        )
    if any(bound.kept for bound in bounds):
        return "That does not break the guarantee."
    return "There is no guarantee to compare it with."


def confidence(bound: Finding) -> str:
    """How sure a bound is."""
    if bound.confidence is None:
        return "confidence not recorded"
    return f"{100 * bound.confidence:g} % confidence"


def facts(card: RunCard, cards: Sequence[RunCard] = ()) -> list[tuple[str, str]]:
    """What was trained on what, how, and what a step costs beside that of other cards."""
    plan, rows = card.plan or {}, [("command", f"sfumato {card.verb}")]
    rows += [("data", data_of(card)), ("model", model_of(card)), ("state", progress_words(card))]
    if plan:
        size, batch = plan.get("size"), plan["expected_batch"]
        noise = f"{plan['noise_multiplier']:.4g} times the norm bound ({plan['max_norm']:g})"
        rows += [
            ("size", "" if size is None else f"{size:,} {_units(card)}"),
            ("batches", f"{plan['steps']:,} steps of about {batch:g} (rate {plan['rate']:.4g})"),
            ("noise", noise if plan["noise_multiplier"] else "none"),
        ]
    known = {"model", "data", "promise", "not_for_release", *STATED}
    known |= {"noise_multiplier", "rate", "steps", "student", "controls"} if plan else set()
    rows += [(k.replace("_", " "), v) for k, v in _told(card.summary, known)]
    for stage, summary in card.stages.items():
        told = [f"{k.replace('_', ' ')} {v}" for k, v in _told(summary or {}, known)]
        rows.append((f"stage {stage}", "; ".join(told)))
    rows.append(("cost", cost(card, cards)))
    return [(name, value) for name, value in rows if value]


def _told(summary: Mapping[str, Any], known: Collection[str]) -> list[tuple[str, str]]:
    """Numbers and words of a summary, but for those that are told elsewhere."""
    plain = {k: v for k, v in summary.items() if not isinstance(v, dict | list)}
    return [(name, short(value)) for name, value in plain.items() if name not in known]


def _units(card: RunCard) -> str:
    """What the plan counts."""
    if card.guarantee is not None and card.guarantee.unit == "person":
        return "people"
    count = card.settings.get("canaries")
    thing = "examples" if count and card.settings.get("canary_kind") == "gradient" else "images"
    return f"{thing}, {count:,} of them canaries" if count else thing


def progress_words(card: RunCard) -> str:
    """How far the run is."""
    if card.finished:
        return "finished"
    if card.steps is not None:
        return f"not finished: step {card.steps[0]:,} of {card.steps[1]:,}"
    done = [name for name, summary in card.stages.items() if summary is not None]
    return "not finished" + (f": {', '.join(done)} done" if done else "")


def spent_words(spent: SpentEvents) -> str:
    """Events of one kind in a sentence."""
    if spent.count == 1:
        return f"one release: {spent.what}"
    return f"{spent.count:,} releases, each {spent.what}"


def differing(cards: Sequence[RunCard]) -> list[tuple[str, ...]]:
    """Settings that all runs have, and not all alike: other commands have other settings."""
    rows = []
    for name in cards[0].settings:
        values = [short(card.settings[name]) for card in cards if name in card.settings]
        if len(values) == len(cards) and len(set(values)) > 1:
            rows.append((name.replace("_", " "), *values))
    return rows


def cost(card: RunCard, cards: Sequence[RunCard] = ()) -> str:
    """Time of a step, against plain training of the same where that is among the cards."""
    own = _seconds(card)
    if own is None:
        return ""
    each = per_example(card)
    words = f"{duration(own)} a step{f', {each} an example' if each else ''} (median)"
    if _is_plain(card):
        return words
    alike = [c for c in cards if _is_plain(c) and _seconds(c) and _work(c) == _work(card)]
    for plain in alike[:1]:
        times = own / (_seconds(plain) or own)
        words += f", {times:.2f} times that of {plain.name}, which has no privacy"
    return words


def per_example(card: RunCard) -> str:
    """Time of a step over its examples, which can be compared where batches cannot."""
    found = () if card.private is None else card.private.of("cost")
    return duration(found[0].seconds_per_example) if found else ""


def _seconds(card: RunCard) -> float | None:
    found = () if card.private is None else card.private.of("cost")
    return found[0].seconds_per_step if found else None


def _is_plain(card: RunCard) -> bool:
    return card.guarantee is not None and math.isinf(card.guarantee.epsilon)


def _work(card: RunCard) -> tuple[Any, ...]:
    return (card.verb, *(card.settings.get(name) for name in COMPARABLE))


def duration(seconds: float | None) -> str:
    """A time in a few characters."""
    if seconds is None:
        return ""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def interval(value: Limits | None) -> str:
    """A value with its interval."""
    if value is None:
        return "-"
    middle, low, high = value
    return f"{middle:.3f}" + ("" if low is None or high is None else f" ({low:.3f} to {high:.3f})")


def round_up(epsilon: float) -> str:
    """A guarantee with two decimals, or two digits if it is small: rounded up, it is still kept."""
    if math.isinf(epsilon):
        return "∞"
    places = 2 if epsilon <= 0 else min(9, max(2, 1 - math.floor(math.log10(epsilon))))
    return f"{math.ceil(epsilon * 10**places) / 10**places:.{places}f}"


def round_down(epsilon: float) -> str:
    """A lower bound with two decimals, which is still proved."""
    return "∞" if math.isinf(epsilon) else f"{math.floor(epsilon * 100) / 100:.2f}"


def terms(guarantee: Guarantee | Audited) -> str:
    """What an epsilon means nothing without: its delta, and whom it hides from whom."""
    return f"at δ = {guarantee.delta:g}, {_neighbours(guarantee)}"


def _neighbours(guarantee: Guarantee | Audited) -> str:
    whom = "image" if guarantee.unit == "example" else "person"
    how = {"add-or-remove": "added or removed", "replace": "replaced by another"}
    return f"for one {whom} {how.get(guarantee.relation, guarantee.relation)}"


def beats_guessing(attack: Finding) -> bool:
    """Whether an interval lies above what a guess reaches, AUC 0.5 and as many hits as alarms."""
    pairs = (attack.value, 0.5), (attack.tpr_at_1_percent_fpr, 0.01)
    lows = [(v[0] if v[1] is None else v[1], guess) for v, guess in pairs if v is not None]
    return any(low > guess for low, guess in lows)


def short(value: Any) -> str:
    """A setting or number as a few characters."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
