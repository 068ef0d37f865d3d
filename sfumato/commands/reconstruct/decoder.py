"""The attacker in `sfumato reconstruct`: statistics of heads, and the network that reads them."""

import time
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import nn

from sfumato.attacks.head_statistics import weight_statistics
from sfumato.attacks.heads import accuracy_of_heads
from sfumato.attacks.shadow_heads import Heads, ShadowHeads
from sfumato.attacks.weight_decoder_training import ReconstructionTask, decoder_step
from sfumato.commands.reconstruct.context import (
    Context,
    own_features,
    shadow_heads_of,
    statistics_of,
)
from sfumato.data.images import Images
from sfumato.models.decoder import PublishedDecoder, RowDecoder
from sfumato.models.ema import new_average
from sfumato.privacy.sampling import Batch
from sfumato.runs import Run
from sfumato.training.fit import TrainState, fit
from sfumato.training.progress import progress
from sfumato.training.setup import make_optimizer, make_schedule

POOL = 2048
"""Heads that are made at once while the network learns."""


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


def train(context: Context, stage: Run) -> None:
    """The attacker's network learns to see images in weights."""
    config, shadow_heads, statistics = (
        context.config,
        shadow_heads_of(context),
        statistics_of(context),
    )
    decoder = build_decoder(context, shadow_heads)
    optimizer = make_optimizer(
        decoder, "adamw", lr=config.decoder_lr, momentum=0.0, weight_decay=1e-3
    )
    schedule = make_schedule(optimizer, "cosine", config.steps, warmup=config.steps // 20)
    train_state = TrainState(decoder, optimizer, schedule, new_average(decoder, config.ema))
    train_state.load(stage.load_checkpoint())
    step = decoder_step(
        decoder,
        task_of(context, context.own),
        heads_by_step(context, shadow_heads),
        statistics.standardise,
        precision=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        compile=config.compile,
    )
    batches = (Batch(number, ()) for number in range(train_state.step, config.steps))
    tell = progress(config.steps, train_state.step, None, stage.say, unit="heads")
    fit(train_state, batches, step, stage, tell=tell)
    stage.save_tensors("model.safetensors", train_state.best.state_dict())
    size = sum(parameter.numel() for parameter in decoder.parameters())
    stage.finish({"decoder": config.decoder, "parameters": size, "steps": config.steps})


def task_of(context: Context, images: Images) -> ReconstructionTask:
    """What the decoder is asked for, on one set of images."""
    recipe = context.recipe
    pixels = images.pixels.to(context.device)
    return ReconstructionTask(pixels, recipe.classes, recipe.class_size, context.config.conditional)


def build_decoder(context: Context, shadow_heads: ShadowHeads) -> nn.Module:
    """The attacker's network for heads of this shadow_heads."""
    torch.manual_seed(context.config.seed)
    weights = context.recipe.num_parameters(shadow_heads.dimension)
    return new_decoder(context, weights).to(context.device)


def new_decoder(context: Context, weights: int) -> nn.Module:
    """A network for heads of this many weights; sizes that cannot be drawn are refused."""
    config, recipe = context.config, context.recipe
    kind = RowDecoder if config.decoder == "rows" else PublishedDecoder
    classes = recipe.classes if config.conditional else 0
    return kind(weights, context.own.shape, classes, config.width)


def trained_decoder(context: Context, shadow_heads: ShadowHeads) -> nn.Module:
    """The network as the stage train left it."""
    decoder = build_decoder(context, shadow_heads)
    decoder.load_state_dict(load_file(context.run.stage("train").path / "model.safetensors"))
    return decoder.eval()


def heads_by_step(context: Context, shadow_heads: ShadowHeads) -> Callable[[int], Heads]:
    """The heads of each step, made for many steps at once."""
    size = context.config.batch_heads
    pool = max(1, POOL // size) * size
    last: tuple[int, Heads] | None = None

    def of(step: int) -> Heads:
        nonlocal last
        number, place = divmod(step * size, pool)
        if last is None or last[0] != number:
            last = number, shadow_heads.batch(number, pool)
        heads, rows = last[1], slice(place, place + size)
        return Heads(heads.weights[rows], heads.members[rows], heads.kind)

    return of
