"""The heads in `sfumato reconstruct`: made, kept on disk if asked for, and their statistics."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sfumato.errors import ConfigError, RunError
from sfumato.recipes.reconstruct.scene import Scene, fleet_of, own_features
from sfumato.recipes.reconstruct.settings import Config
from sfumato.runs import Run

if TYPE_CHECKING:
    from sfumato.attack.fleet import Fleet
    from sfumato.attack.statistics import WeightStatistics


def shadow(scene: Scene, stage: Run) -> None:
    """See how fast heads can be made and how good they are; with --save, keep them."""
    from sfumato.attack.heads import accuracy_of_heads

    config, fleet = scene.config, fleet_of(scene)
    began = time.perf_counter()
    heads = fleet.heads(0, 256)
    rate = len(heads) / (time.perf_counter() - began)
    found = own_features(scene)
    score = accuracy_of_heads(heads.weights, scene.recipe, found.values, found.labels)
    if (config.save or config.stage == "merge") and not keep_heads(config, fleet, stage):
        return
    recipe = scene.recipe
    stage.finish(
        {
            "heads_per_second": round(rate),
            "accuracy_of_heads": float(score.mean()),
            "weights": recipe.num_parameters(fleet.dimension),
            "noise_multiplier": recipe.noise_multiplier,
            "steps": recipe.steps,
            "kept": config.save,
        }
    )


def keep_heads(config: Config, fleet: "Fleet", stage: Run) -> bool:
    """Write the shards that were asked for; whether the fleet is whole then."""
    from sfumato.attack.shards import merge

    if config.shard is not None:
        number, _, of = config.shard.partition("/")
        if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
            raise ConfigError(f'--shard "{config.shard}" must be i/n, with i from 1 to n.')
        write_heads(replace(config, shards=int(of)), fleet, stage, int(number) - 1)
        stage.log("when all are there, sfumato reconstruct merge checks and joins them")
        return False
    for index in range(config.shards) if config.stage != "merge" else ():
        write_heads(config, fleet, stage, index)
    merge(stage.path / "heads")
    return True


def write_heads(config: Config, fleet: "Fleet", stage: Run, index: int) -> None:
    """Train and write one shard, unless it is there."""
    from sfumato.attack.shards import write_shard

    write_shard(stage.path / "heads", fleet, index, config.shards, config.save)
    stage.log(f"shard {index + 1}/{config.shards} is whole")


def stats(scene: Scene, stage: Run) -> None:
    """Mean and deviation of every weight over many heads."""
    from sfumato.attack.statistics import weight_statistics

    config, fleet = scene.config, fleet_of(scene)
    starts = range(0, config.stats_heads, 4096)
    batches = (fleet.heads(i, min(4096, config.stats_heads - i)) for i in starts)
    found = weight_statistics(batches, correlation=config.null == "both")
    found.save(stage.path / "statistics.safetensors")
    constant = found.dropped(scene.recipe, fleet.dimension)
    if constant:
        some = ", ".join(constant[:5])
        stage.log(f"{len(constant)} weights are the same in all heads and say nothing: {some} ...")
    stage.finish({"heads": found.count, "constant_weights": len(constant)})


def statistics_of(scene: Scene) -> "WeightStatistics":
    """What the stage stats found."""
    from sfumato.attack.statistics import WeightStatistics

    path = scene.run.stage("stats").path / "statistics.safetensors"
    if not path.exists():
        raise RunError(f"{path} is not there: run the stage stats first.")
    return WeightStatistics.load(path)
