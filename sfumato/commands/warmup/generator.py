"""The stages of `sfumato warmup` that make images: split, generator, guide, sample."""

from dataclasses import replace
from typing import Any

import torch

from sfumato.commands.origin import require_no_ledger
from sfumato.commands.warmup.classifier import drawn_images
from sfumato.commands.warmup.context import Context
from sfumato.commands.warmup.draw import (
    NOTHING,
    describe_drawing,
    generator_guarantee,
    require_all_classes,
)
from sfumato.commands.warmup.watch import check_for_copies
from sfumato.config import dumps
from sfumato.data.arrays import load_samples, save_npz_pieces
from sfumato.data.images import Images
from sfumato.data.overlap import overlap, require_alike
from sfumato.diffusion.denoise import Denoiser
from sfumato.diffusion.discriminator_guidance import discriminator_step
from sfumato.diffusion.generator import new_train_state, train_generator
from sfumato.diffusion.generator_data import SHOWN, GeneratorData
from sfumato.diffusion.image_shards import Draw, ImageShards, piece_size
from sfumato.diffusion.sampler import draw_images
from sfumato.diffusion.stored_generator import Blueprint, StoredGenerator, read_stored
from sfumato.errors import DataError
from sfumato.reporting.figures import save_image_rows
from sfumato.runs import Run
from sfumato.training.plain import train_plainly
from sfumato.training.process_group import ProcessGroup


def split(context: Context, stage: Run) -> None:
    """Keep the public share: it is what all of this may be checked against."""
    twice = len(overlap(context.private, context.public))
    if twice:  # on the screen only: a log may be shared, and this counts private images
        stage.say(f"{twice} private images (a private count) are also public, pixel for pixel")
    context.public.save_npz(stage.path / "public.npz")
    counts = {"public": len(context.public), "private": context.units}
    stage.finish({**counts, "promise": "nothing is guaranteed about the public images"})


def generator_data_of(context: Context) -> GeneratorData:
    """Public images on the device; some of each class are held out."""
    held_out, own = split_public(context)
    return GeneratorData(own, held_out, context.device)


def split_public(context: Context) -> tuple[Images, Images]:
    """Some public images of each class to be held out, and the rest to learn from."""
    public = context.public.require_public("training a generator")
    return public.split(context.config.diffusion.gen_held_out, context.config.seed)


def check_public_share(context: Context) -> None:
    """Refuse a public share of which nothing can be held out, or nothing is left."""
    held_out, own = split_public(context)
    missing = set(range(len(own.classes))) - set(own.labels.tolist())
    if not len(held_out) or missing or len(own) < 2:
        raise DataError(
            f"{len(context.public)} public images are too few: some are held out "
            f"(--gen-held-out {context.config.diffusion.gen_held_out:g}) to see when the generator "
            "should stop, and every class must be left to learn from. Raise --public-share, or "
            "bring more by --public-images."
        )


def make_denoiser(context: Context) -> Denoiser:
    """Our network, or the one that was brought, at the start that the seed gives it."""
    torch.manual_seed(context.config.seed)
    return blueprint_of(context).new_denoiser()


def blueprint_of(context: Context) -> Blueprint:
    """What the generator is built from."""
    images, config = context.private, context.config
    return Blueprint(
        shape=images.shape,
        classes=images.classes,
        diffusion=config.diffusion,
        brought=config.denoiser,
        told=not config.private,
    )


def generator(context: Context, stage: Run | None) -> None:
    """A diffusion model of the public share, by all processes; the leader has the stage."""
    settings, data = context.config.diffusion, generator_data_of(context)
    train_state = new_train_state(make_denoiser(context), settings, context.device)
    made = train_generator(
        train_state,
        data,
        settings,
        stage,
        seed=context.config.seed,
        precision=context.precision,
        show=lambda seen, samples: show_samples(context, stage, seen, samples),
        processes=context.processes,
        compiled=context.config.compile,
    )
    if stage is not None:
        stage.save_tensors("model.safetensors", made.state_dict())
        blueprint_of(context).keep(stage)
        best = dict(train_state.best_look)
        seen = {"images_seen": train_state.step * settings.gen_batch}
        stage.finish({**seen, "images_at_best": best.pop("images"), **best, "promise": NOTHING})


def show_samples(context: Context, stage: Run | None, seen: int, samples: torch.Tensor) -> None:
    """A picture of samples, the same number of each class, after this many images."""
    assert stage is not None
    classes, folder = context.private.classes, stage.path / "samples"
    folder.mkdir(exist_ok=True)
    rows = samples.cpu().float().unflatten(0, (len(classes), -1)) / 255
    drawn = [("", row) for row in rows.transpose(0, 1)]
    save_image_rows(folder / f"{seen:09d}.png", drawn, classes)


def trained(context: Context) -> StoredGenerator:
    """The generator that the stage left, and the guide."""
    places = (context.run.path / "stages" / name for name in ("generator", "guide"))
    return read_stored(*places, known=context.config.denoiser)


def guide(context: Context, stage: Run) -> None:
    """A discriminator that tells public images from samples, if one is asked for."""
    config = context.config
    if not config.guide_weight:
        stage.finish({"guide": "none"})
        return
    _, real = split_public(context)
    pieces = ImageShards(stage.path, len(real), piece_size(context.device))
    pieces.draw(drawing_like(context, real), ProcessGroup(), stage.say)
    drawn = pieces.first(len(real))
    made = replace(real, pixels=drawn, name="drawn for the guide", people=None)
    torch.manual_seed(config.seed)
    discriminator = blueprint_of(context).new_discriminator().to(context.device)
    step = discriminator_step(
        discriminator, real, made, context.device, seed=config.seed, precision=context.precision
    )
    train_plainly(
        discriminator,
        len(real),
        step,
        stage,
        epochs=config.guide_epochs,
        lr=3e-4,
        batch_size=128,
        seed=config.seed,
    )
    stage.save_tensors("model.safetensors", discriminator.state_dict())
    pieces.remove()
    stage.finish({"guide": "discriminator", "images": len(real)})


def drawing_like(context: Context, real: Images) -> Draw:
    """How images under the labels of these are drawn, from seeds that no other image has."""
    denoiser = trained(context).denoiser(context.device)

    def draw(first: int, last: int) -> torch.Tensor:
        return draw_images(
            denoiser,
            real.labels[first:last],
            -1 - torch.arange(first, last),
            real.shape,
            solver="dpm",
            steps=12,
            precision=context.precision,
        )

    return draw


def check_number(context: Context) -> None:
    """Refuse to draw too few images."""
    require_all_classes(context.config.number, context.private.classes)


def draw_samples(context: Context, stage: Run | None) -> None:
    """Draw images of every class, in pieces; each is a function of its own number."""
    stored = context.processes.ask(lambda: trained(context))
    pieces = ImageShards(stage and stage.path, context.config.number, piece_size(context.device))
    if not context.processes.agree(stage is not None and (stage.path / "images.npz").exists()):
        draw_stage(context, stage, stored, pieces)
    if stage is None:
        return
    pieces.remove()  # before the stage is finished: nobody would do it later
    drawn = drawn_images(context)
    classes = len(drawn.classes)
    shown = drawn.pixels[: min(SHOWN, len(drawn) // classes) * classes]
    in_columns = shown.unflatten(0, (-1, classes)).transpose(0, 1).flatten(0, 1)
    show_samples(context, stage, len(drawn), in_columns)
    copies = {}
    if len(context.public):
        held_out, trained_on = split_public(context)
        place = context.run.path / "stages" / "generator"
        copies = check_for_copies(drawn, trained_on, held_out, place, stage.log)
    stage.finish({"drawn": len(drawn), **copies, **guarantee_about(context, stored)})


def draw_stage(
    context: Context, stage: Run | None, stored: StoredGenerator, pieces: ImageShards
) -> None:
    """Draw all pieces, and for the leader write the file from them."""
    config, images = context.config, context.private
    say = stage.say if stage else lambda _: None
    pieces.draw(
        describe_drawing(stored, config, context.device, context.public, config.vary),
        context.processes,
        say,
    )
    if stage is None:
        return
    labels = torch.arange(config.number) % len(images.classes)
    save_npz_pieces(
        stage.path / "images.npz",
        {"train": (labels, pieces)},
        classes=images.classes,
        shape=images.shape,
        note=dumps(guarantee_about(context, stored)),
    )


def guarantee_about(context: Context, stored: StoredGenerator) -> dict[str, Any]:
    """What is guaranteed about drawn images."""
    return generator_guarantee(context.run.path / "stages" / "generator", stored.blueprint.ledger)


def read_samples(context: Context) -> Images:
    """The images of --samples, or why they cannot take the place of drawn ones.

    What a generator of them was trained on, nobody can see; its owner's word is taken.
    """
    assert context.config.samples is not None
    require_no_ledger(context.config.samples, context.private.name)
    samples = load_samples(context.config.samples, context.private)
    for images in (context.private, context.test):
        require_alike(images, samples)
    return samples


def store_brought(context: Context, stage: Run | None) -> None:
    """Keep them where drawn images are kept."""
    if stage is None:
        return
    samples = read_samples(context)
    samples.save_npz(stage.path / "images.npz")
    told = {"samples": str(context.config.samples), "promise": UNKNOWN}
    stage.finish({"drawn": len(samples), **told})


UNKNOWN = "nothing is guaranteed about what these images were made from"
