"""What `sfumato report` can be asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sfumato.config import Withdrawn
from sfumato.groups import Settings


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
    """Run directories (also: --run RUN)."""
    run: Path | None = None
    """The same as a word: one run directory."""
    include_private: bool = False
    """Also what must not be shared: scores, attacks, pictures. The page says so in red."""


def digits_cpu() -> Report:
    """The newest run in runs/: after any other verb with this preset, what that one did."""
    return Report()


PRESETS = {"digits-cpu": digits_cpu}

SETTINGS = Report
