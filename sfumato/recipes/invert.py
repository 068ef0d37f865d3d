"""`sfumato invert`: what does the model think that this class, or this person, looks like?

The attacker can ask the target and differentiate its answers, and has public images of other
classes. It labels these by the target, trains a generator on them that the target likes, and
searches the generator for images that the target names. Judges that never met the target's images
say whether the class is to be seen in them.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from sfumato.errors import ConfigError
from sfumato.recipes.invert_scene import Scene, set_scene
from sfumato.recipes.invert_settings import PRESETS as PRESETS
from sfumato.recipes.invert_settings import STAGES
from sfumato.recipes.invert_settings import Config as Config
from sfumato.runs import Run

FIRST_WORDS = {**{stage: ("--stage", stage) for stage in STAGES}, "sweep": ("--sweep",)}
"""A first word, and the flags it stands for."""


def needs_run(_: Config) -> bool:
    """Stages hand their work on in the run directory."""
    return True


def run(config: Config, run: Run | None) -> dict[str, Any]:
    """Target, judge, select, prior, latent, score; or a sweep of targets."""
    if run is None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "sfumato invert is for one process. Train the target on several, with torchrun and "
            "sfumato train, and give it with --target RUN."
        )
    from sfumato.recipes.invert_checks import check_scene

    if config.sweep:
        from sfumato.recipes.invert_sweep import sweep

        return sweep(config, run)
    scene = set_scene(config, run)
    check_scene(scene)
    summary = follow(scene, STAGES[-1] if config.stage == "all" else config.stage)
    if config.stage != "all":
        return {**summary, "stage": config.stage, "run": str(run.path)}
    return run.finish({**summary, "run": str(run.path)})


def follow(scene: Scene, last: str) -> dict[str, Any]:
    """Take the stages up to this one, apart from those that are finished; its summary."""
    summary: dict[str, Any] = {}
    for name in STAGES[: STAGES.index(last) + 1]:
        place = scene.run.stage(name)
        if not place.finished:
            scene.run.log(f"stage {name}")
            stages()[name](scene, place)
        summary = place.summary
    return summary


def stages() -> dict[str, Callable[[Scene, Run], object]]:
    """What each stage does."""
    from sfumato.recipes.invert_score import score
    from sfumato.recipes.invert_stages import judge, latent, prior, select, target

    made = (target, judge, select, prior, latent, score)
    return dict(zip(STAGES, made, strict=True))


def show(summary: Mapping[str, Any]) -> str:
    """What was found, and where the pictures are."""
    if "text" in summary:
        return summary["text"]
    told = [f"  {k}  {v}" for k, v in summary.items() if k not in ("stage", "run")]
    return "\n".join([f"stage {summary.get('stage', 'all')} of {summary['run']}", *told])
