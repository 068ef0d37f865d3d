"""`sfumato invert`: what does the model think that this class, or this person, looks like?

The attacker can ask the target and differentiate its answers, and has public images of other
classes. It labels these by the target, trains a generator on them that the target likes, and
searches the generator for images that the target names. Judges that never met the target's images
say whether the class is to be seen in them. Whatever comes of a target is as private as its
training images, so all stages are in `private/`.
"""

from collections.abc import Mapping
from typing import Any

from sfumato.commands import Command, as_label
from sfumato.commands.invert.checks import check_context
from sfumato.commands.invert.context import make_context
from sfumato.commands.invert.sweep import attack_target
from sfumato.commands.invert.sweep import sweep as run_sweep
from sfumato.commands.stages import describe_stage, require_one_process
from sfumato.runs import Run
from sfumato.settings.invert import PRESETS as PRESETS
from sfumato.settings.invert import Invert

Config = Invert


def run(config: Invert, run: Run | None) -> dict[str, Any]:
    """Target, judge, select, prior, latent, score; or a sweep of targets."""
    run = require_one_process("invert", "trains a target: give it with --target RUN", run)
    if config.sweep:
        return run_sweep(config, run)
    context = make_context(config, run)
    check_context(context)
    summary = attack_target(context, config.stage)
    if config.stage != "all":
        return {**summary, "stage": config.stage, "run": str(run.path)}
    return run.finish({**summary, "run": str(run.path)})


def show(summary: Mapping[str, Any]) -> str:
    """What was found, and where the pictures are."""
    return summary["text"] if "text" in summary else describe_stage(summary)


COMMAND = Command(
    run=run,
    show=show,
    label=lambda config: as_label(config.target or config.data, epsilon=config.epsilon),
)
