"""The stages of `sfumato invert` before the score: target, judge, select, prior, latent."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

from sfumato.attacks.gan_state import GanTask, new_gan
from sfumato.attacks.gan_training import train_gan
from sfumato.attacks.inversion_loss import InversionLoss
from sfumato.attacks.latent_search import Draw, Extra, InvertedImages, search_codes
from sfumato.attacks.top_n_selection import Selection
from sfumato.attacks.top_n_selection import select_top_n as choose
from sfumato.commands.invert.context import Context, open_access
from sfumato.commands.train import command as train
from sfumato.data.images import Images
from sfumato.files import read_json
from sfumato.models.zoo import build_model, load_weights
from sfumato.runs import Run
from sfumato.sharing.feature_matching import roughness
from sfumato.training.plain import inputs_of, train_plainly
from sfumato.training.plain_step import plain_step


def target(context: Context, stage: Run) -> None:
    """Train the target on its part of the private images, as `sfumato train` would."""
    if context.config.target is not None:
        stage.finish({"target": context.config.target})
        return
    context.members.save_npz(context.run.private / "members.npz", context.held_out)
    train.run(context.target, stage)


def judge(context: Context, stage: Run) -> None:
    """Train judges on private images that the target never had, and on the public classes."""
    judge_images = judging_images(context)
    for name in context.config.judges:
        place = Run(context.shared.private / "judges" / name, context.run.say)
        place.path.mkdir(parents=True, exist_ok=True)
        if place.finished:
            continue
        context.run.log(f'judge "{name}" learns {len(judge_images.classes)} classes')
        model = new_judge(context, name)
        inputs = inputs_of(
            model, judge_images, context.device, shift=2, precision=context.precision
        )
        train_plainly(
            model,
            len(judge_images),
            plain_step(model, inputs),
            place,
            lr=2e-3,
            epochs=context.config.judge_epochs,
            batch_size=128,
            warmup=20,
        )
        place.save_tensors("model.safetensors", model.state_dict())
        place.finish({"judge": name})
    stage.finish({"judges": list(context.config.judges)})


def judging_images(context: Context) -> Images:
    """What judges learn: private images of their own and half of the public ones, all classes."""
    classes = judged_classes(context)
    places = torch.tensor([classes.index(name) for name in context.public.classes])
    some = context.public.select(judges_training_images(context).nonzero().flatten())
    public = replace(some, labels=places[some.labels], classes=classes)
    return replace(context.others, classes=classes).joined(public, "judges'")


def judges_training_images(context: Context) -> torch.Tensor:
    """Which public images judges learn: half of them, so that the others can be shown to them."""
    return torch.rand(len(context.public), generator=torch.Generator().manual_seed(0)) < 0.5


def judged_classes(context: Context) -> tuple[str, ...]:
    """The names that judges know: those of the target first, then the public ones."""
    return tuple(dict.fromkeys((*context.members.classes, *context.public.classes)))


def new_judge(context: Context, name: str) -> nn.Module:
    """A judge at its start."""
    torch.manual_seed(1)
    classes = len(judged_classes(context))
    model = build_model(name, classes=classes, shape=context.members.shape)
    return model.to(context.device)


def select(context: Context, stage: Run) -> None:
    """The public images that the target takes for each class."""
    found = choose(open_access(context), context.public, context.config.n)
    tensors = {"places": found.places, "confidence": found.confidence}
    stage.save_tensors("selection.safetensors", tensors)
    stage.write_json("selection.json", found.words())
    stage.finish(found.words())


def selection_of(context: Context) -> Selection:
    """What the stage select found."""
    folder = context.stage("select").path
    kept = load_file(folder / "selection.safetensors")
    scale = read_json(folder / "selection.json")["margin_scale"]
    return Selection(kept["places"], kept["confidence"], scale)


def make_inversion_loss(context: Context) -> InversionLoss:
    """The inversion loss, in the target's unit."""
    scale = selection_of(context).scale if context.config.own_unit else 1.0
    return InversionLoss(context.config.loss, scale)


def prior(context: Context, stage: Run) -> None:
    """A generator of images that the target takes for its classes."""
    config = context.config
    if config.method == "pixels":
        stage.finish({"generator": "none"})
        return
    access, chosen = open_access(context, context.precision), selection_of(context)
    gan = new_gan(config.method, access, config.gan, config.seed)
    pixels, labels = context.public.pixels, context.public.labels
    if config.method == "plg":  # the baselines learn from all public images, and no label
        pixels, labels = pixels[chosen.places.flatten()], chosen.labels
    task = GanTask(
        pixels.to(context.device),
        labels.to(context.device),
        access,
        make_inversion_loss(context),
        config.views,
        config.method,
        config.gan,
        context.precision,
    )
    made = train_gan(gan, task, stage, seed=config.seed, say=stage.log, compiled=config.compile)
    stage.save_tensors("model.safetensors", made.state_dict())
    kept = {"iterations": gan.step, "margin_at_each_look": gan.looks}
    stage.finish({**kept, "best_look": gan.looks.index(max(gan.looks))})


def latent(context: Context, stage: Run) -> None:
    """Images of every class, from random codes that are moved until the target is convinced."""
    config, access = context.config, open_access(context)
    drawing = of_pixels(context) if config.method == "pixels" else of_generator(context)
    found = search_codes(
        drawing.draw,
        drawing.begin,
        access,
        make_inversion_loss(context),
        config.views,
        config.search,
        extra=drawing.extra,
        seed=config.seed,
        say=stage.say,
    )
    stage.save_tensors(
        "guesses.safetensors",
        {"images": found.images, "labels": found.labels, "margins": found.margins},
    )
    convinced = float((found.margins > 0).float().mean())
    stage.finish({"guesses": len(found.labels), "target_convinced": convinced})


class Drawing(NamedTuple):
    """How codes begin, how they become images, and what else is asked of them."""

    draw: Draw
    begin: Callable[[int, torch.Generator], torch.Tensor]
    extra: Extra | None = None


def of_generator(context: Context) -> Drawing:
    """Codes of the trained generator."""
    config = context.config
    net = new_gan(config.method, open_access(context), config.gan, config.seed).generator
    load_weights(net, context.stage("prior").path / "model.safetensors")
    net.eval().requires_grad_(False)

    def draw(codes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        lower = context.precision != torch.float32
        with torch.autocast(context.device.type, context.precision, enabled=lower):
            return net(codes, labels).float()

    def begin(count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(count, config.gan.latent, generator=generator, device=generator.device)

    return Drawing(draw, begin)


def of_pixels(context: Context) -> Drawing:
    """Pixels themselves, as in DeepInversion: smooth ones, from a grey start."""

    def begin(count: int, generator: torch.Generator) -> torch.Tensor:
        shape = (count, *context.members.shape)
        return 0.1 * torch.randn(shape, generator=generator, device=generator.device)

    def extra(_: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return roughness(images)

    return Drawing(lambda codes, _: codes.sigmoid(), begin, extra)


def guesses_of(context: Context) -> InvertedImages:
    """What the stage latent found."""
    kept = load_file(context.stage("latent").path / "guesses.safetensors")
    return InvertedImages(kept["images"], kept["labels"], kept["margins"])
