"""What `sfumato warmup` refuses early: hours later it would be too late to say so."""

import torch

from sfumato.commands import train
from sfumato.commands.train.privacy_setup import plan_for
from sfumato.commands.warmup.context import Context
from sfumato.commands.warmup.draw import require_all_classes
from sfumato.commands.warmup.generator import make_denoiser, split_public
from sfumato.errors import DataError


def check_plan(context: Context) -> None:
    """Refuse a guarantee that cannot be kept."""
    plan_for(context.config.training, context.units)


def check_number(context: Context) -> None:
    """Refuse to draw too few images."""
    require_all_classes(context.config.number, context.private.classes)


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


def build_generator(context: Context) -> None:
    """Make its network once: what cannot be built is refused."""
    make_denoiser(context)


def build_classifier(context: Context) -> None:
    """The same for the classifier."""
    train.prepare_classifier(
        context.config.training, context.private.select([0]), torch.device("cpu")
    )
