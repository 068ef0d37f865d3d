"""Which settings of a run are settled: those that something in its directory was made with.

Before anything was made, all of them may change. Afterwards a config is held against the one on
disk, field by field. It may differ in what its class lists in MAY_CHANGE, which says how and not
what; and where a config says by `read_first` which stage reads a setting first, in that setting
until this stage has begun: one generator serves many a warm-up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.config import VERSION, complete_config, differences, without_usual
from sfumato.errors import RunError
from sfumato.files import read_json, read_lines
from sfumato.lineage import START

REPORT = ("report.html", "report.md", "card.json")
"""What `sfumato report` writes, here or, with what must not be shared, in `private/`."""
DATA = "data.json"
"""Which images a run began with: in `private/`, by a digest."""
UNUSED = (
    "ledger.jsonl",
    "plan.json",
    START,
    "private/secret.key",
    "private/canaries.json",
    "private/canary_start.json",
    "private/canary_steps.bin",
    f"private/{DATA}",
    *REPORT,
    *(f"private/{name}" for name in REPORT),
)
"""What an order that was refused before its first step may leave: a ledger without an event, and
a report on that."""

Stages = Mapping[str, Sequence[str]]
"""Stages in their order, each with the settings that it is the first to read."""


def has_begun(folder: Path) -> bool:
    """Whether anything was made in a run or stage that another config must not take over."""
    if len(read_lines(folder / "ledger.jsonl", repair=True)) > 1:
        return True
    private = {f"private/{name}" for name in contents(folder / "private")}
    left = (contents(folder) - {"private"}) | private
    return bool(left - {"config.json", "log.txt", *UNUSED})


def contents(folder: Path) -> set[str]:
    """What is in a directory, besides what a crash at the very start may leave."""
    names = {item.name for item in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if name != ".lock" and not name.endswith(".draft")}


def changes(folder: Path, wanted: Any, free: Sequence[str], kind: type | None = None) -> list[str]:
    """What is not as it was in a run, apart from what may change: `config.name: old -> new`.

    A finished run may be of another version, whose settings were others: `kind` is the class of
    settings that it is read with.
    """
    before = read_json(folder / "config.json")
    if isinstance(before, dict):
        read = complete_config if (folder / "done.json").exists() else without_usual
        before = {**before, "config": read(kind, before.get("config")), "version": VERSION}
    lines, ignored = differences(before, wanted), {f"config.{name}" for name in free}
    return [line for line in lines if line.partition(":")[0] not in ignored]


def needs_config(
    folder: Path, wanted: Any, free: Sequence[str], stages: Stages, kind: type | None = None
) -> bool:
    """Whether the config of a run is to be written: it is new, or differs where it still may.

    Guarantee: with True, nothing in the directory was made with a setting that differs, nor is
    anything left of orders that were refused; with False, the config is the one on disk. Otherwise
    a `RunError` that names the settings, and the stages that have read them.
    """
    if not has_begun(folder):
        clear_refused(folder)
        return True
    verb = read_json(folder / "config.json").get("verb")
    if verb != wanted.get("verb"):
        raise RunError(f"{folder} is a run of sfumato {verb}. Choose another --out.")
    found = changes(folder, wanted, free, kind)
    used = {name: stage for stage in last_begun(folder, stages) for name in stages[stage]}
    listed = {name for names in stages.values() for name in names}
    refused = [
        line + (f" (the stage {used[name]} has used it)" if name in used else "")
        for line in found
        if (name := setting_of(line)) in used or name not in listed
    ]
    if refused:
        raise RunError(
            f"{folder} was made with other settings:\n  " + "\n  ".join(refused) + "\n"
            "Repeat the command as it was, or choose another --out."
        )
    if found:
        for stage in stages:
            place = folder / "stages" / stage
            if not has_begun(place):
                clear_refused(place)
    return bool(found)


def last_begun(folder: Path, stages: Stages) -> list[str]:
    """The last stage that has begun, and all before it: one that was left out stays left out."""
    names = list(stages)
    while names and not has_begun(folder / "stages" / names[-1]):
        names.pop()
    return names


def setting_of(line: str) -> str:
    """The setting that a line of `differences` is about: of nested ones, the outer."""
    verb, _, name = line.partition(":")[0].partition(".")
    return name.partition(".")[0] or verb


def clear_refused(folder: Path) -> None:
    """Remove what a refused order left."""
    for name in UNUSED:
        (folder / name).unlink(missing_ok=True)
