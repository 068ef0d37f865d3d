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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from sfumato.errors import ConfigError
from sfumato.files import read_json
from sfumato.recipes import audit, invert, reconstruct, release, train
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
        """How the network learns with privacy; canaries go with the digits."""
        return train.Config(
            **NETWORK, lr=2.0, clip="automatic", epsilon=PAID_BY_TRAINING * self.epsilon,
            secure=self.secure, canaries=CANARIES, canary_kind="gradient",
        )  # fmt: skip

    @property
    def plain(self) -> train.Config:
        """How it learns without."""
        return train.Config(**NETWORK, lr=0.1, momentum=0.9, mode="non-private")

    def sharing(self, teacher: Path) -> release.Config:
        """How the private network makes images that may be shared, with the rest of epsilon."""
        small = release.PRESETS["digits-cpu"]()
        return replace(small, teacher=teacher, epsilon=self.epsilon, secure=self.secure)


NETWORK: dict[str, Any] = {
    "model": "group-cnn-small", "image_size": 28, "batch_size": 500, "epochs": 20,
    "physical_batch_size": 500,
}  # fmt: skip
CANARIES = 2000
"""Examples that are nobody's, each in the training set by the toss of a coin."""


def digits_cpu() -> Config:
    """Epsilon 3 on 4,000 digits: 0.90 with privacy, 0.95 without; two minutes on 2 cores."""
    return Config()


PRESETS = {"digits-cpu": digits_cpu}


def needs_run(_: Config) -> bool:
    """The demo leaves a page and what it speaks of."""
    return True


def run(config: Config, run: Run) -> dict[str, Any]:
    """Train twice, attack, audit, share, and write the page."""
    from sfumato.recipes.demo_page import Parts, write_page

    private = chapter(run, config.private, "train", "a network learns digits with privacy")
    plain = chapter(run, config.plain, "train", "the same network without", secret="plain")
    stolen = chapter(
        run, reconstruct.PRESETS["digits-private"](), "reconstruct",
        "an attacker learns to see training digits in the weights of a head", secret="stolen",
    )  # fmt: skip
    inverted = chapter(
        run, invert.PRESETS["digits-cpu"](), "invert",
        "another asks a network what its classes look like", secret="inverted",
    )  # fmt: skip
    audited, audited_plain = (
        chapter(
            run, audit.Config(run=target, shadows=0), "audit", f"an auditor looks at {words}",
            secret=secret,
        )
        for target, words, secret in (
            (private, "the private network", "audit"), (plain, "the plain one", "audit-plain"),
        )
    )  # fmt: skip
    shared = chapter(run, config.sharing(private), "release", "images that may be shared")
    parts = Parts(
        private=private, plain=plain, stolen=stolen, inverted=inverted, audited=audited,
        audited_plain=audited_plain, shared=shared,
    )  # fmt: skip
    page = write_page(parts, run)
    if config.open_page:
        show_page(page)
    promised = read_json(shared / "done.json")
    return run.finish(
        {
            "epsilon": promised["epsilon"], "delta": promised["delta"], "page": str(page),
            "model": str(private / "model.safetensors"), "images": str(shared / "bundle"),
            "run": str(run.path), "not_for_release": promised["not_for_release"],
        }
    )  # fmt: skip


def chapter(run: Run, config: Any, verb: str, words: str, secret: str | None = None) -> Path:
    """A verb's whole run in a place of its own; one that is finished is not made again.

    What comes from private digits without noise has a `secret` name, and lies in `private/`.
    """
    run.log(words)
    place = run.path / "stages" / verb if secret is None else run.private / secret
    with open_run(config, verb=verb, out=place, say=run.say) as part:
        if not part.finished:
            import_module(f"sfumato.recipes.{verb}").run(config, part)
    return place


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
    lines = [
        f"  PAGE      {summary['page']}: the whole story; open it in a browser",
        f"  promise   epsilon {summary['epsilon']:.3g}, delta {summary['delta']:.2g} for all that "
        "may be shared (one image more or less):",
        f"  model     {summary['model']}",
        f"  images    {summary['images']}",
        f"  private   {summary['run']}/private: what attackers got, and the page; do not share",
    ]
    lines += [f"  NOT FOR RELEASE: {objection}" for objection in summary["not_for_release"]]
    return "\n".join(lines)
