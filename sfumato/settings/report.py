"""What `sfumato report` can be asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sfumato.config import Withdrawn
from sfumato.setting_groups import Settings


@dataclass(frozen=True, kw_only=True, init=False)
class Report(Settings):
    """One self-contained page on a run, or on several side by side.

    The words are run directories: sfumato report RUN [RUN ...]. Without any, the newest run in
    runs/ is meant.
    """

    WORDS: ClassVar = "runs"
    WITHDRAWN: ClassVar = {
        "serve": Withdrawn("give the runs, and open report.html in a browser"),
    }

    runs: tuple[Path, ...] = ()
    """Run directories to report on (also: --run RUN)."""
    run: Path | None = None
    """One run directory to report on, in place of words."""
    include_private: bool = False
    """Show also what must not be shared: scores, attacks and private images. The page says so in
    red."""


def digits_cpu() -> Report:
    """The newest run in runs/: after any other command with this preset, what that one did."""
    return Report()


PRESETS = {"digits-cpu": digits_cpu}

SETTINGS = Report
