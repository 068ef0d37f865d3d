"""Who has what in `sfumato invert`: the target's images, the judges', those nobody saw, the public.

The attack itself gets an `Access` to the target and the public images. All else is the owner's.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError
from sfumato.recipes import train
from sfumato.recipes.invert_settings import Config
from sfumato.recipes.stages import given_run, require_heeded
from sfumato.runs import Run

if TYPE_CHECKING:
    import torch

    from sfumato.attack.access import Access
    from sfumato.data.images import Images


@dataclass(frozen=True)
class Scene:
    """Four sets of images, and the settings of the target."""

    config: Config
    run: Run
    shared: Run
    """The run that has the judges: targets of a sweep have the same."""
    device: "torch.device"
    members: "Images"
    """What the target learnt."""
    others: "Images"
    """Of the same classes, for judges."""
    held_out: "Images"
    """Of the same classes, seen by nobody."""
    public: "Images"
    target: train.Config
    weights: Path
    """Where the target's weights are, or will be."""

    def stage(self, name: str) -> Run:
        """A stage's place: in `private/`, for what a target gives away came from private images."""
        return Run(self.run.private, self.run.say).stage(name)

    @property
    def precision(self) -> "torch.dtype":
        """What generators are trained in."""
        from sfumato.train.setup import quick_precision

        return quick_precision(self.device)

    @property
    def loading(self) -> dict[str, Any]:
        """How all images are framed: as those of the target were."""
        return (self.target if self.config.target else self.config).loading


def set_scene(config: Config, run: Run, shared: Run | None = None) -> Scene:
    """Load images, and part them."""
    from sfumato.data.load import load_images, load_splits
    from sfumato.train.setup import pick_device

    settings, weights = given_target(config) if config.target else (config.training, None)
    train_images, test = load_splits(settings.data, people=settings.people, **settings.loading)
    public = load_images(config.public, "train", private=False, **settings.loading)
    if weights is None:
        others, members = part(train_images, config.judge_share)
        # They are framed already: a second cut would go through the faces.
        settings = replace(
            settings, data=str(run.path / "private" / "members.npz"), people=None,
            centre_crop=None, image_size=None, grey=False,
        )  # fmt: skip
        weights, held_out = run.path / "private/stages/target/model.safetensors", test
    else:
        members = train_images
        others, held_out = part(test, config.judge_share)
    return Scene(
        config, run, shared or run, pick_device(config.device), members, others, held_out, public,
        settings, weights,
    )  # fmt: skip


def part(images: "Images", share: float) -> "tuple[Images, Images]":
    """A share of every class, and the rest: of other people, unless a class is a person."""
    people = images.people
    alone = people is not None and all(
        len(people[images.labels == label].unique()) < 2 for label in range(len(images.classes))
    )
    return images.split(share, seed=0, by_person=not alone)


def given_target(config: Config) -> tuple[train.Config, Path]:
    """Settings and weights of a target that is there already."""
    assert config.target is not None
    if not Path(config.target).is_dir():
        if config.weights is None:
            raise ConfigError(
                f'--target "{config.target}" is no folder of a run. For a model by name, or '
                "module:function, give --weights FILE too."
            )
        settings = replace(config, target=None, mode="non-private", model=config.target).training
        # As its weights left it: no BatchNorm becomes another layer, unless that is asked for.
        return replace(settings, weights=None, norm=config.norm or "keep"), config.weights
    settings, weights = given_run(Path(config.target), config)
    require_heeded(Path(config.target), config, settings)
    return settings, weights


def open_access(scene: Scene, precision: "torch.dtype | None" = None) -> "Access":
    """The target, as the attacker has it; in float32 if no other precision is asked for."""
    import torch

    from sfumato.attack.access import access_to
    from sfumato.nn.zoo import head_parameters, load_weights

    learner, reading = train.prepare(scene.target, scene.members, scene.device)
    missing = load_weights(learner.model, scene.weights)
    if not head_parameters(learner.model).isdisjoint(missing):
        raise ConfigError(
            f"{scene.weights} does not have the head of this target: it was made for other "
            f"classes than the {len(scene.members.classes)} of {scene.members.name}. Give the "
            "images that it learnt with --data."
        )
    if missing:
        raise ConfigError(
            f'{scene.weights} has no "{missing[0]}". If the target was trained with GroupNorm in '
            "the place of BatchNorm, as sfumato train does, say --norm group."
        )
    return access_to(learner.model, replace(reading, precision=precision or torch.float32, views=1))
