"""The stages of `sfumato reconstruct` in their order."""

from collections.abc import Callable
from typing import Any

from sfumato.commands.reconstruct.base import base, features
from sfumato.commands.reconstruct.context import Context
from sfumato.commands.reconstruct.decoder import train
from sfumato.commands.reconstruct.evaluate import evaluate
from sfumato.commands.reconstruct.heads import shadow, stats
from sfumato.commands.stages import follow
from sfumato.runs import Run
from sfumato.settings.reconstruct import STAGES


def take(context: Context, last: str) -> dict[str, Any]:
    """Take the stages up to this one; base and features may belong to another run."""
    made = (base, features, shadow, stats, train, evaluate)
    stages: dict[str, Callable[[Context, Run], None]] = dict(zip(STAGES, made, strict=True))

    def place(name: str) -> Run:
        return (context.public if name in ("base", "features") else context.run).stage(name)

    return follow(context, stages, last, place, lambda _: None)
