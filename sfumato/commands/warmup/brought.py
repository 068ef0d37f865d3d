"""Images that people bring to `sfumato warmup`: their own public ones, or samples made elsewhere.

Both are taken at their owner's word: nobody can see in an image whether it may be public, or what a
generator of it had learnt. That no private image is among them, pixel for pixel, is looked up.
"""

from typing import TYPE_CHECKING

from sfumato.commands.origin import require_unpaid
from sfumato.commands.warmup.context import Context
from sfumato.errors import DataError
from sfumato.runs import Run
from sfumato.settings.warmup import Warmup

if TYPE_CHECKING:
    from sfumato.data.images import Images

UNKNOWN = "nothing is promised about what these images were made from"


def own_public(config: Warmup, private: "Images", test: "Images") -> "Images":
    """The images of --public-images, or why they cannot stand beside the private ones."""
    from sfumato.data.alike import require_alike
    from sfumato.data.classes import require_same
    from sfumato.data.load import load_images

    assert config.public_images is not None
    require_unpaid(config.public_images, private.name)
    public = load_images(config.public_images, "train", private=False, **config.train.loading)
    require_same(public.classes, public.name, private.classes, private.name)
    missing = set(private.labels.tolist()) - set(public.labels.tolist())
    if missing:
        raise DataError(
            f'"{public.name}" has no image of class "{public.classes[min(missing)]}". Every class '
            "needs public images."
        )
    for images in (private, test):
        require_alike(images, public)
    return public


def read_samples(context: Context) -> "Images":
    """The images of --samples, or why they cannot take the place of drawn ones."""
    from sfumato.data.alike import require_alike
    from sfumato.data.arrays import load_samples

    assert context.config.samples is not None
    require_unpaid(context.config.samples, context.private.name)
    samples = load_samples(context.config.samples, context.private)
    for images in (context.private, context.test):
        require_alike(images, samples)
    return samples


def sample(context: Context, stage: Run | None) -> None:
    """Keep them where drawn images are kept."""
    if stage is None:
        return
    samples = read_samples(context)
    samples.save_npz(stage.path / "images.npz")
    told = {"samples": str(context.config.samples), "promise": UNKNOWN}
    stage.finish({"drawn": len(samples), **told})


def declared(context: Context) -> str:
    """The images that were declared public, for the ledger."""
    config, public = context.config, context.public
    how = "brought" if config.public_images is not None else f"chosen by seed {config.seed}"
    made = "" if config.samples is None else f", and of {config.samples.name} (made elsewhere)"
    return f"{public.name} ({len(public)}, {how}){made}"
