"""`torchrun -m sfumato reconstruct shadow --save N`: heads that several processes make together."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError
from sfumato.recipes.reconstruct.heads import write_heads
from sfumato.recipes.reconstruct.scene import fleet_of, set_scene
from sfumato.recipes.reconstruct.settings import Config
from sfumato.recipes.reconstruct.stages import take
from sfumato.runs import Run

if TYPE_CHECKING:
    from sfumato.train.world import World


def together(config: Config, run: Run | None, world: "World") -> dict[str, Any]:
    """Several processes, by torchrun: the leader prepares, then each makes its share of heads."""
    from sfumato.train.world import leave_world

    if config.stage != "shadow" or not config.save or config.shards < world.size:
        raise ConfigError(
            f"{world.size} processes can make heads together and nothing else: sfumato reconstruct "
            f"shadow --save N --shards {world.size} (or more)."
        )
    if world.leads and run is not None:
        take(set_scene(config, run), "features")
    place = Path(world.agree(run and str(run.path)))
    scene = set_scene(config, Run(place, _is_shared=True))
    stage = scene.run.stage("shadow")
    for index in range(config.shards)[world.rank :: world.size]:
        write_heads(config, fleet_of(scene), stage, index)
    world.any(False)  # wait for everybody
    summary = take(scene, "shadow") if world.leads else {}
    leave_world()
    return {**summary, "stage": "shadow", "run": str(place)}
