"""`sfumato audit`: does this model keep its guarantee?

An upper bound on epsilon comes from a ledger, and a lower one from an attack. Here both stand side
by side. What is audited may be a finished run, a recipe for small heads, or a function that trains.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfumato.commands import Command, as_label
from sfumato.commands.audit.calls import audit_calls
from sfumato.commands.audit.finished import audit_run
from sfumato.commands.audit.heads import audit_heads
from sfumato.commands.audit.record import AuditRecord
from sfumato.commands.stages import require_one_process
from sfumato.errors import SfumatoError
from sfumato.reporting.figures import save_roc
from sfumato.reporting.render import audit_text
from sfumato.reporting.scores import findings_of, keep_audit
from sfumato.runs import Run
from sfumato.settings.audit import PRESETS as PRESETS
from sfumato.settings.audit import AuditHeads, AuditRun, AuditTrainer

Config = AuditRun


def run(config: AuditRun | AuditHeads | AuditTrainer, run: Run | None) -> dict[str, Any]:
    """Attack, bound, draw, and keep all of it private."""
    run = require_one_process("audit", "a model", run)
    if isinstance(config, AuditHeads):
        found = audit_heads(config, run)
    elif isinstance(config, AuditTrainer):
        found = audit_calls(config, run)
    else:
        found = audit_run(config, run)
    record = found.record()
    keep_audit(run, record)
    draw_curves(found, run.private / "tradeoff.png")
    if isinstance(config, AuditRun) and config.run is not None:
        copy_to_target(record, run, config.run)
    return run.finish(
        {
            "target": found.target,
            "promise": found.guarantee,
            "run": str(run.path),
            "bounds": [bound.name for bound in found.bounds],
            "attacks": [attack["name"] for attack in found.attacks],
            "checks": [check["name"] for check in found.checks],
            "findings": "private/audit.json",
        }
    )


def copy_to_target(record: Mapping[str, Any], run: Run, audited: Path) -> None:
    """Leave what was found with the audited run too, for its report: the proof by the guarantee.

    An auditor may have no right to write there, or what is there may be damaged; the audit is done
    all the same.
    """
    try:
        keep_audit(Run(audited), record)
    except (OSError, SfumatoError) as problem:
        why = getattr(problem, "strerror", None) or problem
        run.log(
            f"{audited} could not take a copy of the findings ({why}), so "
            f"its report will lack them. Its owner may copy {run.path}/private/audit.json there."
        )


def draw_curves(found: AuditRecord, path: Path) -> None:
    """The curves of all attacks, and what the ledger allows."""
    curves, bands, allowed = {}, {}, None
    for attack in found.attacks:
        name, points = f"{attack['name']}: AUC {attack['auc'][0]:.3f}", attack["roc"]
        curves[name], bands[name] = (points["fpr"], points["tpr"]), (points["low"], points["high"])
    if found.curve is not None:
        allowed = ("the ledger allows no more", (found.curve["fpr"], found.curve["tpr"]))
    others = "others taken for members"
    save_roc(path, curves, bands=bands, bound=allowed, others=others, title=found.target)


def show(summary: Mapping[str, Any]) -> str:
    """The guarantee beside the proof, and where the rest is."""
    folder = Path(summary["run"]) / "private"
    if not (folder / "audit.json").exists():
        return f"{summary['run']} is finished; its private findings are not here any more."
    lines = [
        audit_text(findings_of(folder.parent)),
        f"  curves    {folder}/tradeoff.png",
        f"  findings  {folder}/audit.json: do not share",
    ]
    return "\n".join(lines)


def alarm(summary: Mapping[str, Any]) -> str | None:
    """That the guarantee is broken, for programs: the summary may be shared and does not say it."""
    record = Path(summary["run"]) / "private" / "audit.json"
    if not record.exists():
        return None
    found = findings_of(record.parent.parent)
    if any(bound.kept is False for bound in found.of("bound")):
        return f"THE GUARANTEE IS BROKEN: {record}"
    if any(check.passed is False for check in found.of("check")):
        return f"A CHECK OF THE MECHANISM FAILED: {record}"
    return None


COMMAND = Command(
    run=run,
    show=show,
    alarm=alarm,
    label=lambda config: as_label(config.subject),
)
