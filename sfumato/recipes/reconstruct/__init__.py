"""`sfumato reconstruct`: training images back from the weights of a head.

The attacker knows the public base, the recipe that heads are trained by, and images like those it
looks for, but none of those themselves. It trains many heads on its own images and learns to see
the images in the weights. Then come heads that were trained on images it has never had.
"""

from collections.abc import Mapping
from typing import Any

from sfumato.errors import ConfigError
from sfumato.recipes import Recipe, as_label
from sfumato.recipes.reconstruct.scene import Scene, set_scene
from sfumato.recipes.reconstruct.settings import PRESETS as PRESETS
from sfumato.recipes.reconstruct.settings import STAGES as STAGES
from sfumato.recipes.reconstruct.settings import Config as Config
from sfumato.recipes.reconstruct.stages import take
from sfumato.recipes.stages import tell_stage
from sfumato.runs import Run


def shares_run(config: Config) -> bool:
    """Jobs that make one shard each work in one run directory at the same time."""
    return config.shard is not None


def asks_more(config: Config) -> bool:
    """Whether a finished run has something to do or refuse: somebody's head, one more shard."""
    return config.target is not None or config.shard is not None


def run(config: Config, run: Run | None) -> dict[str, Any]:
    """The stages in order, up to the one that was asked for; finished ones are skipped."""
    from sfumato.recipes.reconstruct.study import look_at, study
    from sfumato.recipes.reconstruct.together import together
    from sfumato.train.setup import pick_device
    from sfumato.train.world import join_world

    world = join_world(pick_device(config.device))
    if world.size > 1:
        return together(config, run, world)
    assert run is not None
    scene = set_scene(config, run)
    check_early(scene)
    if config.vary is not None:
        return study(scene)
    if config.shard is not None and not run.stage("features").finished:
        raise ConfigError(
            f"jobs that make shards share one base: first run sfumato reconstruct features --out "
            f"{run.path} with the same settings."
        )
    if config.shard is not None and run.stage("shadow").finished:
        raise ConfigError(
            f"the heads of {run.path} are made, and no shard is wanted any more. Leave --shard out."
        )
    last = {"all": "evaluate", "merge": "shadow"}.get(config.stage, config.stage)
    summary = take(scene, "shadow" if config.shard else last)
    if "unfinished" in summary:
        return {**summary, "stage": summary["unfinished"], "run": str(run.path)}
    if config.target is not None:
        return look_at(scene, config.target)
    if config.stage != "all":
        return {**summary, "stage": config.stage, "run": str(run.path)}
    return run.finish({**summary, "run": str(run.path)})


def show(summary: Mapping[str, Any]) -> str:
    """What was found, and where the pictures are."""
    if "unfinished" in summary:
        return (
            f"This shard of the heads in {summary['run']} is whole. When all are, join them:\n"
            f"  sfumato reconstruct merge --out {summary['run']}"
        )
    if "text" in summary:
        return summary["text"]
    if "stage" in summary:
        return tell_stage(summary)
    return f"{summary['run']} is finished."


def check_early(scene: Scene) -> None:
    """Refuse at once what a later stage could not draw or read."""
    import torch

    from sfumato.recipes.reconstruct.decoder import new_decoder
    from sfumato.recipes.reconstruct.study import tensors_in

    with torch.device("meta"):
        new_decoder(scene, 2 * scene.recipe.classes)
    if scene.config.target is not None:
        tensors_in(scene.config.target)


RECIPE = Recipe(
    config=Config, presets=PRESETS, run=run, show=show, asks_more=asks_more, shares_run=shares_run,
    label=lambda config: as_label(config.data, config.base),
    first_words={stage: ("--stage", stage) for stage in (*STAGES, "merge")},
)  # fmt: skip
