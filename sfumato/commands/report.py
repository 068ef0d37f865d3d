"""`sfumato report`: one page on a run, or on several side by side.

report.html needs nothing else and opens from disk; report.md says the same in short, for
repositories; card.json has it for programs: `{"made_by", "includes_private", "runs"}`, each run
with the fields of `reporting.card.RunCard`. They lie in the run directory; of several runs
in `report/` beside the first; with --out elsewhere. What is private appears only when it is asked
for, and then all three lie in the `private/` of that place.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sfumato.commands import Command, names_of, settings_of_run
from sfumato.config import dumps, read_record, to_json
from sfumato.errors import ConfigError, RunError, SfumatoError
from sfumato.files import atomic, read_json
from sfumato.reporting.card import read_card
from sfumato.reporting.render import MADE_BY, render_markdown, render_page
from sfumato.reporting.subject import brief
from sfumato.reporting.words import PRIVATE
from sfumato.runs import REPORT, Run
from sfumato.setting_groups import defaults
from sfumato.settings.report import PRESETS as PRESETS
from sfumato.settings.report import Report

Config = Report

ROOT = Path("runs")


def run(config: Report, _: Run | None) -> dict[str, Any]:
    """The report, where it belongs."""
    return write_reports(config, None, lambda _: None)


def write_reports(config: Report, out: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the three files."""
    given = config.runs if config.run is None else (config.run, *config.runs)
    folders = given or (newest_run(ROOT),)
    if out is None:
        out = folders[0] if len(folders) == 1 else folders[0].resolve().parent / "report"
    return write_report(folders, out, include_private=config.include_private)


def write_report(
    folders: Sequence[Path], out: Path, *, include_private: bool = False
) -> dict[str, Any]:
    """Write report.html, report.md and card.json about these runs to `out`, and say where.

    Guarantee: without `include_private` nothing of any `private/` is read. With it, the files go to
    `out/private`, which only their owner can read, and say that they must not be shared.
    """
    cards = [
        replace(read_card(folder, include_private=include_private), command=command_of(folder))
        for folder in folders
    ]
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file. Give a directory with --out.")
    card: dict[str, Any] = {"made_by": MADE_BY, "includes_private": include_private}
    card |= {"warning": PRIVATE} if include_private else {}
    card["runs"] = cards
    out.mkdir(parents=True, exist_ok=True)
    place = Run(out).private if include_private else out
    page, text = render_page(cards, folders), render_markdown(cards)
    for name, whole in zip(REPORT, (page, text, dumps(card, indent=2) + "\n"), strict=True):
        with atomic(place / name) as file:
            file.write(whole.encode())
    return {
        "report": str(place / "report.html"),
        "markdown": str(place / "report.md"),
        "card": str(place / "card.json"),
        "runs": [str(folder) for folder in folders],
        "includes_private": include_private,
        "hidden": any(c.has_private for c in cards),
        "damaged": {str(f): c.damage for f, c in zip(folders, cards, strict=True) if c.damage},
    }


def show(summary: Mapping[str, Any]) -> str:
    """Where the page is."""
    lines = [
        f"Report on {', '.join(summary['runs'])}:",
        f"  page      {summary['report']}: opens in any browser, from disk",
        f"  markdown  {summary['markdown']}",
        f"  card      {summary['card']}: for programs",
    ]
    for folder, problems in summary["damaged"].items():
        lines += [f"  DAMAGED   {folder}: {problem}" for problem in problems]
    if summary["includes_private"]:
        lines.append("  PRIVATE   all three hold what no ledger covers: do not share them")
    elif summary["hidden"]:
        lines.append("  left out  what private/ holds: scores, attacks; see --include-private")
    return "\n".join(lines)


def alarm(summary: Mapping[str, Any]) -> str | None:
    """That a run cannot be believed, for programs."""
    damaged = summary.get("damaged")
    return f"DAMAGED, no proof of anything: {', '.join(damaged)}" if damaged else None


# It is about runs and none itself: it writes into the directories of other commands.
COMMAND = Command(
    run=run,
    show=show,
    alarm=alarm,
    writes_file=lambda _: True,
    write_file=write_reports,
)


def newest_run(root: Path) -> Path:
    """The run that was begun last."""
    records = sorted(root.glob("*/config.json"), key=lambda record: record.stat().st_mtime)
    if not records:
        raise RunError(f"there is no run in {root}/. Give one: sfumato report RUN.")
    return records[-1].parent


def command_of(folder: Path) -> str | None:
    """What to type for the same run again; None if this version has no such settings.

    A flag for each setting that is not the usual one. Paths are as a page shows them.
    """
    record = read_json(folder / "config.json")
    try:
        kind = settings_of_run(record["verb"], record["config"])
        wanted = to_json(read_record(kind, record, finished=True))
    except (ImportError, SfumatoError, AttributeError):
        return None
    words, usual = ["sfumato", *names_of([record["verb"]])[kind].split()], to_json(defaults(kind))
    for setting, value in wanted.items():
        if value == usual[setting] or setting in kind.NOT_REMEMBERED:
            continue
        flag = setting.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return " ".join(shlex.quote(brief(word)) for word in words)
