"""The stages of `sfumato reconstruct` in their order."""

from typing import Any

from sfumato.commands.reconstruct.base import base_network, features
from sfumato.commands.reconstruct.context import Context
from sfumato.commands.reconstruct.decoder import train
from sfumato.commands.reconstruct.evaluate import evaluate
from sfumato.commands.reconstruct.heads import shadow, stats
from sfumato.runs import Run
from sfumato.stages import Stage, run_stages

SHARED = ("base", "features")
"""Stages that may belong to another run: several attacks have one base."""


def attack_weights(context: Context, asked: str) -> dict[str, Any]:
    """Run the stages up to this one."""
    stages = (
        Stage(name="base", run=base_network),
        Stage(name="features", run=features),
        Stage(name="shadow", run=shadow),
        Stage(name="stats", run=stats),
        Stage(name="train", run=train),
        Stage(name="evaluate", run=evaluate),
    )

    def place(name: str) -> Run:
        return (context.public if name in SHARED else context.run).stage(name)

    return run_stages(context, stages, asked, place)
