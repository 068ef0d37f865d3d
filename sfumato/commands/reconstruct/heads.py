"""The heads in `sfumato reconstruct`: how fast they are made, and their statistics."""

import time

from sfumato.attacks.head_statistics import WeightStatistics, weight_statistics
from sfumato.attacks.heads import accuracy_of_heads
from sfumato.commands.reconstruct.context import Context, own_features, shadow_heads_of
from sfumato.errors import RunError
from sfumato.runs import Run


def shadow(context: Context, stage: Run) -> None:
    """See how fast heads can be made and how good they are; nothing is kept."""
    shadow_heads = shadow_heads_of(context)
    began = time.perf_counter()
    heads = shadow_heads.heads(0, 256)
    rate = len(heads) / (time.perf_counter() - began)
    found = own_features(context)
    score = accuracy_of_heads(heads.weights, context.recipe, found.values, found.labels)
    recipe = context.recipe
    stage.finish(
        {
            "heads_per_second": round(rate),
            "accuracy_of_heads": float(score.mean()),
            "weights": recipe.num_parameters(shadow_heads.dimension),
            "noise_multiplier": recipe.noise_multiplier,
            "steps": recipe.steps,
        }
    )


def stats(context: Context, stage: Run) -> None:
    """Mean and deviation of every weight over many heads."""
    config, shadow_heads = context.config, shadow_heads_of(context)
    starts = range(0, config.stats_heads, 4096)
    batches = (shadow_heads.heads(i, min(4096, config.stats_heads - i)) for i in starts)
    found = weight_statistics(batches, correlation=config.null == "both")
    found.save(stage.path / "statistics.safetensors")
    constant = found.dropped(context.recipe, shadow_heads.dimension)
    if constant:
        some = ", ".join(constant[:5])
        stage.log(f"{len(constant)} weights are the same in all heads and say nothing: {some} ...")
    stage.finish({"heads": found.count, "constant_weights": len(constant)})


def statistics_of(context: Context) -> WeightStatistics:
    """What the stage stats found."""
    path = context.run.stage("stats").path / "statistics.safetensors"
    if not path.exists():
        raise RunError(f"{path} is not there: run the stage stats first.")
    return WeightStatistics.load(path)
