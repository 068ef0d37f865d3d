"""`sfumato demo`: the whole story on real digits in about two minutes, and one page at the end.

An attacker steals training digits from the weights of one model, and not from those of another
that had noise. Another tells who was in the training set of a model that saw few digits, and fails
where it was trained with privacy. Then a private network learns all digits: an auditor who planted
canaries says what epsilon can be proved. An attacker asks a model what its classes look like. At
last the private network makes images to share.

Every chapter is a command with small settings, and leaves an ordinary run: the private network in
`stages/train`, what may be shared in `stages/release`, and all that comes from private digits
without noise in `private/`, the page among it.
"""

import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sfumato.commands import Command, as_label, load_command
from sfumato.commands.audit import command as audit
from sfumato.commands.demo.page import Parts, write_page
from sfumato.commands.invert import command as invert
from sfumato.commands.reconstruct import command as reconstruct
from sfumato.commands.stages import require_one_process
from sfumato.data.load import load_images
from sfumato.files import read_json
from sfumato.reporting.render import summary_text
from sfumato.reporting.scores import keep_findings
from sfumato.runs import Run, open_run
from sfumato.settings.demo import FEW, Demo
from sfumato.settings.demo import PRESETS as PRESETS

Config = Demo


AUDIT = partial(audit.Config, shadows=0, confidence=0.999)
"""A false alarm in one of a thousand demos is enough."""


def run(config: Demo, run: Run | None) -> dict[str, Any]:
    """Train twice, attack, audit, share, and write the page."""
    run = require_one_process("demo", "a model", run)
    private, shared = (run.path / "stages" / verb for verb in ("train", "release"))
    secret = {
        name: run.private / name
        for name in (
            "stolen",
            "few_plain",
            "few_private",
            "members_plain",
            "members_private",
            "plain",
            "audited",
            "inverted",
        )
    }
    others = chapters(config, secret, private, shared, few_digits(run.private / "few.npz"))
    run_two_processes(others, attacks(secret), run)
    keep_findings(run, "demo")
    page = write_page(Parts(private=private, shared=shared, **secret), run)
    if config.open_page:
        show_page(page)
    summary = read_json(shared / "done.json")
    return run.finish(
        {
            "epsilon": summary["epsilon"],
            "delta": summary["delta"],
            "page": str(page),
            "weights": str(private / "model.safetensors"),
            "images": str(shared / "bundle"),
            "run": str(run.path),
            "not_for_release": summary["not_for_release"],
        }
    )


def few_digits(file: Path) -> Path:
    """A few digits to train on, and others of the same kind that nobody trains on."""
    if not file.exists():
        digits = load_images("digits", "train")
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        digits.select(order[:FEW]).save_npz(file, test=digits.select(order[FEW : FEW + 1000]))
    return file


@dataclass(frozen=True)
class Chapter:
    """A command's whole run, in a place of its own."""

    place: Path
    verb: str
    config: Any
    words: str

    def write(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Make the run, or go on with it; one that is finished is not made again."""
        with open_run(self.config, verb=self.verb, out=self.place, say=say) as part:
            if not part.finished:
                load_command(self.verb).run(self.config, part)


def attacks(secret: Mapping[str, Path]) -> list[Chapter]:
    """Attacks that need none of the other parts."""
    return [
        Chapter(
            secret["stolen"],
            "reconstruct",
            reconstruct.PRESETS["digits-private"](),
            "an attacker learns to see training digits in the weights of a head",
        ),
        Chapter(
            secret["inverted"],
            "invert",
            invert.PRESETS["digits-cpu"](),
            "another asks a network what its classes look like",
        ),
    ]


def chapters(
    config: Demo, secret: Mapping[str, Path], private: Path, shared: Path, few: Path
) -> list[Chapter]:
    """The other parts, in their order: each needs those before it."""
    return [
        Chapter(
            secret["few_plain"],
            "train",
            config.few_plain(few),
            f"a network learns {FEW} digits without privacy",
        ),
        Chapter(secret["few_private"], "train", config.few_private(few), "the same with privacy"),
        Chapter(
            secret["members_plain"],
            "audit",
            AUDIT(run=secret["few_plain"]),
            "an attacker tells who was among them, without privacy",
        ),
        Chapter(
            secret["members_private"], "audit", AUDIT(run=secret["few_private"]), "and with it"
        ),
        Chapter(private, "train", config.private, "a network learns all digits with privacy"),
        Chapter(secret["plain"], "train", config.plain, "the same network without"),
        Chapter(
            secret["audited"],
            "audit",
            AUDIT(run=private),
            "an auditor looks at the private network",
        ),
        Chapter(shared, "release", config.sharing(private), "images that may be shared"),
    ]


def run_two_processes(here: Sequence[Chapter], there: Sequence[Chapter], run: Run) -> None:
    """Write some chapters here and others in a second process, each on half of the cores.

    Small networks do not know what to do with a second core: two of them do.
    """
    threads = torch.get_num_threads()
    half = max(1, threads // 2)
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (half,)) as second:
        torch.set_num_threads(half)
        try:
            futures = []
            for chapter in there:
                run.log(f"meanwhile: {chapter.words}")
                futures.append(second.submit(chapter.write))
            for chapter in here:
                run.log(chapter.words)
                chapter.write(run.say)
            for written in futures:
                written.result()
        finally:
            second.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


def show_page(page: Path) -> None:
    """Open the page in a browser, where someone sits in front of a screen."""
    has_screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if has_screen and sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())


def show(summary: Mapping[str, Any]) -> str:
    """What was guaranteed, and where to look."""
    return summary_text(
        {**summary, "unit": "example"},
        f"the whole story: open {summary['page']} in a browser",
        {
            "model": f"{summary['weights']}: to share, as the images are",
            "images": summary["images"],
        },
    )


COMMAND = Command(
    run=run,
    show=show,
    label=lambda config: as_label(epsilon=config.epsilon),
)
