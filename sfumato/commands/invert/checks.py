"""What `sfumato invert` refuses, and why: all of it before anything is trained."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands import train
from sfumato.commands.invert.scene import Scene, open_access
from sfumato.commands.invert.score import accuracy_of, as_judge, given_judge
from sfumato.commands.invert.stages import new_judge
from sfumato.commands.train.promise import plan_for
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.images import Images


def check_scene(scene: Scene) -> None:
    """Refuse what could not be attacked, drawn or judged."""
    from sfumato.training.plain import reading_of

    check_public(scene)
    check_parts(scene)
    check_drawing(scene)
    check_target(scene)
    for name in scene.config.judges:
        model = new_judge(scene, name)
        as_judge(model, reading_of(model, scene.others, scene.device))
    for path in scene.config.judge:
        as_judge(*given_judge(scene, path))


def check_public(scene: Scene) -> None:
    """Public images must fit the target, be enough, and show other classes and images."""
    from sfumato.data.alike import overlap

    config, public = scene.config, scene.public
    if config.n > len(public):
        raise DataError(
            f'"{public.name}" has {len(public)} images, and --n {config.n} are wanted for each '
            "class. Lower --n, or bring more public images."
        )
    shared = set(scene.members.classes) & set(public.classes)
    if shared and not config.shared_classes:
        raise DataError(
            f"public and private images share classes: {', '.join(sorted(shared))}. An attacker "
            "who has images of a class need not invert it. Give other classes (--public "
            "NAME@5-9). If the same names mean other things, as numbers in two files often do, "
            "say --other-classes; if they are the same classes, --shared-classes."
        )
    for own in (scene.members, scene.others, scene.held_out):
        known = len(overlap(own, public))
        if known:
            raise DataError(
                f'{known} images of "{own.name}" are among the public images "{public.name}": an '
                "attacker who has them need not invert them. Leave them out of --public."
            )


def check_parts(scene: Scene) -> None:
    """Target, judges and score each need images of every class."""
    parts: dict[str, Images] = {
        "the target": scene.members, "judges": scene.others, "the score": scene.held_out
    }  # fmt: skip
    for whose, images in parts.items():
        present = set(images.labels.tolist())
        for label, name in enumerate(images.classes):
            if label not in present:
                raise DataError(
                    f'no image of class "{name}" is left for {whose}: target, judges and score '
                    "each need some of their own. Change --judge-share, bring more images, or "
                    "leave the class out (--data NAME@CLASSES)."
                )


def check_drawing(scene: Scene) -> None:
    """A generator draws squares, of some sizes."""
    from sfumato.models.gan import Generator

    if scene.config.method == "pixels":
        return
    _, height, width = scene.members.shape
    if height != width:
        raise DataError(
            f'"{scene.members.name}" has images of {width} x {height} pixels, and a generator '
            "draws squares. Give --image-size N, or --method pixels."
        )
    Generator(None, size=height, width=1, latent=1)  # says which sizes there are


def check_target(scene: Scene) -> None:
    """A target that is there must answer; one that is to be trained must be able to."""
    import torch

    if scene.config.target is not None:
        access = open_access(scene)
        if not Path(scene.config.target).is_dir():
            say_strange(scene, accuracy_of(access, scene.unseen))
        return
    _, reading = train.prepare(scene.target, scene.members, torch.device("cpu"))
    plan_for(scene.target, len(reading))


USUAL_PIXELS = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
"""What black and white are to most networks."""


def say_strange(scene: Scene, accuracy: float) -> None:
    """Warn of a network of the user's own that hardly knows its images: on the screen alone.

    Nobody else can tell that its pixels, its classes or their order are others than was said.
    """
    chance = 1 / len(scene.members.classes)
    known = f"{scene.config.target} names {accuracy:.3f} of {len(scene.unseen)} test images rightly"
    for pixels in USUAL_PIXELS:
        other = replace(scene, config=replace(scene.config, target_pixels=pixels))
        better = accuracy_of(open_access(other), scene.unseen)
        if better > accuracy + 0.1 * (1 - chance):
            black, white = pixels
            scene.run.say(
                f"warning: {known}, and {better:.3f} where black is {black:g} and white {white:g}. "
                f"If it was trained on these, say --target-pixels {black:g} {white:g}."
            )
            return
    if accuracy < (1 + chance) / 2:
        scene.run.say(
            f"mind: {known}, where guessing gives {chance:.3f}. If you know it to be better: are "
            "--data, the order of classes and --target-pixels those that it learnt?"
        )
