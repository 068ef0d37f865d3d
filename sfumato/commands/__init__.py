"""One thin module or folder per command: frozen settings, presets, and a `run` of a few stages.

Each has a `COMMAND`, which is all that `cli` knows of it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sfumato.runs import Run
from sfumato.setting_groups import Settings, Subcommand

Summary = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a command is run; what it can be asked for is in sfumato.settings."""

    run: Callable[[Any, Run | None], Summary]
    """Does the work in a run directory and returns the summary. Of several processes, all but the
    leader have no run."""
    show: Callable[[Mapping[str, Any]], str]
    """The summary in words."""
    alarm: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    """What of a summary must not be overheard, in a line: the command then ends with code 3."""
    label: Callable[[Any], str] = lambda _: ""
    """What settings are about, for the name of a run directory: see `as_label`."""
    needs_run: Callable[[Any], bool] = lambda _: True
    """Whether a run directory is made for settings without being asked for."""
    asks_more: Callable[[Any], bool] = lambda _: False
    """Whether settings leave a finished run something to do."""
    writes_file: Callable[[Any], bool] = lambda _: False
    """Whether settings ask for files in a place of their own, by `write_file`, and for no run."""
    write_file: Callable[[Any, Path | None, Callable[[str], None]], Summary] | None = None
    """Writes them to the place that was asked for, and tells what goes on."""
    again: str | None = None
    """A stage that a finished run may take again."""


def as_label(*things: str | Path, epsilon: float | None = None) -> str:
    """Data, models or runs and an epsilon as a part of a name: cifar10-resnet18-eps2."""
    names = [Path(thing).name.removesuffix(".npz") for thing in things]
    names += [] if epsilon is None else [f"eps{epsilon:g}"]
    return "-".join(
        filter(None, (re.sub(r"[^\w.]+", "-", name)[:40].strip("-.") for name in names))
    )


def command_settings(name: str) -> tuple[type[Settings], Mapping[str, Callable[[], Any]]]:
    """What a command can be asked for: its settings, and presets with the score that each reached.

    The command itself is not imported: --help answers at once.
    """
    module = import_module(f"sfumato.settings.{name}")
    return module.SETTINGS, module.PRESETS


def subcommands_of(name: str) -> Mapping[str, Subcommand]:
    """The subcommands of a command, by their words."""
    return getattr(import_module(f"sfumato.settings.{name}"), "SUBCOMMANDS", {})


def names_of(commands: Collection[str]) -> dict[type[Settings], str]:
    """The classes of settings of commands and their subcommands, and how each is called."""
    found = {command_settings(name)[0]: name for name in commands}
    inner = [(name, word, one) for name in commands for word, one in subcommands_of(name).items()]
    return found | {one.kind: f"{name} {word}" for name, word, one in inner}


def settings_of_run(name: str, stored: Mapping[str, Any]) -> type[Settings]:
    """What the settings in the config.json of a run, or of a subcommand's, are read as."""
    module = import_module(f"sfumato.settings.{name}")
    return module.kind_of(stored) if hasattr(module, "kind_of") else module.SETTINGS


def load_command(name: str) -> Command:
    """The command of this name; the first that asks for it imports it."""
    return import_module(f"sfumato.commands.{name}").COMMAND
