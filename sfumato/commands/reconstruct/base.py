"""The public part of `sfumato reconstruct`: a base that heads stand on, and its features."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sfumato.attacks.heads import accuracy_of_heads
from sfumato.attacks.shadow_heads import ShadowHeads
from sfumato.commands.reconstruct.context import Context
from sfumato.data.memory_guard import require_memory
from sfumato.errors import ConfigError
from sfumato.metrics.features import AT_ONCE, extract, pretrain, without_head
from sfumato.models.zoo import build_model, load_weights, pixel_statistics
from sfumato.runs import Run


def base_network(context: Context, stage: Run) -> None:
    """A public network that heads learn well on: given, or trained and tried."""
    config, best = context.config, 0.0
    shot = replace(context.recipe, class_size=1, noise_multiplier=0.0, max_norm=None, rate=1.0)
    made = config.pretrained or config.weights is not None
    for number in range(1 if made else config.base_tries):
        model = build_base(context, number)
        if not made:
            attempt = stage.stage(str(number))
            model = pretrain(
                model,
                context.base,
                attempt,
                epochs=config.base_epochs,
                lr=config.base_lr,
                device=context.device,
                seed=config.seed + number,
            )
            attempt.finish({"steps": "all"})
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model = without_head(model.to(context.device))
        found = extract(
            model,
            context.own.select(range(0, len(context.own), max(1, len(context.own) // 2000))),
            context.device,
            size=config.feature_size,
            norm=config.feature_norm,
        )
        heads = ShadowHeads(found.values, found.labels, shot, config.seed).heads(0, 256)
        score = float(accuracy_of_heads(heads.weights, shot, found.values, found.labels).mean())
        stage.log(
            f"heads of one image a class on base {number}: accuracy {score:.3f} on the attacker's "
            "own images"
        )
        best = max(best, score)
        if score >= config.gate:
            stage.save_tensors("model.safetensors", state)
            stage.finish({"accuracy_of_heads": score, "base": config.base, "try": number})
            return
    raise ConfigError(
        f"no base gave heads an accuracy of {config.gate:g}: the best had {best:.3f}. Raise "
        "--base-epochs or --base-tries, give --weights, or lower --gate, with another --out."
    )


def build_base(context: Context, number: int = 0) -> nn.Module:
    """The base's network, with its public weights if it has any."""
    config = context.config
    channels, height, width = context.base.shape
    if config.feature_size is not None:
        height = width = config.feature_size
        require_memory(
            AT_ONCE * channels * height * width,
            f"{AT_ONCE} images of {width} x {height}",
            "Give a smaller --feature-size.",
        )
    torch.manual_seed(config.seed + number)
    return build_model(
        config.base,
        classes=len(context.base.classes),
        shape=(channels, height, width),
        pretrained=config.pretrained,
        weights=config.weights,
    )


def features(context: Context, stage: Run) -> None:
    """Features of the attacker's images and, in `private/`, of those it is after."""
    config = context.config
    model = build_base(context)
    load_weights(model, context.public.stage("base").path / "model.safetensors")
    model = without_head(model.to(context.device))
    options: dict[str, Any] = {"size": config.feature_size, "norm": config.feature_norm}
    own = extract(model, context.own, context.device, **options)
    own.save(stage.path)
    mean, deviation = pixel_statistics(model, context.own.shape[0])
    stage.write_json(
        "normalisation.json",
        {
            "base": config.base,
            "image_size": config.feature_size or context.own.shape[1],
            "pixel_mean": mean,
            "pixel_deviation": deviation,
            "feature_norm": config.feature_norm,
        },
    )
    extract(model, context.targets, context.device, **options).save(stage.private)
    stage.finish({"features": own.values.shape[1], "images": len(own), "norm": config.feature_norm})
