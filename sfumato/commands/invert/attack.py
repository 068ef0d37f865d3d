"""One attack: the stages of `sfumato invert` on one target. A sweep is several of them."""

from typing import Any

from sfumato.commands.invert.context import Context
from sfumato.commands.invert.score import score
from sfumato.commands.invert.stages import judge, latent, prior, select, target
from sfumato.stages import Stage, run_stages


def attack_target(context: Context, asked: str = "all") -> dict[str, Any]:
    """Run the stages up to this one."""
    made = (target, judge, select, prior, latent, score)
    stages = [
        Stage(name=name, run=run)
        for name, run in zip(context.config.stage_names(), made, strict=True)
    ]
    return run_stages(context, stages, asked, context.stage, say=context.run.log)
