"""What `sfumato train` begins with: a model, its optimizer, and how it reads images."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from sfumato.data.augment import Augmentation
from sfumato.data.images import Images
from sfumato.data.people import People
from sfumato.errors import ConfigError
from sfumato.lineage import norm_of
from sfumato.models.ema import new_average
from sfumato.models.normalise import NormPolicy, apply_norm_policy, has_batch_norm
from sfumato.models.zoo import build_model, load_weights, pixel_statistics
from sfumato.privacy.budget import count_steps
from sfumato.settings.train import Training
from sfumato.training.fit import TrainState
from sfumato.training.inputs import Inputs
from sfumato.training.setup import choose_parameters, make_optimizer, make_schedule, move_to_device
from sfumato.training.sharpness import LastGradient
from sfumato.training.trained_model import Description

Kind = TypeVar("Kind")


def prepare_classifier(
    config: Training,
    images: Images,
    device: torch.device,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[TrainState, Inputs]:
    """The classifier of the settings, and how it reads these images."""
    torch.manual_seed(config.seed)
    if config.pretrained:
        say(f"looking for the published weights of {config.model}, here or online")
    model = build_model(
        config.model,
        classes=len(images.classes),
        shape=images.shape,
        pretrained=config.pretrained,
    )
    statistics = pixel_statistics(model, images.shape[0])
    policy = norm_policy(config)
    if policy != "keep" and has_batch_norm(model):
        done = {"group": "replaced by GroupNorm", "frozen": "frozen with its statistics"}[policy]
        say(f"BatchNorm mixes examples: it is {done} (--norm)")
    model = apply_norm_policy(model, policy)
    if config.weights is not None:
        load_weights(model, config.weights)
    choose_parameters(model, config.train_only, config.freeze)
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if config.train_only == "head" and frozen and not (config.pretrained or config.weights):
        say("--train-only head without weights: it learns from random features. Give --pretrained")
    inputs = make_inputs(Inputs, config, images, device, statistics)
    return make_train_state(config, model, inputs), inputs


def norm_policy(config: Training) -> NormPolicy:
    """What becomes of BatchNorm: statistics that came with weights are worth keeping.

    Weights of a run of sfumato that had GroupNorm in its place go on with GroupNorm.
    """
    if config.norm is None and config.weights is not None:
        return "group" if norm_of(config.weights) == "group" else "frozen"
    return config.norm or ("frozen" if config.pretrained else "group")


def describe_classifier(config: Training, network: nn.Module, inputs: Inputs) -> Description:
    """What is written beside the weights, so that the classifier can be built again."""
    return Description.of(
        inputs,
        network,
        name=config.model,
        norm=norm_policy(config),
        centre_crop=config.centre_crop,
    )


def make_inputs(
    kind: Callable[..., Kind],
    config: Training,
    images: Images,
    device: torch.device,
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
) -> Kind:
    """A reading of these images, with the mean and deviation of pixels that the model expects."""
    return kind(
        images.to(device),
        device,
        *statistics,
        Augmentation(crop=config.crop, flip=config.flip),
        config.augmult,
        torch.bfloat16 if config.precision == "bf16" else torch.float32,
        group_by_person(config, images),
        config.seed,
    )


def make_train_state(config: Training, model: nn.Module, inputs: Inputs) -> TrainState:
    """The model where it reads, with all that changes as it learns."""
    model = move_to_device(model, inputs.device)
    optimizer = make_optimizer(
        model,
        config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    schedule = make_schedule(optimizer, config.schedule, number_of_steps(config, len(inputs)))
    # SAM walks up along its own batch; only the private way needs to remember.
    uphill = config.sharpness and config.mode != "non-private"
    last = LastGradient(model) if uphill else None
    return TrainState(model, optimizer, schedule, new_average(model, config.ema), last)


def group_by_person(config: Training, images: Images) -> Any:
    """Who is on which image, if the guarantee is about people."""
    if config.unit == "example":
        return None
    if images.people is None:
        raise ConfigError(
            f'nobody knows who is on the images of "{images.name}". Give --people folder, '
            "--people FILE.csv, or arrays people_train and people_test in an .npz file."
        )
    return People(images.people, config.images_per_person)


def count_units(config: Training, images: Images) -> int:
    """How many images, or people, training is about."""
    people = group_by_person(config, images)
    return len(images if people is None else people)


def number_of_steps(config: Training, size: int) -> int:
    """Steps that the settings ask for."""
    epochs = 5.0 if config.epochs is None and config.steps is None else config.epochs
    return count_steps(size, config.batch_size, epochs=epochs, steps=config.steps)
