"""The stages of `sfumato warmup` that make images: split, generator, guide, sample."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sfumato.commands.warmup.scene import Scene
from sfumato.runs import Run

if TYPE_CHECKING:
    import torch

    from sfumato.data.images import Images
    from sfumato.diffusion.album import Album
    from sfumato.diffusion.denoise import Denoiser
    from sfumato.diffusion.pieces import Draw, Pieces
    from sfumato.diffusion.stored import Blueprint, Stored


def split(scene: Scene, stage: Run) -> None:
    """Keep the public share: it is what all of this may be checked against."""
    from sfumato.data.alike import overlap

    twice = len(overlap(scene.private, scene.public))
    if twice:  # on the screen only: a log may be shared, and this counts private images
        stage.say(f"{twice} private images, for your eyes, are also public, pixel for pixel")
    scene.public.save_npz(stage.path / "public.npz")
    counts = {"public": len(scene.public), "private": scene.units}
    stage.finish({**counts, "promise": "nothing is promised about the public images"})


def album_of(scene: Scene) -> "Album":
    """Public images on the device; some of each class are held out."""
    from sfumato.diffusion.album import Album

    held_out, own = parts_of(scene)
    return Album(own, held_out, scene.device)


def parts_of(scene: Scene) -> "tuple[Images, Images]":
    """Some public images of each class to be held out, and the rest to learn from."""
    public = scene.public.require_public("training a generator")
    return public.split(scene.config.diffusion.gen_held_out, scene.config.seed)


def make_denoiser(scene: Scene) -> "Denoiser":
    """Our network, or the one that was brought, at the start that the seed gives it."""
    import torch

    torch.manual_seed(scene.config.seed)
    return blueprint_of(scene).new_denoiser()


def blueprint_of(scene: Scene) -> "Blueprint":
    """What the generator is built from."""
    from sfumato.diffusion.stored import Blueprint

    images, config = scene.private, scene.config
    return Blueprint(
        shape=images.shape, classes=images.classes, diffusion=config.diffusion,
        brought=config.denoiser, told=not config.private,
    )  # fmt: skip


def generator(scene: Scene, stage: Run | None) -> None:
    """A diffusion model of the public share, by all processes; the leader has the stage."""
    from sfumato.commands.warmup.draw import NOTHING
    from sfumato.diffusion.generator import new_painter, train_painter

    settings, album = scene.config.diffusion, album_of(scene)
    painter = new_painter(make_denoiser(scene), settings, scene.device)
    made = train_painter(
        painter,
        album,
        settings,
        stage,
        seed=scene.config.seed,
        precision=scene.precision,
        show=lambda seen, samples: show_samples(scene, stage, seen, samples),
        processes=scene.processes,
        compiled=scene.config.compile,
    )
    if stage is not None:
        stage.save_tensors("model.safetensors", made.state_dict())
        blueprint_of(scene).keep(stage)
        best = dict(painter.best_look)
        seen = {"images_seen": painter.step * settings.gen_batch}
        stage.finish({**seen, "images_at_best": best.pop("images"), **best, "promise": NOTHING})


def show_samples(scene: Scene, stage: Run | None, seen: int, samples: "torch.Tensor") -> None:
    """A picture of samples, the same number of each class, after so many images."""
    from sfumato.reporting.figures import save_image_rows

    assert stage is not None
    classes, folder = scene.private.classes, stage.path / "samples"
    folder.mkdir(exist_ok=True)
    rows = samples.cpu().float().unflatten(0, (len(classes), -1)) / 255
    drawn = [("", row) for row in rows.transpose(0, 1)]
    save_image_rows(folder / f"{seen:09d}.png", drawn, classes)


def trained(scene: Scene) -> "Stored":
    """The generator that the stage left, and the guide."""
    from sfumato.diffusion.stored import read_stored

    places = (scene.run.path / "stages" / name for name in ("generator", "guide"))
    return read_stored(*places, known=scene.config.denoiser)


def guide(scene: Scene, stage: Run) -> None:
    """A discriminator that tells public images from samples, if one is asked for."""
    import torch

    from sfumato.diffusion.guide import discriminator_step
    from sfumato.diffusion.pieces import Pieces, piece_size
    from sfumato.training.plain import train_plainly
    from sfumato.training.process_group import ProcessGroup

    config = scene.config
    if not config.guide_weight:
        stage.finish({"guide": "none"})
        return
    _, real = parts_of(scene)
    pieces = Pieces(stage.path, len(real), piece_size(scene.device))
    pieces.draw(drawing_like(scene, real), ProcessGroup(), stage.say)
    drawn = pieces.first(len(real))
    made = replace(real, pixels=drawn, name="drawn for the guide", people=None)
    torch.manual_seed(config.seed)
    discriminator = blueprint_of(scene).new_discriminator().to(scene.device)
    step = discriminator_step(
        discriminator, real, made, scene.device, seed=config.seed, precision=scene.precision
    )
    train_plainly(
        discriminator, len(real), step, stage, epochs=config.guide_epochs, lr=3e-4, batch_size=128,
        seed=config.seed,
    )  # fmt: skip
    stage.save_tensors("model.safetensors", discriminator.state_dict())
    pieces.remove()
    stage.finish({"guide": "discriminator", "images": len(real)})


def drawing_like(scene: Scene, real: "Images") -> "Draw":
    """How images under the labels of these are drawn, from seeds that no other image has."""
    import torch

    from sfumato.diffusion.sample import draw_images

    denoiser = trained(scene).denoiser(scene.device)

    def draw(first: int, last: int) -> "torch.Tensor":
        return draw_images(
            denoiser, real.labels[first:last], -1 - torch.arange(first, last), real.shape,
            solver="dpm", steps=12, precision=scene.precision,
        )  # fmt: skip

    return draw


def sample(scene: Scene, stage: Run | None) -> None:
    """Draw images of every class, in pieces; each is a function of its own number."""
    from sfumato.commands.warmup.classifier import drawn_images
    from sfumato.commands.warmup.watch import watch
    from sfumato.diffusion.album import SHOWN
    from sfumato.diffusion.pieces import Pieces, piece_size

    stored = scene.processes.ask(lambda: trained(scene))
    pieces = Pieces(stage and stage.path, scene.config.number, piece_size(scene.device))
    if not scene.processes.agree(stage is not None and (stage.path / "images.npz").exists()):
        draw_stage(scene, stage, stored, pieces)
    if stage is None:
        return
    pieces.remove()  # before the stage is finished: nobody would do it later
    drawn = drawn_images(scene)
    classes = len(drawn.classes)
    shown = drawn.pixels[: min(SHOWN, len(drawn) // classes) * classes]
    in_columns = shown.unflatten(0, (-1, classes)).transpose(0, 1).flatten(0, 1)
    show_samples(scene, stage, len(drawn), in_columns)
    copies = {}
    if len(scene.public):
        held_out, learnt = parts_of(scene)
        place = scene.run.path / "stages" / "generator"
        copies = watch(drawn, learnt, held_out, place, stage.log)
    stage.finish({"drawn": len(drawn), **copies, **promise_about(scene, stored)})


def draw_stage(scene: Scene, stage: Run | None, stored: "Stored", pieces: "Pieces") -> None:
    """Draw all pieces, and for the leader write the file from them."""
    import torch

    from sfumato.commands.warmup.draw import drawing
    from sfumato.config import dumps
    from sfumato.data.arrays import save_npz_pieces

    config, images = scene.config, scene.private
    say = stage.say if stage else lambda _: None
    pieces.draw(drawing(stored, config, scene.device, scene.public), scene.processes, say)
    if stage is None:
        return
    labels = torch.arange(config.number) % len(images.classes)
    save_npz_pieces(
        stage.path / "images.npz", {"train": (labels, pieces)}, classes=images.classes,
        shape=images.shape, note=dumps(promise_about(scene, stored)),
    )  # fmt: skip


def promise_about(scene: Scene, stored: "Stored") -> dict[str, Any]:
    """What is promised about drawn images."""
    from sfumato.commands.warmup.draw import promise_of

    return promise_of(scene.run.path / "stages" / "generator", stored.blueprint.ledger)
