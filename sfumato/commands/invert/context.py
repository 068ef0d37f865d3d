"""Who has what in `sfumato invert`: the target's images, the judges', those nobody saw, the public.

The attack itself gets an `Access` to the target and the public images. All else is the owner's.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sfumato.attacks.access import TargetAccess, access_to
from sfumato.commands.stages import log_ignored_settings, read_given_run, refuse_ignored_settings
from sfumato.commands.train import command as train
from sfumato.data.images import Images
from sfumato.data.load import load_images, load_splits
from sfumato.errors import ConfigError
from sfumato.models.zoo import head_parameters, load_weights
from sfumato.runs import Run
from sfumato.setting_groups import defaults
from sfumato.settings.invert import Invert
from sfumato.settings.train import Data
from sfumato.training.setup import pick_device, quick_precision


@dataclass(frozen=True)
class Context:
    """Four sets of images, and the settings of the target."""

    config: Invert
    run: Run
    shared: Run
    """The run that has the judges: targets of a sweep have the same."""
    device: torch.device
    members: Images
    """What the target was trained on."""
    others: Images
    """Of the same classes, for judges."""
    held_out: Images
    """Of the same classes, seen by nobody."""
    public: Images
    target: train.Config
    weights: Path
    """Where the target's weights are, or will be."""

    def stage(self, name: str) -> Run:
        """A stage's place: in `private/`, for what a target gives away came from private images."""
        return Run(self.run.private, self.run.say).stage(name)

    @property
    def unseen(self) -> Images:
        """All test images that there are: of a target that was brought, judges learn a part."""
        if self.config.target is None:
            return self.held_out
        return self.others.joined(self.held_out)

    @property
    def precision(self) -> torch.dtype:
        """What generators are trained in."""
        return quick_precision(self.device)


def make_context(config: Invert, run: Run) -> Context:
    """Load images, and part them."""
    given = read_given_target(config, run) if config.target else None
    settings, weights = given or to_train(config, run)
    trained = settings if given else config.train
    train_images, test = load_splits(trained.data, people=trained.people, **trained.source.loading)
    public = load_images(
        config.public, "train", private=False, **framed_as(train_images, trained.source, config)
    )
    if config.other_classes:
        public = replace(public, classes=tuple(f"public {name}" for name in public.classes))
    if given:
        members = train_images
        others, held_out = split_classes(test, config.judge_share)
    else:
        others, members = split_classes(train_images, config.judge_share)
        held_out = test
    return Context(
        config,
        run,
        run,
        pick_device(config.device),
        members,
        others,
        held_out,
        public,
        settings,
        weights,
    )


def framed_as(images: Images, source: Data, config: Invert) -> dict[str, Any]:
    """How public images are loaded: to the size and the colours that the target takes."""
    channels, height, width = images.shape
    crop = config.public_centre_crop
    return {
        **source.loading,
        "image_size": height if height == width else source.image_size,
        "grey": channels == 1,
        "centre_crop": source.centre_crop if crop is None else crop,
    }


def to_train(config: Invert, run: Run) -> tuple[train.Config, Path]:
    """Settings of a target that is trained here, and where its weights will be."""
    # Its images are framed already: a second cut would go through the faces.
    settings = replace(
        config.train.alone,
        data=str(run.path / "private" / "members.npz"),
        people=None,
        centre_crop=None,
        image_size=None,
        grey=False,
    )
    return settings, run.path / "private/stages/target/model.safetensors"


def same_images(context: Context, config: Invert, run: Run) -> Context:
    """Another target on the same images, judged by the same judges."""
    settings, weights = to_train(config, run)
    return replace(context, config=config, run=run, target=settings, weights=weights)


def split_classes(images: Images, share: float) -> tuple[Images, Images]:
    """A share of every class, and the rest: of other people, unless a class is a person."""
    people = images.people
    alone = people is not None and all(
        len(people[images.labels == label].unique()) < 2 for label in range(len(images.classes))
    )
    return images.split(share, seed=0, by_person=not alone)


def read_given_target(config: Invert, run: Run) -> tuple[train.Config, Path]:
    """Settings and weights of a target that is there already."""
    assert config.target is not None
    if not Path(config.target).is_dir():
        if config.weights is None:
            raise ConfigError(
                f'--target "{config.target}" is no folder of a run. For a model by name, or '
                "module:function, give --weights FILE too."
            )
        if config.data == defaults(Invert)["data"]:
            raise ConfigError(
                f'which images did --target "{config.target}" learn? Give them with --data: judges '
                "and scores need them."
            )
        settings = replace(config.train, mode="non-private", model=config.target).alone
        # As its weights left it: no BatchNorm becomes another layer, unless that is asked for.
        return replace(settings, weights=None, norm=config.norm or "keep"), config.weights
    if config.target_pixels is not None:
        raise ConfigError(f"{config.target} knows its pixels: leave --target-pixels out.")
    settings, weights, _ = read_given_run(Path(config.target), config.train)
    refuse_ignored_settings(Path(config.target), config, settings)
    log_ignored_settings(Path(config.target), config, settings, run)
    return settings, weights


def open_access(context: Context, precision: torch.dtype | None = None) -> TargetAccess:
    """The target, as the attacker has it; in float32 if no other precision is asked for."""
    train_state, inputs = train.prepare_classifier(context.target, context.members, context.device)
    missing = load_weights(train_state.model, context.weights)
    if not head_parameters(train_state.model).isdisjoint(missing):
        raise ConfigError(
            f"{context.weights} does not have the head of this target: it was made for other "
            f"classes than the {len(context.members.classes)} of {context.members.name}. Give the "
            "images that it was trained on with --data."
        )
    if context.config.target_pixels is not None:
        black, white = context.config.target_pixels
        scale = 1 / (white - black)
        colours = context.members.shape[0]
        inputs = replace(inputs, mean=(-black * scale,) * colours, deviation=(scale,) * colours)
    return access_to(
        train_state.model, replace(inputs, precision=precision or torch.float32, views=1)
    )
