"""The stages of `sfumato warmup` that make images: split, generator, guide, sample."""

from dataclasses import replace
from typing import TYPE_CHECKING

from sfumato.recipes.warmup_scene import Scene
from sfumato.runs import Run

if TYPE_CHECKING:
    import torch

    from sfumato.data.images import Images
    from sfumato.nn.noisy import NoisyDiscriminator
    from sfumato.synth.denoise import Denoiser
    from sfumato.synth.generator import Album
    from sfumato.synth.guide import DiscriminatorGuide

PIECE = 2000
"""Images that are drawn between two moments at which a run may be cut."""


def split(scene: Scene, stage: Run) -> None:
    """Keep the public share: it is what all of this may be checked against."""
    scene.public.save_npz(stage.path / "public.npz")
    stage.finish({"public": len(scene.public), "private": len(scene.private)})


def album_of(scene: Scene) -> "Album":
    """Public images on the device; some of each class are held out."""
    from sfumato.synth.generator import Album

    held_out, own = parts_of(scene)
    device = scene.device
    return Album(
        own.pixels.to(device), own.labels.to(device), held_out.pixels.to(device),
        held_out.labels.to(device), len(scene.public.classes),
    )  # fmt: skip


def parts_of(scene: Scene) -> "tuple[Images, Images]":
    """Some public images of each class to be held out, and the rest to learn from."""
    public = scene.public.require_public("training a generator")
    return public.split(scene.config.diffusion.gen_held_out, scene.config.seed)


def make_denoiser(scene: Scene) -> "Denoiser":
    """Our network, or the one that was brought."""
    import torch

    from sfumato.nn.zoo import own_function
    from sfumato.synth.denoise import Denoiser, Diffusers, require_fit
    from sfumato.synth.generator import new_denoiser

    torch.manual_seed(scene.config.seed)
    classes, shape = len(scene.private.classes), scene.private.shape
    if scene.config.denoiser is None:
        settings = scene.config.diffusion
        made = new_denoiser(settings, shape, classes, told=not scene.config.private)
    else:
        module, _, function = scene.config.denoiser.partition(":")
        made = Denoiser(Diffusers(own_function(module, function, classes)))
    require_fit(made, shape, classes)
    return made


def generator(scene: Scene, stage: Run) -> None:
    """A diffusion model of the public share."""
    from sfumato.synth.generator import new_painter, train_painter

    settings, album = scene.config.diffusion, album_of(scene)
    painter = new_painter(make_denoiser(scene), settings, scene.device)
    made = train_painter(
        painter, album, settings, stage, seed=scene.config.seed, precision=scene.precision,
        show=lambda seen, samples: show_samples(scene, stage, seen, samples),
    )  # fmt: skip
    stage.save_tensors("model.safetensors", made.state_dict())
    best = min(painter.looks, key=lambda look: look["held_out_loss"])
    stage.finish({"images_seen": painter.step * settings.gen_batch, **best})


def show_samples(scene: Scene, stage: Run, seen: int, samples: "torch.Tensor") -> None:
    """A picture of samples, the same number of each class, after so many images."""
    from sfumato.report.figures import save_image_rows

    classes, folder = scene.private.classes, stage.path / "samples"
    folder.mkdir(exist_ok=True)
    rows = samples.cpu().float().unflatten(0, (len(classes), -1)) / 255
    drawn = [("", row) for row in rows.transpose(0, 1)]
    save_image_rows(folder / f"{seen:09d}.png", drawn, classes)


def trained_denoiser(scene: Scene) -> "Denoiser":
    """The generator that the stage left."""
    from sfumato.nn.zoo import read_state

    made = make_denoiser(scene)
    made.load_state_dict(read_state(scene.run.stage("generator").path / "model.safetensors"))
    return made.to(scene.device).eval().requires_grad_(False)


def guide(scene: Scene, stage: Run) -> None:
    """A discriminator that tells public images from samples, if one is asked for."""
    import torch

    from sfumato.synth.guide import discriminator_step
    from sfumato.synth.sample import draw_images
    from sfumato.train.plain import train_plainly

    config = scene.config
    if not config.guide_weight:
        stage.finish({"guide": "none"})
        return
    _, real = parts_of(scene)
    made = replace(
        real, pixels=draw_images(
            trained_denoiser(scene), real.labels, -1 - torch.arange(len(real)), real.shape,
            solver="dpm", steps=12, precision=scene.precision,
        ), name="drawn for the guide", people=None,
    )  # fmt: skip
    discriminator = new_discriminator(scene)
    step = discriminator_step(
        discriminator, real, made, scene.device, seed=config.seed, precision=scene.precision
    )
    train_plainly(
        discriminator, len(real), step, stage, epochs=config.guide_epochs, lr=3e-4, batch_size=128,
        seed=config.seed,
    )  # fmt: skip
    stage.save_tensors("model.safetensors", discriminator.state_dict())
    stage.finish({"guide": "discriminator", "images": len(real)})


def new_discriminator(scene: Scene) -> "NoisyDiscriminator":
    """The guide's network, untrained."""
    import torch

    from sfumato.nn.noisy import NoisyDiscriminator

    torch.manual_seed(scene.config.seed)
    channels, size, _ = scene.public.shape
    width = scene.config.diffusion.gen_width
    made = NoisyDiscriminator(
        channels=channels, size=size, classes=len(scene.public.classes), width=width
    )
    return made.to(scene.device)


def guide_of(scene: Scene) -> "DiscriminatorGuide | None":
    """What bends samples towards public images."""
    from sfumato.nn.zoo import read_state
    from sfumato.synth.guide import DiscriminatorGuide

    if not scene.config.guide_weight:
        return None
    made = new_discriminator(scene)
    made.load_state_dict(read_state(scene.run.stage("guide").path / "model.safetensors"))
    return DiscriminatorGuide(made.eval(), precision=scene.precision)


def sample(scene: Scene, stage: Run) -> None:
    """Draw images of every class, in pieces; each is a function of its own number."""
    import numpy as np
    import torch

    from sfumato.files import atomic
    from sfumato.synth.sample import draw_images

    config, classes = scene.config, len(scene.private.classes)
    denoiser, bend = trained_denoiser(scene), guide_of(scene)
    labels = torch.arange(config.number) % classes
    seeds = config.seed + torch.arange(config.number)
    for start in range(0, config.number, PIECE):
        path = stage.path / f"piece-{start:07d}.npy"
        if path.exists():
            continue
        part = slice(start, start + PIECE)
        pixels = draw_images(
            denoiser, labels[part], seeds[part], scene.private.shape,
            solver=config.solver, steps=config.sample_steps, guide=bend,
            guide_weight=config.guide_weight, precision=scene.precision,
        )  # fmt: skip
        with atomic(path) as file:
            np.save(file, pixels.cpu().numpy())
        stage.say(f"{min(start + PIECE, config.number)} of {config.number} images drawn")
    pieces = [np.load(path) for path in sorted(stage.path.glob("piece-*.npy"))]
    drawn = replace(
        scene.public, pixels=torch.from_numpy(np.concatenate(pieces)), labels=labels, people=None,
        name="drawn",
    )  # fmt: skip
    drawn.save_npz(stage.path / "images.npz")
    copies = say_copies(scene, drawn) if len(scene.public) else {}
    stage.finish({"drawn": len(drawn), **copies})
    for path in stage.path.glob("piece-*.npy"):
        path.unlink()


def say_copies(scene: Scene, drawn: "Images") -> dict[str, float]:
    """How many of some drawn images are copies of public ones, and of held-out ones in the rest."""
    from sfumato.synth.copies import copy_rates

    held_out, own = parts_of(scene)
    return copy_rates(drawn.select(range(min(2000, len(drawn)))), own, held_out)
