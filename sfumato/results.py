"""What a command found out about a model or its images: findings, each with its uncertainty.

A command writes its findings to `private/findings.json` of its run, for all of them were computed
from private images without a mechanism. A report shows them and does not ask which command they
came from. Numbers that may be shared stand in done.json.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from sfumato.config import read_finished
from sfumato.errors import DamagedRun
from sfumato.files import read_json

FINDINGS = "private/findings.json"

Limits = tuple[float, float | None, float | None]
"""A value, and the lower and upper end of its interval where there is one."""
Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Points: all x, and all y."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found. Fields that its kind does not have are left as they are."""

    kind: Literal["accuracy", "attack", "bound", "check", "quality", "cost"]
    name: str
    """What was measured. For a check: the question."""
    value: Limits | None = None
    """accuracy: a share of images. attack: AUC. bound: the epsilon that is proved. quality: a
    distance."""
    means: str = ""
    """In words: what it is a share of, how the interval was found, what a bound assumes."""
    own: bool = True
    """Whether it is about what the run's own ledger covers, and not about another model."""
    tpr_at_1_percent_fpr: Limits | None = None
    tpr_at_0_1_percent_fpr: Limits | None = None
    roc: Curve | None = None
    """False-positive rates and true-positive rates."""
    band: Curve | None = None
    """The interval of these, point by point: lower ends, and upper ones."""
    delta: float | None = None
    confidence: float | None = None
    relation: str = ""
    by_attack: bool = True
    """Whether a bound comes from guesses who was in; else the mechanism was measured."""
    guaranteed: float | None = None
    """The epsilon guaranteed at the bound's delta and relation; None where there is none."""
    kept: bool | None = None
    """Whether a bound lies within the guarantee; None without a guarantee."""
    passed: bool | None = None
    """Of a check; None if it could not be made."""
    p_value: float | None = None
    seconds_per_step: float | None = None
    """Of a cost."""
    seconds_per_example: float | None = None
    """The same over the size of the batch."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What the ledger of an audited model guarantees."""

    epsilon: float
    delta: float
    relation: str
    unit: str
    claimed: bool = False
    """Whether the user claims it, without a ledger."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a run found, and where the findings of its parts are."""

    found: tuple[Finding, ...] = ()
    target: str | None = None
    """What an audit was about."""
    guarantee: Audited | None = None
    """Of the target; None if it has none."""
    allowed: Curve | None = None
    """The ROC that no attack exceeds, by the ledger."""
    notes: tuple[str, ...] = ()
    """Why some of it means little."""
    parts: dict[str, str] = field(default_factory=dict)
    """Names of runs that this one holds, and their folders in it."""

    def of(self, kind: str) -> tuple[Finding, ...]:
        """The findings of a kind."""
        return tuple(finding for finding in self.found if finding.kind == kind)

    def with_parts(self, path: Path, read: Callable[[Path], "Findings"]) -> "Findings":
        """These and those of all parts of the run in this directory, with the part's name.

        A folder that is not inside the run is no part of it.
        """
        found, notes = list(self.found), list(self.notes)
        for name, folder in self.parts.items():
            place = path / folder
            if path.resolve() not in place.resolve().parents:
                continue
            part = read(place).with_parts(place, read)
            covered = folder.startswith("stages/") and (place / "config.json").exists()
            found += [
                replace(one, name=f"{name}: {one.name}", own=one.own and covered)
                for one in part.found
                if one.kind != "cost"
            ]
            notes += [f"{name}: {note}" for note in part.notes]
        return replace(self, found=tuple(found), notes=tuple(notes))

    def with_audit(self, audit: "Findings") -> "Findings":
        """These with what an auditor found, in place of what an earlier audit did."""
        kept = [one for one in self.found if one.kind not in ("attack", "bound", "check")]
        return replace(
            self,
            found=(*kept, *audit.found),
            target=audit.target,
            guarantee=audit.guarantee,
            allowed=audit.allowed,
        )


def read_findings(file: Path) -> Findings:
    """What `Run.write_json` wrote, by this version or an earlier one."""
    record = read_json(file)
    if not isinstance(record, dict):
        raise DamagedRun(f"{file} is damaged: it holds no findings.")
    found: Sequence[Finding] = [read_finished(Finding, one) for one in record.pop("found", [])]
    return replace(read_finished(Findings, record), found=tuple(found))
