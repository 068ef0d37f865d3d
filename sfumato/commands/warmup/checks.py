"""What `sfumato warmup` refuses among its settings: things that mean nothing together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfumato.diffusion.diffusion import Diffusion
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.commands.warmup.settings import Config

OF_THE_NETWORK = ("gen_looks", "gen_width", "gen_multipliers", "gen_blocks", "gen_dropout")
"""Settings of a generator that a private one has too: the others are about its training."""


def require_all_classes(number: int, classes: Sequence[str]) -> None:
    """Refuse to draw less than an image of each class."""
    if number < len(classes):
        raise ConfigError(
            f"--number {number} is less than an image of each of {len(classes)} classes."
        )


def check_nothing_drawn(config: "Config") -> None:
    """Refuse what needs drawn images, where there are none."""
    needs = {"--extender": config.extender != "none", "--warm-repeats": config.warm_repeats > 1}
    if found := _given({**_about_drawing(config), **needs}):
        raise ConfigError(
            f"--number 0 draws no image, and {found[0]} needs some: leave one of them out (after a "
            "preset: --warm-repeats 1)."
        )


def check_samples(config: "Config") -> None:
    """Refuse what is about drawing images, where they are brought."""
    if found := _given({**_about_drawing(config), "--number 0": not config.number}):
        raise ConfigError(
            f"--samples are there already, and {found[0]} is about drawing some: leave one of them "
            "out."
        )


def _about_drawing(config: "Config") -> dict[str, object]:
    """Settings that say how images are drawn, and what was given."""
    return {
        "--private": config.private, "--guide-weight": config.guide_weight,
        "--denoiser": config.denoiser, "--vary": config.vary,
        f"the stage {config.stage}": config.stage not in ("all", *config.stages),
    }  # fmt: skip


def _given(asked: dict[str, object]) -> list[str]:
    return [name for name, given in asked.items() if given]


def check_private(config: "Config") -> None:
    """Refuse what a private generator cannot do, or does not heed."""
    if config.stage not in ("all", *config.stages):
        raise ConfigError(
            f"a private generator has no stage {config.stage}: it learns all images, so none is "
            f"left for it. There are: {', '.join(config.stages)}."
        )
    if config.mode == "non-private":
        raise ConfigError("--private keeps a promise, and --mode non-private none: leave one.")
    if config.train_only != "all" or config.freeze:
        raise ConfigError("--train-only and --freeze: all of a private generator learns.")
    if config.guide_weight:
        raise ConfigError("a guide learns from public images, and --private has none.")
    if config.warm_repeats > 1 or config.vary:
        word = "--vary" if config.vary else "--warm-repeats"
        raise ConfigError(f"{word} takes public images again, and --private has none.")
    if config.extender != "none" or config.controls:
        word = "--controls" if config.controls else "--extender"
        raise ConfigError(f"{word} is for the stage train, which --private does not have.")
    check_changes(config)
    check_unheeded(config)


def check_changes(config: "Config") -> None:
    """A network that is not told how images were changed would draw them changed."""
    given = {"--crop 0": config.crop, "--no-flip": config.flip}
    if found := [remedy for remedy, value in given.items() if value]:
        raise ConfigError(
            "with --private the network is not told of --crop and --flip, and would draw images "
            f"cut and mirrored. Give {' '.join(found)} if a preset has set them, or leave them out."
        )


def check_unheeded(config: "Config") -> None:
    """Refuse settings of the public way, which a preset may have set."""
    usual = Diffusion()
    names = [
        name
        for name in vars(usual)
        if name not in OF_THE_NETWORK and getattr(config.diffusion, name) != getattr(usual, name)
    ]
    if names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ConfigError(
            f"{flags}: without meaning beside --private, whose generator learns by the settings "
            "of training (--epsilon, --steps, --lr ...). Leave it out, and a --preset that sets it."
        )
