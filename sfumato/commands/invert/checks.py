"""What `sfumato invert` refuses, and why: all of it before anything is trained."""

from dataclasses import replace
from pathlib import Path

import torch

from sfumato.commands.invert.context import Context, open_access
from sfumato.commands.invert.score import accuracy_of, as_judge, read_given_judge
from sfumato.commands.invert.stages import new_judge
from sfumato.commands.train import command as train
from sfumato.commands.train.privacy_setup import plan_for
from sfumato.commands.train.train_state import count_units
from sfumato.data.images import Images
from sfumato.data.overlap import overlap
from sfumato.errors import DataError
from sfumato.models.gan import Generator
from sfumato.training.plain import inputs_of


def check_context(context: Context) -> None:
    """Refuse what could not be attacked, drawn or judged."""
    check_public(context)
    check_class_counts(context)
    check_drawing(context)
    check_target(context)
    for name in context.config.judges:
        model = new_judge(context, name)
        as_judge(model, inputs_of(model, context.others, context.device))
    for path in context.config.judge:
        as_judge(*read_given_judge(context, path))


def check_public(context: Context) -> None:
    """Public images must fit the target, be enough, and show other classes and images."""
    config, public = context.config, context.public
    if config.n > len(public):
        raise DataError(
            f'"{public.name}" has {len(public)} images, and --n {config.n} are wanted for each '
            "class. Lower --n, or bring more public images."
        )
    shared = set(context.members.classes) & set(public.classes)
    if shared and not config.shared_classes:
        raise DataError(
            f"public and private images share classes: {', '.join(sorted(shared))}. An attacker "
            "who has images of a class need not invert it. Give other classes (--public "
            "NAME@5-9). If the same names mean other things, as numbers in two files often do, "
            "say --other-classes; if they are the same classes, --shared-classes."
        )
    for own in (context.members, context.others, context.held_out):
        known = len(overlap(own, public))
        if known:
            raise DataError(
                f'{known} images of "{own.name}" are among the public images "{public.name}": an '
                "attacker who has them need not invert them. Leave them out of --public."
            )


def check_class_counts(context: Context) -> None:
    """Target, judges and score each need images of every class."""
    parts: dict[str, Images] = {
        "the target": context.members,
        "judges": context.others,
        "the score": context.held_out,
    }
    for whose, images in parts.items():
        present = set(images.labels.tolist())
        for label, name in enumerate(images.classes):
            if label not in present:
                raise DataError(
                    f'no image of class "{name}" is left for {whose}: target, judges and score '
                    "each need some of their own. Change --judge-share, bring more images, or "
                    "leave the class out (--data NAME@CLASSES)."
                )


def check_drawing(context: Context) -> None:
    """A generator draws squares, of some sizes."""
    if context.config.method == "pixels":
        return
    _, height, width = context.members.shape
    if height != width:
        raise DataError(
            f'"{context.members.name}" has images of {width} x {height} pixels, and a generator '
            "draws squares. Give --image-size N, or --method pixels."
        )
    Generator(None, size=height, width=1, latent=1)  # says which sizes there are


def check_target(context: Context) -> None:
    """A target that is there must answer; one that is to be trained must be able to."""
    if context.config.target is not None:
        access = open_access(context)
        if not Path(context.config.target).is_dir():
            warn_low_accuracy(context, accuracy_of(access, context.unseen))
        return
    plan_for(context.target, count_units(context.target, context.members))
    train.prepare_classifier(context.target, context.members, torch.device("cpu"))


USUAL_PIXELS = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
"""What black and white are to most networks."""


def warn_low_accuracy(context: Context, accuracy: float) -> None:
    """Warn of a network of the user's own that hardly knows its images: on the screen alone.

    Nobody else can tell that its pixels, its classes or their order are others than was said.
    """
    chance = 1 / len(context.members.classes)
    known = (
        f"{context.config.target} names {accuracy:.3f} of {len(context.unseen)} test images rightly"
    )
    for pixels in USUAL_PIXELS:
        other = replace(context, config=replace(context.config, target_pixels=pixels))
        better = accuracy_of(open_access(other), context.unseen)
        if better > accuracy + 0.1 * (1 - chance):
            black, white = pixels
            context.run.say(
                f"warning: {known}, and {better:.3f} where black is {black:g} and white {white:g}. "
                f"If it was trained on these, say --target-pixels {black:g} {white:g}."
            )
            return
    if accuracy < (1 + chance) / 2:
        context.run.say(
            f"mind: {known}, where guessing gives {chance:.3f}. If you know it to be better: are "
            "--data, the order of classes and --target-pixels those that it was trained on?"
        )
