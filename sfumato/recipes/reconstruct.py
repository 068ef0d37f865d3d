"""`sfumato reconstruct`: training images back from the weights of a head.

The attacker knows the public base, the recipe that heads are trained by, and images like those it
looks for, but none of those themselves. It trains many heads on its own images and learns to see
the images in the weights. Then come heads that were trained on images it has never had.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError, RunError
from sfumato.recipes.reconstruct_settings import PRESETS as PRESETS
from sfumato.recipes.reconstruct_settings import STAGES as STAGES
from sfumato.recipes.reconstruct_settings import Config as Config
from sfumato.runs import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sfumato.attack.decode import Game
    from sfumato.attack.features import Features
    from sfumato.attack.fleet import Fleet, Heads
    from sfumato.attack.heads import HeadRecipe
    from sfumato.attack.statistics import WeightStatistics
    from sfumato.data.images import Images


def needs_run(_: Config) -> bool:
    """Stages hand their work on in the run directory."""
    return True


def shares_run(config: Config) -> bool:
    """Jobs that make one shard each work in one run directory at the same time."""
    return config.shard is not None


@dataclass(frozen=True)
class Scene:
    """Who has what: public images for the base, the attacker's own, and those it is after."""

    config: Config
    run: Run
    device: "torch.device"
    base: "Images"
    own: "Images"
    targets: "Images"

    @property
    def recipe(self) -> "HeadRecipe":
        """The heads' recipe, with the noise that a bound asks for."""
        from sfumato.privacy.tradeoff import noise_for_tpr

        config, head = self.config, replace(self.config.head, classes=len(self.own.classes))
        if config.bound is None:
            return head
        noise = noise_for_tpr(
            config.bound, 0.01, rate=head.rate, steps=head.steps, relation="replace"
        )
        return replace(head, noise_multiplier=noise)


def run(config: Config, run: Run) -> dict[str, Any]:
    """The stages in order, up to the one that was asked for; finished ones are skipped."""
    if config.vary is not None:
        from sfumato.recipes.reconstruct_study import study

        return study(config, run)
    from sfumato.recipes.reconstruct_evaluate import evaluate

    scene = set_scene(config, run)
    stages = [base, features, shadow, stats, train, evaluate]
    last = stages if config.stage in ("all", "merge") else stages[: STAGES.index(config.stage) + 1]
    summary: dict[str, Any] = {}
    for stage in last:
        place = run.stage(stage.__name__)
        if not place.finished:
            stage(scene, place)
        if not place.finished:
            return {"stage": stage.__name__, "run": str(run.path), "unfinished": True}
        summary = place.summary
        if config.stage == "merge" and stage is shadow:
            break
    if config.stage != "all":
        return {**summary, "stage": config.stage, "run": str(run.path)}
    return run.finish({**summary, "run": str(run.path)})


def show(summary: Mapping[str, Any]) -> str:
    """What was found, and where the pictures are."""
    if "table" in summary:
        return summary["table"]
    if "stage" in summary:
        told = [f"  {k}  {v}" for k, v in summary.items() if k not in ("stage", "run")]
        return "\n".join([f"stage {summary['stage']} of {summary['run']}", *told])
    return summary["text"]


def set_scene(config: Config, run: Run) -> Scene:
    """Load images, and part what is public from what is not."""
    from sfumato.data.load import load_images
    from sfumato.train.setup import pick_device

    options: dict[str, Any] = {
        "image_size": config.image_size, "data_root": config.data_root, "download": config.download
    }  # fmt: skip
    own = load_images(config.data, "train", private=False, **options)
    targets = load_images(config.data, "test", private=True, **options)
    made = config.pretrained or config.weights is not None
    if made:
        base = own
    elif config.base_data is not None:
        base = load_images(config.base_data, "train", private=False, **options)
    else:
        from sfumato.attack.features import turned

        part, own = own.split(config.base_share, seed=config.seed)
        base = turned(part)
    return Scene(config, run, pick_device(config.device), base, own, targets)


def base(scene: Scene, stage: Run) -> None:
    """A public network that heads learn well on: given, or trained and tried."""
    from sfumato.attack.features import extract, headless, pretrain
    from sfumato.attack.fleet import Fleet
    from sfumato.attack.heads import accuracy_of_heads

    config, best = scene.config, 0.0
    made = config.pretrained or config.weights is not None
    for number in range(1 if made else config.base_tries):
        model = build_base(scene, number)
        if not made:
            attempt = stage.stage(str(number))
            model = pretrain(
                model, scene.base, attempt, epochs=config.base_epochs, lr=config.base_lr,
                device=scene.device, seed=config.seed + number,
            )  # fmt: skip
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model = headless(model.to(scene.device))
        found = extract(
            model, scene.own.select(range(0, len(scene.own), max(1, len(scene.own) // 2000))),
            scene.device, size=config.feature_size, norm=config.feature_norm,
        )  # fmt: skip
        fleet = Fleet(found.values, found.labels, scene.recipe, config.seed)
        heads = fleet.heads(0, 256)
        score = float(
            accuracy_of_heads(heads.weights, scene.recipe, found.values, found.labels).mean()
        )
        stage.log(f"heads of {scene.recipe.images} images on base {number}: accuracy {score:.3f}")
        best = max(best, score)
        if score >= config.gate:
            stage.save_tensors("model.safetensors", state)
            stage.finish({"accuracy_of_heads": score, "base": config.base, "try": number})
            return
    raise ConfigError(
        f"no base gave heads an accuracy of {config.gate:g}: the best had {best:.3f}. Raise "
        "--base-epochs or --base-tries, give --weights, or lower --gate."
    )


def build_base(scene: Scene, number: int = 0) -> "nn.Module":
    """The base's network, with its public weights if it has any."""
    import torch

    from sfumato.nn.zoo import build_model

    config = scene.config
    channels, height, width = scene.base.shape
    if config.feature_size is not None:
        height = width = config.feature_size
    torch.manual_seed(config.seed + number)
    return build_model(
        config.base, classes=len(scene.base.classes), shape=(channels, height, width),
        pretrained=config.pretrained, weights=config.weights,
    )  # fmt: skip


def features(scene: Scene, stage: Run) -> None:
    """Features of the attacker's images and, in `private/`, of those it is after."""
    from sfumato.attack.features import extract, headless
    from sfumato.nn.zoo import load_weights

    config = scene.config
    model = build_base(scene)
    load_weights(model, scene.run.stage("base").path / "model.safetensors")
    model = headless(model.to(scene.device))
    options: dict[str, Any] = {"size": config.feature_size, "norm": config.feature_norm}
    own = extract(model, scene.own, scene.device, **options)
    own.save(stage.path)
    extract(model, scene.targets, scene.device, **options).save(stage.private)
    stage.finish({"features": own.values.shape[1], "images": len(own), "norm": config.feature_norm})


def own_features(scene: Scene, *, private: bool = False) -> "Features":
    """The attacker's features, or with `private` those of the images it is after."""
    from sfumato.attack.features import Features

    stage = scene.run.stage("features")
    return Features.load(stage.private if private else stage.path).to(scene.device)


def fleet_of(scene: Scene, *, private: bool = False) -> "Fleet":
    """Heads on the attacker's images, or on those it is after."""
    from sfumato.attack.fleet import Fleet

    found = own_features(scene, private=private)
    seed = scene.config.seed + (1 if private else 0)
    source = own_features(scene).digest
    return Fleet(found.values, found.labels, scene.recipe, seed, source)


def shadow(scene: Scene, stage: Run) -> None:
    """See how fast heads can be made and how good they are; with --save, keep them."""
    from sfumato.attack.heads import accuracy_of_heads

    config, fleet = scene.config, fleet_of(scene)
    began = time.perf_counter()
    heads = fleet.heads(0, 2048)
    rate = len(heads) / (time.perf_counter() - began)
    found = own_features(scene)
    score = accuracy_of_heads(heads.weights[:256], scene.recipe, found.values, found.labels)
    if config.save:
        from sfumato.recipes.reconstruct_shards import make_shards

        if not make_shards(config, fleet, stage):
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


def stats(scene: Scene, stage: Run) -> None:
    """Mean and deviation of every weight over many heads."""
    from sfumato.attack.statistics import weight_statistics

    config, fleet = scene.config, fleet_of(scene)
    size = min(config.stats_heads, 4096)
    batches = (fleet.batch(i, size) for i in range(-(-config.stats_heads // size)))
    found = weight_statistics(batches, correlation=config.null == "both")
    found.save(stage.path / "statistics.safetensors")
    stage.finish({"heads": found.count, "constant_weights": int((~found.keep).sum())})


def statistics_of(scene: Scene) -> "WeightStatistics":
    """What the stage stats found."""
    from sfumato.attack.statistics import WeightStatistics

    path = scene.run.stage("stats").path / "statistics.safetensors"
    if not path.exists():
        raise RunError(f"{path} is not there: run the stage stats first.")
    return WeightStatistics.load(path)


def train(scene: Scene, stage: Run) -> None:
    """The attacker's network learns to see images in weights."""
    import torch

    from sfumato.attack.decode import Game, decoder_step
    from sfumato.nn.average import new_average
    from sfumato.privacy.sampling import Batch
    from sfumato.train.loop import Learner, fit
    from sfumato.train.progress import progress
    from sfumato.train.setup import make_optimizer, make_schedule

    config, fleet, statistics = scene.config, fleet_of(scene), statistics_of(scene)
    decoder = build_decoder(scene, fleet)
    optimizer = make_optimizer(
        decoder, "adamw", lr=config.decoder_lr, momentum=0.0, weight_decay=1e-3
    )
    schedule = make_schedule(optimizer, "cosine", config.steps, warmup=config.steps // 20)
    learner = Learner(decoder, optimizer, schedule, new_average(decoder, config.ema))
    learner.load(stage.load_checkpoint())
    step = decoder_step(
        decoder, game_of(scene, scene.own), heads_by_step(scene, fleet), statistics.standardise,
        precision=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        compile=config.compile,
    )  # fmt: skip
    batches = (Batch(number, ()) for number in range(learner.step, config.steps))
    tell = progress(config.steps, learner.step, None, stage.say, unit="heads")
    fit(learner, batches, step, stage, tell=tell)
    stage.save_tensors("model.safetensors", learner.best.state_dict())
    size = sum(parameter.numel() for parameter in decoder.parameters())
    stage.finish({"decoder": config.decoder, "parameters": size, "steps": config.steps})


def game_of(scene: Scene, images: "Images") -> "Game":
    """What the decoder is asked for, on one set of images."""
    from sfumato.attack.decode import Game

    recipe = scene.recipe
    pixels = images.pixels.to(scene.device)
    return Game(pixels, recipe.classes, recipe.class_size, scene.config.conditional)


def build_decoder(scene: Scene, fleet: "Fleet") -> "nn.Module":
    """The attacker's network for heads of this fleet."""
    import torch

    from sfumato.nn.decoder import PublishedDecoder, RowDecoder

    config, recipe = scene.config, scene.recipe
    torch.manual_seed(config.seed)
    kind = RowDecoder if config.decoder == "rows" else PublishedDecoder
    decoder = kind(
        recipe.num_parameters(fleet.dimension), scene.own.shape,
        recipe.classes if config.conditional else 0, config.width,
    )  # fmt: skip
    return decoder.to(scene.device)


def trained_decoder(scene: Scene, fleet: "Fleet") -> "nn.Module":
    """The network as the stage train left it."""
    from safetensors.torch import load_file

    decoder = build_decoder(scene, fleet)
    decoder.load_state_dict(load_file(scene.run.stage("train").path / "model.safetensors"))
    return decoder.eval()


def heads_by_step(scene: Scene, fleet: "Fleet") -> "Callable[[int], Heads]":
    """The heads of each step: fresh ones, made for several steps at once, or those on disk."""
    from sfumato.attack.fleet import Heads

    config = scene.config
    size, pool = config.batch_heads, max(1, POOL // config.batch_heads)
    made: dict[int, Heads] = {}
    kept = None
    if config.save:
        from sfumato.attack.shards import open_shards

        kept = open_shards(scene.run.stage("shadow").path / "heads", fleet)

    def of(step: int) -> Heads:
        number, place = divmod(step, pool)
        if number not in made:
            made.clear()
            first = number * pool * size
            made[number] = (
                fleet.heads(first, pool * size)
                if kept is None
                else kept.heads(first % max(1, config.save - pool * size + 1), pool * size)
            )
        heads, rows = made[number], slice(place * size, (place + 1) * size)
        return Heads(heads.weights[rows], heads.members[rows], heads.kind)

    return of


POOL = 2048
"""Heads that are made at once while the attacker's network learns."""
