"""What the ledgers of a run guarantee: read from their files, added up again, never repaired."""

from dataclasses import dataclass
from pathlib import Path

from sfumato.errors import RunError, SfumatoError
from sfumato.files import read_lines
from sfumato.privacy.accounting import epsilon
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.releases import Release

LEDGERS = ("ledger.jsonl", "stages/*/ledger.jsonl", "bundle/ledger.jsonl")


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What the ledger proves so far, and what it is about."""

    epsilon: float
    """Of all events so far, by the PLD accountant; infinite if one was exact."""
    planned: float
    """Of the whole plan: the same when the run is finished."""
    delta: float
    relation: str
    unit: str
    neighbours: str
    """Data sets, or training parts where sfumato split the data."""
    data: str
    public: str
    """What the guarantee treats as public, in words."""
    noise: str
    not_for_release: tuple[str, ...]
    """Why nobody else may have what this pays for; empty if they may."""


def ledger_of(path: Path) -> Ledger | None:
    """All that the open part of the run has cost, in one ledger: each line counts once."""
    whole: Ledger | None = None
    for found in (file for pattern in LEDGERS for file in sorted(path.glob(pattern))):
        records = read_lines(found)
        if not records:
            continue
        try:
            ledger = Ledger.from_records(records)
            whole = ledger if whole is None else _joined(whole, ledger)
        except SfumatoError as problem:
            raise RunError(f"{found} cannot be trusted: {problem}") from problem
    return whole


def _joined(one: Ledger, other: Ledger) -> Ledger:
    """Both together, under the header of the one that has paid for more."""
    more, less = (one, other) if len(one.releases) >= len(other.releases) else (other, one)
    more.inherit(less)
    return more


def guarantee_of(ledger: Ledger, coming: list[Release] | None = None) -> Guarantee:
    """What the ledger adds up to, and what it will with the events to come."""
    header, spent = ledger.header, ledger.epsilon()
    everything = [*ledger.releases, *(coming or ())]
    planned = epsilon(everything, header.delta, header.relation) if coming else spent
    return Guarantee(
        epsilon=spent,
        planned=planned,
        delta=header.delta,
        relation=header.relation,
        unit=header.unit,
        neighbours=header.neighbours,
        data=header.data,
        public=header.public,
        noise=header.noise,
        not_for_release=tuple(ledger.objections),
    )
