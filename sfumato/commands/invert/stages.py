"""The stages of `sfumato invert` before the score: target, judge, select, prior, latent."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sfumato.commands import train
from sfumato.commands.invert.scene import Scene, open_access
from sfumato.runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from sfumato.attacks.inversion import Wish
    from sfumato.attacks.latent import Draw, Extra, Guesses
    from sfumato.attacks.select import Selection
    from sfumato.data.images import Images


def target(scene: Scene, stage: Run) -> None:
    """Train the target on its part of the private images, as `sfumato train` would."""
    if scene.config.target is not None:
        stage.finish({"target": scene.config.target})
        return
    scene.members.save_npz(scene.run.private / "members.npz", scene.held_out)
    train.run(scene.target, stage)


def judge(scene: Scene, stage: Run) -> None:
    """Train judges on private images that the target never had, and on the public classes."""
    from sfumato.training.plain import reading_of, train_plainly
    from sfumato.training.steps import plain_step

    lessons = judging_images(scene)
    for name in scene.config.judges:
        place = Run(scene.shared.private / "judges" / name, scene.run.say)
        place.path.mkdir(parents=True, exist_ok=True)
        if place.finished:
            continue
        scene.run.log(f'judge "{name}" learns {len(lessons.classes)} classes')
        model = new_judge(scene, name)
        reading = reading_of(model, lessons, scene.device, shift=2, precision=scene.precision)
        train_plainly(
            model, len(lessons), plain_step(model, reading), place, lr=2e-3,
            epochs=scene.config.judge_epochs, batch_size=128, warmup=20,
        )  # fmt: skip
        place.save_tensors("model.safetensors", model.state_dict())
        place.finish({"judge": name})
    stage.finish({"judges": list(scene.config.judges)})


def judging_images(scene: Scene) -> "Images":
    """What judges learn: private images of their own and half of the public ones, all classes."""
    import torch

    classes = judged_classes(scene)
    places = torch.tensor([classes.index(name) for name in scene.public.classes])
    some = scene.public.select(learnt_by_judges(scene).nonzero().flatten())
    public = replace(some, labels=places[some.labels], classes=classes)
    return replace(scene.others, classes=classes).joined(public, "judges'")


def learnt_by_judges(scene: Scene) -> "torch.Tensor":
    """Which public images judges learn: half of them, so that the others can be shown to them."""
    import torch

    return torch.rand(len(scene.public), generator=torch.Generator().manual_seed(0)) < 0.5


def judged_classes(scene: Scene) -> tuple[str, ...]:
    """The names that judges know: those of the target first, then the public ones."""
    return tuple(dict.fromkeys((*scene.members.classes, *scene.public.classes)))


def new_judge(scene: Scene, name: str) -> "nn.Module":
    """A judge at its start."""
    import torch

    from sfumato.models.zoo import build_model

    torch.manual_seed(1)
    classes = len(judged_classes(scene))
    model = build_model(name, classes=classes, shape=scene.members.shape)
    return model.to(scene.device)


def select(scene: Scene, stage: Run) -> None:
    """The public images that the target takes for each class."""
    from sfumato.attacks.select import select as choose

    found = choose(open_access(scene), scene.public, scene.config.n)
    tensors = {"places": found.places, "confidence": found.confidence}
    stage.save_tensors("selection.safetensors", tensors)
    stage.write_json("selection.json", found.words())
    stage.finish(found.words())


def selection_of(scene: Scene) -> "Selection":
    """What the stage select found."""
    from safetensors.torch import load_file

    from sfumato.attacks.select import Selection
    from sfumato.files import read_json

    folder = scene.stage("select").path
    kept = load_file(folder / "selection.safetensors")
    scale = read_json(folder / "selection.json")["margin_scale"]
    return Selection(kept["places"], kept["confidence"], scale)


def wish_of(scene: Scene) -> "Wish":
    """The inversion loss, in the target's unit."""
    from sfumato.attacks.inversion import Wish

    scale = selection_of(scene).scale if scene.config.own_unit else 1.0
    return Wish(scene.config.loss, scale)


def prior(scene: Scene, stage: Run) -> None:
    """A generator of images that the target takes for its classes."""
    from sfumato.attacks.prior import train_gan
    from sfumato.attacks.pupils import Lesson, new_gan

    config = scene.config
    if config.method == "pixels":
        stage.finish({"generator": "none"})
        return
    access, chosen = open_access(scene, scene.precision), selection_of(scene)
    gan = new_gan(config.method, access, config.gan, config.seed)
    pixels, labels = scene.public.pixels, scene.public.labels
    if config.method == "plg":  # the baselines learn from all public images, and no label
        pixels, labels = pixels[chosen.places.flatten()], chosen.labels
    lesson = Lesson(
        pixels.to(scene.device), labels.to(scene.device), access, wish_of(scene), config.views,
        config.method, config.gan, scene.precision,
    )  # fmt: skip
    made = train_gan(gan, lesson, stage, seed=config.seed, say=stage.log, compiled=config.compile)
    stage.save_tensors("model.safetensors", made.state_dict())
    kept = {"iterations": gan.step, "margin_at_each_look": gan.looks}
    stage.finish({**kept, "best_look": gan.looks.index(max(gan.looks))})


def latent(scene: Scene, stage: Run) -> None:
    """Images of every class, from random codes that are moved until the target is convinced."""
    from sfumato.attacks.latent import search_codes

    config, access = scene.config, open_access(scene)
    drawing = of_pixels(scene) if config.method == "pixels" else of_generator(scene)
    found = search_codes(
        drawing.draw, drawing.begin, access, wish_of(scene), config.views, config.search,
        extra=drawing.extra, seed=config.seed, say=stage.say,
    )  # fmt: skip
    stage.save_tensors(
        "guesses.safetensors",
        {"images": found.images, "labels": found.labels, "margins": found.margins},
    )
    convinced = float((found.margins > 0).float().mean())
    stage.finish({"guesses": len(found.labels), "target_convinced": convinced})


class Drawing(NamedTuple):
    """How codes begin, how they become images, and what else is asked of them."""

    draw: "Draw"
    begin: "Callable[[int, torch.Generator], torch.Tensor]"
    extra: "Extra | None" = None


def of_generator(scene: Scene) -> Drawing:
    """Codes of the trained generator."""
    import torch

    from sfumato.attacks.pupils import new_gan
    from sfumato.models.zoo import load_weights

    config = scene.config
    net = new_gan(config.method, open_access(scene), config.gan, config.seed).generator
    load_weights(net, scene.stage("prior").path / "model.safetensors")
    net.eval().requires_grad_(False)

    def draw(codes: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        lower = scene.precision != torch.float32
        with torch.autocast(scene.device.type, scene.precision, enabled=lower):
            return net(codes, labels).float()

    def begin(count: int, generator: "torch.Generator") -> "torch.Tensor":
        return torch.randn(count, config.gan.latent, generator=generator, device=generator.device)

    return Drawing(draw, begin)


def of_pixels(scene: Scene) -> Drawing:
    """Pixels themselves, as in DeepInversion: smooth ones, from a grey start."""
    import torch

    from sfumato.sharing.match import roughness

    def begin(count: int, generator: "torch.Generator") -> "torch.Tensor":
        shape = (count, *scene.members.shape)
        return 0.1 * torch.randn(shape, generator=generator, device=generator.device)

    def extra(_: "torch.Tensor", images: "torch.Tensor") -> "torch.Tensor":
        return roughness(images)

    return Drawing(lambda codes, _: codes.sigmoid(), begin, extra)


def guesses_of(scene: Scene) -> "Guesses":
    """What the stage latent found."""
    from safetensors.torch import load_file

    from sfumato.attacks.latent import Guesses

    kept = load_file(scene.stage("latent").path / "guesses.safetensors")
    return Guesses(kept["images"], kept["labels"], kept["margins"])
