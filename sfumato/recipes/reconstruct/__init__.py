"""`sfumato reconstruct`: training images back from the weights of a head.

The attacker knows the public base, the recipe that heads are trained by, and images like those it
looks for, but none of those themselves. It trains many heads on its own images and learns to see
the images in the weights. Then come heads that were trained on images it has never had.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError, DataError
from sfumato.recipes import Recipe
from sfumato.recipes.reconstruct.settings import PRESETS as PRESETS
from sfumato.recipes.reconstruct.settings import STAGES as STAGES
from sfumato.recipes.reconstruct.settings import Config as Config
from sfumato.recipes.stages import follow, tell_stage
from sfumato.runs import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sfumato.attack.features import Features
    from sfumato.attack.fleet import Fleet
    from sfumato.attack.heads import HeadRecipe
    from sfumato.data.images import Images


LEARNT = (
    "features and networks, learnt without privacy from train images: share it only if these are "
    "public"
)
"""What lies open in the run directory, and what that means."""


def shares_run(config: Config) -> bool:
    """Jobs that make one shard each work in one run directory at the same time."""
    return config.shard is not None


def asks_more(config: Config) -> bool:
    """Whether a finished run has something to do or refuse: somebody's head, one more shard."""
    return config.target is not None or config.shard is not None


@dataclass(frozen=True)
class Scene:
    """Who has what: public images for the base, the attacker's own, and those it is after."""

    config: Config
    run: Run
    public: Run
    """The run that has the base and its features: several attacks may share them."""
    device: "torch.device"
    base: "Images"
    own: "Images"
    targets: "Images"

    @cached_property
    def recipe(self) -> "HeadRecipe":
        """The heads' recipe, with the noise that a bound asks for."""
        from sfumato.attack.heads import class_size_for
        from sfumato.privacy.tradeoff import noise_for_tpr

        config, classes = self.config, len(self.own.classes)
        if config.head.classes not in (classes, type(config.head).classes):
            raise ConfigError(
                f"--classes {config.head.classes}: the data has {classes}. Leave --classes out."
            )
        head = replace(config.head, classes=classes)
        if config.images is not None:
            head = replace(head, class_size=class_size_for(config.images, head.classes))
        if config.bound is None:
            return head
        noise = noise_for_tpr(
            config.bound, 0.01, rate=head.rate, steps=head.steps, relation="replace"
        )
        return replace(head, noise_multiplier=noise)


def run(config: Config, run: Run | None) -> dict[str, Any]:
    """The stages in order, up to the one that was asked for; finished ones are skipped."""
    from sfumato.recipes.reconstruct.heads import together
    from sfumato.recipes.reconstruct.study import look_at, study
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


def take(scene: Scene, last: str) -> dict[str, Any]:
    """Take the stages up to this one; base and features may belong to another run."""
    from sfumato.recipes.reconstruct.decoder import train
    from sfumato.recipes.reconstruct.evaluate import evaluate
    from sfumato.recipes.reconstruct.heads import shadow, stats

    made = (base, features, shadow, stats, train, evaluate)
    stages: dict[str, Callable[[Scene, Run], None]] = dict(zip(STAGES, made, strict=True))

    def place(name: str) -> Run:
        return (scene.public if name in ("base", "features") else scene.run).stage(name)

    return follow(scene, stages, last, place, lambda _: None)


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


def set_scene(config: Config, run: Run) -> Scene:
    """Load images, and part what is public from what is not."""
    from sfumato.data.load import load_images
    from sfumato.train.setup import pick_device

    own = load_images(config.data, "train", private=False, **config.loading)
    targets = load_images(config.data, "test", private=True, **config.loading)
    targets = never_had(targets, own, run)
    made = config.pretrained or config.weights is not None
    if made:
        base = own
    elif config.base_data is not None:
        base = load_images(config.base_data, "train", private=False, **config.loading)
        if base.shape == targets.shape:
            targets = never_had(targets, base, run)
    else:
        from sfumato.attack.features import turned

        part, own = own.split(config.base_share, seed=config.seed)
        base = turned(part)
    return Scene(config, run, run, pick_device(config.device), base, own, targets)


def never_had(targets: "Images", known: "Images", run: Run) -> "Images":
    """The images under attack without those that the attacker has, pixel for pixel.

    Well-known sets have a few images in both splits: these are left out. Many are a mistake.
    """
    from sfumato.data.alike import overlap

    places = overlap(targets, known)
    if len(places) > MOST_KNOWN * len(targets):
        raise DataError(
            f'{len(places)} of the {len(targets)} images under attack (test of "{targets.name}") '
            f'are among those that the attacker has (train of "{known.name}"): to see these again '
            "is no reconstruction. Leave them out of one of the two."
        )
    if not len(places):
        return targets
    # On the screen only: a log may be shared, and this counts private images.
    run.say(f"the attacker has {len(places)} of the test images: these are left out")
    twice = set(places.tolist())
    return targets.select([place for place in range(len(targets)) if place not in twice])


MOST_KNOWN = 0.01
"""The share of test images that may be among the attacker's own, and are left out."""


def base(scene: Scene, stage: Run) -> None:
    """A public network that heads learn well on: given, or trained and tried."""
    from sfumato.attack.features import extract, headless, pretrain
    from sfumato.attack.fleet import Fleet
    from sfumato.attack.heads import accuracy_of_heads

    config, best = scene.config, 0.0
    shot = replace(scene.recipe, class_size=1, noise_multiplier=0.0, max_norm=None, rate=1.0)
    made = config.pretrained or config.weights is not None
    for number in range(1 if made else config.base_tries):
        model = build_base(scene, number)
        if not made:
            attempt = stage.stage(str(number))
            model = pretrain(
                model, scene.base, attempt, epochs=config.base_epochs, lr=config.base_lr,
                device=scene.device, seed=config.seed + number,
            )  # fmt: skip
            attempt.finish({"steps": "all"})
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model = headless(model.to(scene.device))
        found = extract(
            model, scene.own.select(range(0, len(scene.own), max(1, len(scene.own) // 2000))),
            scene.device, size=config.feature_size, norm=config.feature_norm,
        )  # fmt: skip
        heads = Fleet(found.values, found.labels, shot, config.seed).heads(0, 256)
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
    from sfumato.nn.zoo import load_weights, pixel_statistics

    config = scene.config
    model = build_base(scene)
    load_weights(model, scene.public.stage("base").path / "model.safetensors")
    model = headless(model.to(scene.device))
    options: dict[str, Any] = {"size": config.feature_size, "norm": config.feature_norm}
    own = extract(model, scene.own, scene.device, **options)
    own.save(stage.path)
    mean, deviation = pixel_statistics(model, scene.own.shape[0])
    stage.write_json(
        "normalisation.json",
        {
            "base": config.base, "image_size": config.feature_size or scene.own.shape[1],
            "pixel_mean": mean, "pixel_deviation": deviation, "feature_norm": config.feature_norm,
        },
    )  # fmt: skip
    extract(model, scene.targets, scene.device, **options).save(stage.private)
    stage.finish({"features": own.values.shape[1], "images": len(own), "norm": config.feature_norm})


def own_features(scene: Scene, *, private: bool = False) -> "Features":
    """The attacker's features, or with `private` those of the images it is after."""
    from sfumato.attack.features import Features

    stage = scene.public.stage("features")
    return Features.load(stage.private if private else stage.path).to(scene.device)


def fleet_of(scene: Scene, *, private: bool = False) -> "Fleet":
    """Heads on the attacker's images, or on those it is after."""
    from sfumato.attack.fleet import Fleet

    found = own_features(scene, private=private)
    seed = scene.config.seed + (1 if private else 0)
    source = own_features(scene).digest
    return Fleet(found.values, found.labels, scene.recipe, seed, source)


RECIPE = Recipe(
    config=Config, presets=PRESETS, run=run, show=show, asks_more=asks_more, shares_run=shares_run,
    first_words={stage: ("--stage", stage) for stage in (*STAGES, "merge")},
)  # fmt: skip
