"""The stages of `sfumato reconstruct` in their order."""

from collections.abc import Callable
from typing import Any

from sfumato.commands.reconstruct.base import base, features
from sfumato.commands.reconstruct.decoder import train
from sfumato.commands.reconstruct.evaluate import evaluate
from sfumato.commands.reconstruct.heads import shadow, stats
from sfumato.commands.reconstruct.scene import Scene
from sfumato.commands.reconstruct.settings import STAGES
from sfumato.commands.stages import follow
from sfumato.runs import Run


def take(scene: Scene, last: str) -> dict[str, Any]:
    """Take the stages up to this one; base and features may belong to another run."""
    made = (base, features, shadow, stats, train, evaluate)
    stages: dict[str, Callable[[Scene, Run], None]] = dict(zip(STAGES, made, strict=True))

    def place(name: str) -> Run:
        return (scene.public if name in ("base", "features") else scene.run).stage(name)

    return follow(scene, stages, last, place, lambda _: None)
