"""Which step `sfumato train` takes: plain or private, sharp or not, with public images or not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.commands.origin import require_no_ledger
from sfumato.data.classes import require_same_classes
from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.data.overlap import require_alike
from sfumato.errors import ConfigError
from sfumato.privacy.budget import Plan
from sfumato.settings.train import Train, Training
from sfumato.training.canaries import inputs_with_canaries, with_coordinates
from sfumato.training.captured_clip import captures, quick_clip
from sfumato.training.extenders import (
    Dope,
    Mirror,
    PublicExtender,
    PublicGradient,
    WeightMultiplicity,
)
from sfumato.training.features import with_features
from sfumato.training.fit import TrainState
from sfumato.training.hooks import Step, with_hooks
from sfumato.training.inputs import Inputs
from sfumato.training.memory import StepWork, memory_advice
from sfumato.training.plain_step import plain_step
from sfumato.training.private_step import PrivacyContext, private_step
from sfumato.training.process_group import ProcessGroup
from sfumato.training.sharpness import SharpnessStep, sharp_step


class StepSetup(NamedTuple):
    """A step, and what it is made of."""

    step: Step
    clipper: GradientClipper
    inputs: Inputs
    work: StepWork
    """What it does with each chunk, by which memory is measured."""


def load_public(config: Training, private: Images, test: Images) -> Images | None:
    """The public images of the settings: like the others, and none of them."""
    if config.extender_images is None:
        return None
    require_no_ledger(config.extender_images, private.name)
    public = load_images(config.extender_images, "train", private=False, **config.source.loading)
    for images in (private, test):  # test images among the public ones would flatter every score
        require_alike(images, public)
        require_same_classes(public.classes, public.name, images.classes, images.name)
    return replace(public, people=None)


def make_step(
    config: Train,
    train_state: TrainState,
    inputs: Inputs,
    paid: PrivacyContext,
    *,
    processes: ProcessGroup,
    public: Images | None,
    say: Callable[[str], None],
) -> StepSetup:
    """The step of the settings, for a model that has been tested on noise where that matters."""
    clipping = Clipping(
        max_norm=config.max_grad_norm, style=config.clip, per_layer=config.per_layer
    )
    mode = "ghost_mixed" if config.mode == "non-private" else config.mode
    clipper = GradientClipper(train_state.model, mode, clipping)
    if config.mode == "non-private":
        once = replace(paid.plan, steps=1)
        paid.ledger.charge(once.release("train", 0, data=inputs.images.name))
        kind = partial(sharp_step, rho=config.sharpness) if config.sharpness else plain_step
        step = kind(train_state.model, inputs, processes=processes, compiled=config.compile)
        return StepSetup(step, clipper, inputs, StepWork.plain(train_state.model))
    extender = new_extender(config, train_state, inputs, paid.plan, processes, public)
    with memory_advice(clipper, inputs, 3):
        try_on_noise(clipper, inputs, say)
        # Only of a model that has passed: a body that mixes examples has no features of one.
        model, inputs = with_features(train_state.model, inputs, say)
        if extender is not None:
            extender.begin(train_state.step)
            inputs = replace(inputs, wrap_loss=extender.wrap_loss)
        if model is not train_state.model or extender is not None:
            clipper = replace(clipper, model=model, layouts={})
            try_on_noise(clipper, inputs)
        if config.canaries and config.canary_kind == "gradient":
            planted = with_coordinates(clipper.model, config.canaries)
            clipper = replace(clipper, model=planted, layouts={})
            inputs = inputs_with_canaries(inputs, config.canaries)
            try_on_noise(clipper, inputs)
    clip = quick_clip(clipper, inputs, compiled=config.compile)
    step = private_step(clipper, inputs, paid, processes=processes, clip=clip)
    if extender is not None:
        step = with_hooks(step, [extender])
    if train_state.last is not None:
        step = with_hooks(step, [SharpnessStep(model, train_state.last, config.sharpness)])
    return StepSetup(step, clipper, inputs, StepWork(clip, clipper.clip, captures(clipper, inputs)))


def new_extender(
    config: Training,
    train_state: TrainState,
    inputs: Inputs,
    plan: Plan,
    processes: ProcessGroup,
    public: Images | None,
) -> PublicExtender | None:
    """What public images are used for, if they are."""
    if config.extender == "none":
        return None
    if public is None:
        raise ConfigError(f"--extender {config.extender} looks at public images: give them.")
    alone = replace(inputs, images=public.to(inputs.device), views=1, people=None, seed=config.seed)
    gradient = PublicGradient(
        train_state.model, alone, config.public_batch_size, config.seed, processes
    )
    if config.extender == "dope":
        return Dope(gradient)
    if config.extender == "mirror":
        return Mirror(gradient, plan.steps)
    return WeightMultiplicity(gradient, config.augmult, config.public_rho)


def try_on_noise(
    clipper: GradientClipper, inputs: Inputs, say: Callable[[str], None] = lambda _: None
) -> None:
    """Refuse the model unless its per-example gradients are those of autograd."""
    say("testing on noise that the model's per-example gradients are those of autograd")
    exact = replace(inputs, precision=torch.float32)
    admit(clipper, inputs.losses, inputs.trial(), 3, exact.losses)
