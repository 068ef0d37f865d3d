"""The ledger: an append-only record of each use of private data.

Epsilon is always derived from it, never stored in it. The first line says what the guarantee is
about: which data is private, which data sets count as neighbours, how the randomness was made.
Each further line is an `Release`, written *before* the step it pays for, or the tag that a GPU told
later. A step taken again after a crash, with the same batch and the same noise, is the same
release: it finds its line there and is not charged twice. What is made from an artefact inherits
its lines, so a student distilled from a private teacher carries the teacher's cost.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from sfumato.config import from_json
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.privacy.accounting import Accountant, epsilon
from sfumato.privacy.releases import Relation, Release

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LedgerHeader:
    """The first line: what the guarantee is about."""

    data: str
    """Name of the private data set."""
    delta: float
    relation: Relation = "add-or-remove"
    unit: Literal["example", "person"] = "example"
    """Whose presence is hidden: one image, or all the images of one person."""
    neighbours: Literal["data sets", "training parts"] = "data sets"
    """Between what the guarantee holds. Where sfumato split the data, one more image may move
    others between train and test: it holds between training parts that differ in one image."""
    public: str = "settings, the number of examples, image size and class names"
    """What the guarantee treats as public, in words."""
    noise: Literal["philox", "chacha20"] = "philox"
    """Where the noise comes from: a fast generator for research, or a cryptographic stream."""
    fixed_seed: bool = False
    """The randomness came from a seed that is known: for research, not for release."""
    secret: str = ""
    """The commitment of the run's secret: noise from any other is refused."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        choices = {
            "relation": ("add-or-remove", "replace"),
            "unit": ("example", "person"),
            "neighbours": ("data sets", "training parts"),
            "noise": ("philox", "chacha20"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {' or '.join(allowed)}.")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta={self.delta:g} must lie between 0 and 1.")


class Ledger:
    """A header and its events, in the order they were charged.

    `write`, if given, must make a record durable before it returns; only a tag that is told later
    may come to the disk later.
    """

    def __init__(self, header: LedgerHeader, write: Callable[[Record], None] | None = None) -> None:
        self.header = header
        self._write = write
        self._events: dict[tuple[str, str, int, str], Release] = {}
        self._tags: dict[tuple[str, str, int], set[str]] = {}
        self._charged: set[tuple[str, int]] = set()
        self._seeded_parents: list[str] = []
        self._untold: tuple[Release, Callable[[], str]] | None = None
        self._record({"header": asdict(header)})

    @property
    def releases(self) -> tuple[Release, ...]:
        """All lines so far."""
        self.settle()
        return tuple(self._events.values())

    def charge(self, release: Release, tag: str | Callable[[], str] = "") -> None:
        """Write the line for what is about to happen, with the tag of its sum.

        Guarantee: when this returns, the event is in the ledger, and on disk if the ledger has a
        file. A line read back from there may be charged again, once, with the same tag: that is a
        step repeated after a crash, the same sum with the same noise, and costs nothing more. With
        another tag (the data or the code changed in between) it is another release, and pays. A
        step asked for twice in one process is refused: it is a mistake in counting.

        Where the tag is still on its way from a GPU, `tag` is a function that waits for it. The
        line is then written without a tag, and the tag follows in a line of its own when the ledger
        is next asked for anything (`settle`); if the step has a line already, the function is
        called at once. If a crash came first, nobody knows what the line paid for: a repetition
        counts as another release, and pays again.
        """
        self.settle()
        release = replace(release, ledger=self.header.id)
        step = (release.stage, release.step)
        if step in self._charged:
            raise PrivacyError(
                f'step {release.step} of stage "{release.stage}" was already taken. Count steps '
                "up, or name another stage."
            )
        if callable(tag) and (release.ledger, *step) not in self._tags:
            self._add(release)
            self._untold = release, tag
        else:
            self._add(replace(release, tag=tag() if callable(tag) else tag or release.tag))
        self._charged.add(step)

    def settle(self) -> None:
        """Ask for the tag of the last charge, if it is not known yet, and write it down.

        If the sums were not finite, it is said here, and again whenever the ledger is asked.
        """
        if self._untold is None:
            return
        release, tag = self._untold
        self._tell(release.stage, release.step, tag())
        self._untold = None

    def tags(self, stage: str, step: int) -> set[str]:
        """Tags of what this ledger has paid for under that step; none if it was not taken yet.

        A line whose tag was never told has the empty tag, which no sum has.
        """
        self.settle()
        return set(self._tags.get((self.header.id, stage, step), ()))

    def inherit(self, parent: "Ledger") -> None:
        """Take over the lines of what this run's material was made from.

        The same line counts once, however many ways it comes.
        """
        ours, theirs = self.header, parent.header
        if (ours.relation, ours.unit) != (theirs.relation, theirs.unit):
            raise PrivacyError(
                f'the ledger of "{theirs.data}" hides one {theirs.unit} by {theirs.relation}, this '
                f"one hides one {ours.unit} by {ours.relation}. Such guarantees do not add up: "
                "make both with the same relation and unit."
            )
        seeded = [theirs.id] if theirs.fixed_seed and theirs.id != ours.id else []
        for parent_id in [*seeded, *parent._seeded_parents]:
            self._mark_seeded(parent_id)
        for release in parent.releases:
            self._add(release)

    def epsilon(self, delta: float | None = None, accountant: Accountant = "pld") -> float:
        """An upper bound on what all events together cost; infinite if one of them was exact."""
        delta = self.header.delta if delta is None else delta
        return epsilon(self.releases, delta, self.header.relation, accountant)

    def guarantee(self, delta: float | None = None) -> dict[str, Any]:
        """What is guaranteed, to whom and about what, for a summary; at another delta if given."""
        header, delta = self.header, self.header.delta if delta is None else delta
        return {
            "epsilon": self.epsilon(delta),
            "delta": delta,
            "unit": header.unit,
            "relation": header.relation,
            "neighbours": header.neighbours,
            "data": header.data,
            "not_for_release": self.objections,
        }

    @property
    def objections(self) -> list[str]:
        """Why what this ledger pays for must not be released; empty if it may be."""
        found = []
        if self.header.fixed_seed:
            found.append("its noise came from a fixed seed, which anybody can replay and subtract")
        for parent in self._seeded_parents:
            found.append(f"it was made from {parent}, whose noise came from a fixed seed")
        for stage in {release.stage: None for release in self.releases if release.is_exact}:
            found.append(f'stage "{stage}" released exact values')
        return found

    def records(self) -> list[Record]:
        """The ledger as records for a file of JSON lines."""
        marks = [{"seeded_parent": parent} for parent in self._seeded_parents]
        lines = [{"event": asdict(release)} for release in self.releases]
        return [{"header": asdict(self.header)}, *marks, *lines]

    @classmethod
    def resume(
        cls, records: Sequence[Record], header: LedgerHeader, write: Callable[[Record], None]
    ) -> "Ledger":
        """The ledger that an interrupted run left in `records`; a new one if there are none."""
        if not records:
            return cls(header, write)
        ledger = cls.from_records(records, write)
        if replace(ledger.header, id=header.id) != header:
            raise PrivacyError(
                f"the ledger here makes another guarantee, {ledger.header}, than this run would, "
                f"{header}. Start a new run."
            )
        return ledger

    @classmethod
    def from_records(
        cls, records: Iterable[Any], write: Callable[[Record], None] | None = None
    ) -> "Ledger":
        """Read a ledger back, strictly. Later charges go to `write`."""
        first, *rest = list(records) or [{}]
        if not isinstance(first, Mapping) or set(first) != {"header"}:
            raise RunError("this is no ledger: it does not begin with a header.")
        values = first["header"]
        if isinstance(values, Mapping):  # older ledgers do not say
            values = {"neighbours": "data sets", **values}
        ledger = cls(from_json(LedgerHeader, values))
        for record in rest:
            match record if isinstance(record, Mapping) else {}:
                case {"event": values, **others} if not others:
                    ledger._read_event(from_json(Release, values))
                case {"seeded_parent": str(parent), **others} if not others:
                    ledger._mark_seeded(parent)
                case {"stage": str(stage), "step": int(step), "tag": str(tag), **others} if (
                    not others
                ):
                    ledger._tell(stage, step, tag)
                case _:
                    raise RunError(f"this ledger line holds no event: {record!r}.")
        ledger._write = write
        return ledger

    def _add(self, release: Release) -> None:
        # A line whose tag was never told may have paid for this very sum.
        for tag in (release.tag, ""):
            known = self._events.get((release.ledger, release.stage, release.step, tag))
            if known is not None and replace(known, tag=release.tag) != release:
                raise PrivacyError(
                    f'step {release.step} of stage "{release.stage}" was charged as '
                    f"{known.describe()}, and would now be {release.describe()}. A second release "
                    "needs its own stage."
                )
        if release.name not in self._events:
            self._record({"event": asdict(release)})
            self._events[release.name] = release
            self._tags.setdefault((release.ledger, release.stage, release.step), set()).add(
                release.tag
            )

    def _tell(self, stage: str, step: int, tag: str) -> None:
        """Give the line of a step, which had none, its tag."""
        place = (self.header.id, stage, step)
        untold = self._events.get((*place, ""))
        if untold is None:
            raise RunError(f'step {step} of stage "{stage}" waits for no tag: {tag}.')
        self._record({"stage": stage, "step": step, "tag": tag})
        del self._events[untold.name]
        self._events[(*place, tag)] = replace(untold, tag=tag)
        self._tags[place] = {tag}

    def _read_event(self, release: Release) -> None:
        if release.name in self._events:
            raise RunError(f"the ledger holds this line twice: {release}.")
        self._add(release)

    def _mark_seeded(self, parent: str) -> None:
        if parent not in self._seeded_parents:
            self._record({"seeded_parent": parent})
            self._seeded_parents.append(parent)

    def _record(self, record: Record) -> None:
        if self._write is not None:
            self._write(record)
