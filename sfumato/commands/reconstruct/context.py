"""Who has what in `sfumato reconstruct`: images, the run, and what the first stages left."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sfumato.attacks.head_statistics import WeightStatistics
from sfumato.attacks.heads import HeadRecipe, class_size_for
from sfumato.attacks.shadow_heads import ShadowHeads
from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.data.overlap import overlap
from sfumato.errors import ConfigError, DataError, RunError
from sfumato.metrics.features import Features, turned_classes
from sfumato.privacy.audit.tradeoff import noise_for_tpr
from sfumato.runs import Run
from sfumato.settings.reconstruct import Reconstruct
from sfumato.training.setup import pick_device

LEARNT = (
    "features and networks, trained without privacy from train images: share it only if these are "
    "public"
)
"""What lies open in the run directory, and what that means."""


@dataclass(frozen=True)
class Context:
    """Who has what: public images for the base, the attacker's own, and those it is after."""

    config: Reconstruct
    run: Run
    public: Run
    """The run that has the base and its features: several attacks may share them."""
    device: torch.device
    base: Images
    own: Images
    targets: Images

    @cached_property
    def recipe(self) -> HeadRecipe:
        """The heads' recipe, with the noise that a bound asks for."""
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


def make_context(config: Reconstruct, run: Run) -> Context:
    """Load images, and part what is public from what is not."""
    own = load_images(config.data, "train", private=False, **config.source.loading)
    targets = load_images(config.data, "test", private=True, **config.source.loading)
    targets = remove_known_images(targets, own, run)
    made = config.pretrained or config.weights is not None
    if made:
        base = own
    elif config.base_data is not None:
        base = load_images(config.base_data, "train", private=False, **config.source.loading)
        if base.shape == targets.shape:
            targets = remove_known_images(targets, base, run)
    else:
        part, own = own.split(config.base_share, seed=config.seed)
        base = turned_classes(part)
    return Context(config, run, run, pick_device(config.device), base, own, targets)


def remove_known_images(targets: Images, known: Images, run: Run) -> Images:
    """The images under attack without those that the attacker has, pixel for pixel.

    Well-known sets have a few images in both splits: these are left out. Many are a mistake.
    """
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


def own_features(context: Context, *, private: bool = False) -> Features:
    """The attacker's features, or with `private` those of the images it is after."""
    stage = context.public.stage("features")
    return Features.load(stage.private if private else stage.path).to(context.device)


def shadow_heads_of(context: Context, *, private: bool = False) -> ShadowHeads:
    """Heads on the attacker's images, or on those it is after."""
    found = own_features(context, private=private)
    seed = context.config.seed + (1 if private else 0)
    source = own_features(context).digest
    return ShadowHeads(found.values, found.labels, context.recipe, seed, source)


def statistics_of(context: Context) -> WeightStatistics:
    """What the stage stats found."""
    path = context.run.stage("stats").path / "statistics.safetensors"
    if not path.exists():
        raise RunError(f"{path} is not there: run the stage stats first.")
    return WeightStatistics.load(path)
