"""The stages of `sfumato warmup` that make a classifier: warmup and train."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands import train
from sfumato.commands.train.train_state import describe
from sfumato.commands.warmup.scene import Scene
from sfumato.runs import Run

if TYPE_CHECKING:
    from sfumato.data.images import Images


def warm_up(scene: Scene, stage: Run) -> None:
    """Train the classifier on drawn images, if there are any, and the public ones."""
    images = scene.public.select(list(range(len(scene.public))) * scene.config.warm_repeats)
    if scene.config.number:
        images = drawn_images(scene).joined(images, f"drawn and {images.name}")
    warm_model(scene, images, stage, epochs=scene.config.warm_epochs)


def drawn_images(scene: Scene) -> "Images":
    """What the stage sample left."""
    from sfumato.data.load import load_images

    path = scene.run.stage("sample").path / "images.npz"
    return load_images(str(path), "train", private=False)


def warm_model(scene: Scene, images: "Images", stage: Run, *, epochs: float) -> None:
    """Write the classifier after the warm-up on these public images, and finish the stage."""
    from sfumato.data.augment import Augmentation
    from sfumato.training.plain import train_plainly
    from sfumato.training.sharp import sharp_step
    from sfumato.training.steps import plain_step

    config = scene.config
    # All of it learns: what a later stage leaves frozen must have been good for something.
    settings = replace(one_by_one(from_weights(scene, None)), train_only="all", freeze=())
    train_state, reading = train.prepare(settings, images.require_public("a warm-up"), scene.device)
    moves = Augmentation(
        crop=config.crop, flip=config.flip, cutout=config.warm_cutout, colour=config.warm_colour,
        affine=config.warm_affine,
    )  # fmt: skip
    reading = replace(reading, augmentation=moves, views=1, precision=scene.precision)
    kind = partial(sharp_step, rho=config.warm_rho) if config.warm_rho else plain_step
    step = kind(train_state.model, reading, compiled=config.compile)
    model = train_plainly(
        train_state.model, len(images), step, stage, epochs=epochs, lr=config.warm_lr,
        batch_size=config.warm_batch, weight_decay=5e-4, seed=config.seed, optimizer="sgd",
    )  # fmt: skip
    describe(settings, model, reading).keep(stage, model)
    stage.finish({"images": len(images)})


def privately(scene: Scene, stage: Run) -> None:
    """DP-SGD on the private rest, from the warm start."""
    from sfumato.commands.warmup.brought import declared

    warm = scene.run.stage("warmup").path / "model.safetensors"
    public = drawn_images(scene) if scene.config.extender != "none" else None
    train.run_on(
        from_weights(scene, warm), scene.private, scene.test, stage, public=public,
        declared=declared(scene),
    )  # fmt: skip


def from_weights(scene: Scene, weights: Path | None) -> train.Config:
    """Settings of the private stage, from this start."""
    # BatchNorm becomes the same before and after the warm-up, weights or not.
    settings = replace(scene.config.training, norm=scene.config.norm or "group")
    return settings if weights is None else replace(settings, weights=weights, pretrained=False)


def one_by_one(settings: train.Config) -> train.Config:
    """The same for images that are nobody's: drawn ones, or those a model is tested on."""
    return replace(settings, unit="example", people=None)
