"""Images that people bring to `sfumato warmup`: their own public ones, or samples made elsewhere.

Both are taken at their owner's word: nobody can see in an image whether it may be public, or what a
generator of it was trained on. That no private image is among them, pixel for pixel, is looked up.
"""

from sfumato.commands.origin import require_no_ledger
from sfumato.commands.warmup.context import Context
from sfumato.data.arrays import load_samples
from sfumato.data.images import Images
from sfumato.data.overlap import require_alike
from sfumato.runs import Run

UNKNOWN = "nothing is guaranteed about what these images were made from"


def read_samples(context: Context) -> Images:
    """The images of --samples, or why they cannot take the place of drawn ones."""
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


def declared(context: Context) -> str:
    """The images that were declared public, for the ledger."""
    config, public = context.config, context.public
    how = "brought" if config.public_images is not None else f"chosen by seed {config.seed}"
    made = "" if config.samples is None else f", and of {config.samples.name} (made elsewhere)"
    return f"{public.name} ({len(public)}, {how}){made}"
