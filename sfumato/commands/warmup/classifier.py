"""The stages of `sfumato warmup` that make a classifier: warmup and train."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from sfumato.commands.train import command as train
from sfumato.commands.train.privacy_setup import plan_for
from sfumato.commands.train.train_state import describe_classifier
from sfumato.commands.warmup.context import Context
from sfumato.data.augment import Augmentation
from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.runs import Run
from sfumato.training.plain import train_plainly
from sfumato.training.plain_step import plain_step
from sfumato.training.sharpness import sharp_step


def warm_up(context: Context, stage: Run) -> None:
    """Train the classifier on drawn images, if there are any, and the public ones."""
    images = context.public.select(list(range(len(context.public))) * context.config.warm_repeats)
    if context.config.number:
        images = drawn_images(context).joined(images, f"drawn and {images.name}")
    warm_model(context, images, stage, epochs=context.config.warm_epochs)


def drawn_images(context: Context) -> Images:
    """What the stage sample left."""
    path = context.run.stage("sample").path / "images.npz"
    return load_images(str(path), "train", private=False)


def warm_model(context: Context, images: Images, stage: Run, *, epochs: float) -> None:
    """Write the classifier after the warm-up on these public images, and finish the stage."""
    config = context.config
    # All of it learns: what a later stage leaves frozen must have been good for something.
    settings = replace(one_by_one(from_weights(context, None)), train_only="all", freeze=())
    train_state, inputs = train.prepare_classifier(
        settings, images.require_public("a warm-up"), context.device
    )
    moves = Augmentation(
        crop=config.crop,
        flip=config.flip,
        cutout=config.warm_cutout,
        colour=config.warm_colour,
        affine=config.warm_affine,
    )
    inputs = replace(inputs, augmentation=moves, views=1, precision=context.precision)
    kind = partial(sharp_step, rho=config.warm_rho) if config.warm_rho else plain_step
    step = kind(train_state.model, inputs, compiled=config.compile)
    model = train_plainly(
        train_state.model,
        len(images),
        step,
        stage,
        epochs=epochs,
        lr=config.warm_lr,
        batch_size=config.warm_batch,
        weight_decay=5e-4,
        seed=config.seed,
        optimizer="sgd",
    )
    describe_classifier(settings, model, inputs).keep(stage, model)
    stage.finish({"images": len(images)})


def train_privately(context: Context, stage: Run) -> None:
    """DP-SGD on the private rest, from the warm start."""
    warm = context.run.stage("warmup").path / "model.safetensors"
    public = drawn_images(context) if context.config.extender != "none" else None
    train.run_on(
        from_weights(context, warm),
        context.private,
        context.test,
        stage,
        public=public,
        declared=declared(context),
    )


def from_weights(context: Context, weights: Path | None) -> train.Config:
    """Settings of the private stage, from this start."""
    # BatchNorm becomes the same before and after the warm-up, weights or not.
    settings = replace(context.config.training, norm=context.config.norm or "group")
    return settings if weights is None else replace(settings, weights=weights, pretrained=False)


def one_by_one(settings: train.Config) -> train.Config:
    """The same for images that are nobody's: drawn ones, or those a model is tested on."""
    return replace(settings, unit="example", people=None)


def declared(context: Context) -> str:
    """The images that were declared public, for the ledger."""
    config, public = context.config, context.public
    how = "brought" if config.public_images is not None else f"chosen by seed {config.seed}"
    made = "" if config.samples is None else f", and of {config.samples.name} (made elsewhere)"
    return f"{public.name} ({len(public)}, {how}){made}"


def check_plan(context: Context) -> None:
    """Refuse a guarantee that cannot be kept."""
    plan_for(context.config.training, context.units)


def build_classifier(context: Context) -> None:
    """Make the network once: what cannot be built is refused."""
    train.prepare_classifier(
        context.config.training, context.private.select([0]), torch.device("cpu")
    )
