"""`sfumato demo`: the whole story on real digits in about two minutes, and one page at the end.

The same small network learns the digits twice, with differential privacy and without. Then the
attackers come: one sees training digits in the weights of heads, one asks a network what its
classes look like, one tells who was in the training set, and an auditor who planted canaries says
what epsilon can be proved. At last the private network makes images that may be shared.

Every chapter is a verb with small settings, and leaves an ordinary run: the private network in
`stages/train`, what may be shared in `stages/release`, and all that comes from private digits
without noise in `private/`, the page among it.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sfumato.commands import Recipe, as_label, audit, invert, recipe_of, reconstruct, release, train
from sfumato.commands.stages import require_one_process
from sfumato.errors import ConfigError
from sfumato.files import read_json
from sfumato.runs import Run, open_run

PAID_BY_TRAINING = 0.9
"""The share of epsilon that the network gets; the statistics of the shared images get the rest."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole story on the embedded digits: protect, attack, share, and one page."""

    MAY_CHANGE: ClassVar = ("open_page",)
    """Settings that say how, not what: a run may go on with others."""

    epsilon: float = 3.0
    """The promise for all that is released: smaller is stronger, and noisier."""
    secure: bool = False
    """Noise from a cryptographic stream, safe against floating-point attacks."""
    open_page: bool = True
    """Open the page where there is a screen."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(
                f"epsilon={self.epsilon:g}: the demo releases what it makes, so it must be above "
                "0 and finite."
            )

    @property
    def private(self) -> train.Config:
        """How the network learns with privacy: in batches of 500 digits and some canaries."""
        return train.Config(
            **NETWORK, batch_size=625, physical_batch_size=625, lr=2.0, ema=0.95,
            clip="automatic", epsilon=PAID_BY_TRAINING * self.epsilon, secure=self.secure,
            canaries=CANARIES,
        )  # fmt: skip

    @property
    def plain(self) -> train.Config:
        """How it learns without."""
        return train.Config(**NETWORK, batch_size=500, lr=0.1, momentum=0.9, mode="non-private")

    def sharing(self, teacher: Path) -> release.Config:
        """How the private network makes images that may be shared, with the rest of epsilon."""
        small = release.PRESETS["digits-cpu"]()
        return replace(
            small, teacher=teacher, epsilon=self.epsilon, secure=self.secure,
            batch_size=self.private.batch_size, epochs=None,
        )  # fmt: skip


NETWORK: dict[str, Any] = {"model": "group-cnn-small", "image_size": 28, "steps": 160}
CANARIES = 1000
"""Examples that are nobody's, each in the training set by the toss of a coin."""


AUDIT = partial(audit.Config, shadows=0, confidence=0.999)
"""A false alarm in one of a thousand demos is enough."""


def digits_cpu() -> Config:
    """Epsilon 3 on 4,000 digits: 0.88 with privacy, 0.95 without; two minutes on 2 cores."""
    return Config()


PRESETS = {"digits-cpu": digits_cpu}


def run(config: Config, run: Run | None) -> dict[str, Any]:
    """Train twice, attack, audit, share, and write the page."""
    from sfumato.commands.demo.page import Parts, write_page

    run = require_one_process("demo", "a model", run)
    private, shared = (run.path / "stages" / verb for verb in ("train", "release"))
    secret = {
        name: run.private / name
        for name in ("plain", "stolen", "inverted", "audited", "audited_plain")
    }
    attacks = [
        Chapter(secret["stolen"], "reconstruct", reconstruct.PRESETS["digits-private"](),
                "an attacker learns to see training digits in the weights of a head"),
        Chapter(secret["inverted"], "invert", invert.PRESETS["digits-cpu"](),
                "another asks a network what its classes look like"),
    ]  # fmt: skip
    others = [
        Chapter(private, "train", config.private, "a network learns the digits with privacy"),
        Chapter(secret["plain"], "train", config.plain, "the same network without"),
        Chapter(secret["audited"], "audit", AUDIT(run=private),
                "an auditor looks at the private network"),
        Chapter(secret["audited_plain"], "audit", AUDIT(run=secret["plain"]),
                "and at the plain one"),
        Chapter(shared, "release", config.sharing(private), "images that may be shared"),
    ]  # fmt: skip
    side_by_side(others, attacks, run)
    page = write_page(Parts(private=private, shared=shared, **secret), run)
    if config.open_page:
        show_page(page)
    promised = read_json(shared / "done.json")
    return run.finish(
        {
            "epsilon": promised["epsilon"], "delta": promised["delta"], "page": str(page),
            "weights": str(private / "model.safetensors"), "images": str(shared / "bundle"),
            "run": str(run.path), "not_for_release": promised["not_for_release"],
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Chapter:
    """A verb's whole run, in a place of its own."""

    place: Path
    verb: str
    config: Any
    words: str

    def write(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Make the run, or go on with it; one that is finished is not made again."""
        with open_run(self.config, verb=self.verb, out=self.place, say=say) as part:
            if not part.finished:
                recipe_of(self.verb).run(self.config, part)


def side_by_side(here: Sequence[Chapter], there: Sequence[Chapter], run: Run) -> None:
    """Write some chapters here and others in a second process, each on half of the cores.

    Small networks do not know what to do with a second core: two of them do.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    import torch

    threads = torch.get_num_threads()
    half = max(1, threads // 2)
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (half,)) as second:
        torch.set_num_threads(half)
        try:
            promised = []
            for chapter in there:
                run.log(f"meanwhile: {chapter.words}")
                promised.append(second.submit(chapter.write))
            for chapter in here:
                run.log(chapter.words)
                chapter.write(run.say)
            for written in promised:
                written.result()
        finally:
            second.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


def show_page(page: Path) -> None:
    """Open the page in a browser, where somebody sits in front of a screen."""
    import webbrowser

    has_screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if has_screen and sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())


def show(summary: Mapping[str, Any]) -> str:
    """What was promised, and where to look."""
    from sfumato.reporting.words import up

    lines = [
        f"  PAGE      {summary['page']}: the whole story; open it in a browser",
        f"  promise   epsilon {up(summary['epsilon'])}, delta {summary['delta']:.2g} for all that "
        "may be shared (one image more or less):",
        f"  model     {summary['weights']}",
        f"  images    {summary['images']}",
        f"  private   {summary['run']}/private: what attackers got, and the page; do not share",
    ]
    lines += [f"  NOT FOR RELEASE: {objection}" for objection in summary["not_for_release"]]
    return "\n".join(lines)


RECIPE = Recipe(
    config=Config, presets=PRESETS, run=run, show=show,
    label=lambda config: as_label(epsilon=config.epsilon),
)  # fmt: skip
