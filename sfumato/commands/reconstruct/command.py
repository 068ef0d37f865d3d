"""`sfumato reconstruct`: training images back from the weights of a head.

The attacker knows the public base, the recipe that heads are trained by, and images like those it
looks for, but none of those themselves. It trains many heads on its own images and learns to see
the images in the weights. Then come heads that were trained on images it has never had.
"""

from collections.abc import Mapping
from typing import Any

import torch

from sfumato.commands import Command, as_label
from sfumato.commands.reconstruct.context import Context, make_context
from sfumato.commands.reconstruct.decoder import new_decoder
from sfumato.commands.reconstruct.study import (
    attack_brought_head,
    attack_weights,
    study,
    tensors_in,
)
from sfumato.commands.stages import describe_stage, require_one_process
from sfumato.runs import Run
from sfumato.settings.reconstruct import PRESETS as PRESETS
from sfumato.settings.reconstruct import Reconstruct

Config = Reconstruct

WITH_TORCHRUN = "a model, and attack its head in one process: --target RUN"
"""What several processes are good for."""


def run(config: Reconstruct, run: Run | None) -> dict[str, Any]:
    """The stages in order, up to the one that was asked for; finished ones are skipped."""
    context = make_context(config, require_one_process("reconstruct", WITH_TORCHRUN, run))
    check_early(context)
    if config.vary is not None:
        return study(context)
    summary = attack_weights(context, config.stage)
    if config.target is not None:
        return attack_brought_head(context, config.target)
    if config.stage != "all":
        return {**summary, "stage": config.stage, "run": str(context.run.path)}
    return context.run.finish({**summary, "run": str(context.run.path)})


def show(summary: Mapping[str, Any]) -> str:
    """What was found, and where the pictures are."""
    if "text" in summary:
        return summary["text"]
    if "stage" in summary:
        return describe_stage(summary)
    return f"{summary['run']} is finished."


def check_early(context: Context) -> None:
    """Refuse at once what a later stage could not draw or read."""
    with torch.device("meta"):
        new_decoder(context, 2 * context.recipe.classes)
    if context.config.target is not None:
        tensors_in(context.config.target)


COMMAND = Command(
    run=run,
    show=show,
    asks_more=lambda config: config.target is not None,
    label=lambda config: as_label(config.data, config.base),
)
