"""Who has what in `sfumato warmup`: the public share, the private rest, and the test images."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sfumato.commands.train.train_state import group_by_person
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.runs import Run
from sfumato.settings.warmup import Warmup
from sfumato.training.process_group import ProcessGroup

if TYPE_CHECKING:
    import torch

    from sfumato.data.images import Images


@dataclass(frozen=True)
class Context:
    """Three sets of images."""

    config: Warmup
    directory: Run | None
    """The run; of several processes the leader alone has it."""
    device: "torch.device"
    public: "Images"
    """Declared public: what everything before the private stage learns from; empty if it is
    the generator that is private."""
    private: "Images"
    """The rest: what the ledger speaks of."""
    test: "Images"
    processes: ProcessGroup = field(default_factory=ProcessGroup)

    @property
    def run(self) -> Run:
        """The run, for what the leader does alone."""
        assert self.directory is not None, "another process has the run directory"
        return self.directory

    @property
    def units(self) -> int:
        """Private examples, or people: what the ledger treats as public is their number alone."""
        people = group_by_person(self.config.train, self.private)
        return len(self.private) if people is None else len(people)

    @property
    def precision(self) -> "torch.dtype":
        """What public images are learnt in."""
        from sfumato.training.setup import quick_precision

        return quick_precision(self.device)


def make_context(config: Warmup, run: Run | None, processes: ProcessGroup | None = None) -> Context:
    """Load images, declare a share of them public, and refuse at once what cannot work."""
    from sfumato.commands.origin import note_start, require_covered, require_strange, tell_origin
    from sfumato.data.load import load_splits
    from sfumato.training.setup import pick_device

    require_covered(config.train)
    images, test = load_splits(config.data, people=config.people, **config.train.loading)
    require_strange(config.train, images)
    if run is not None:
        tell_origin(config.train, images, run.log)
        note_start(config.weights, run)
    public, private = shares(config, images, test)
    if run is not None:
        require_same_split(run, public)
    device, processes = pick_device(config.device), processes or ProcessGroup()
    return Context(config, run, device, public, private, test, processes)


def shares(config: Warmup, images: "Images", test: "Images") -> "tuple[Images, Images]":
    """What is public, and what is private: of the images a share and the rest, or all."""
    from sfumato.commands.warmup.brought import own_public

    if config.private:
        return replace(images.select([]), name="no image", private=False), images
    if config.public_images is not None:
        return own_public(config, images, test), images
    assert config.public_share is not None, "the settings are checked"
    return images.public_share(config.public_share, config.seed)


def require_same_split(run: Run, public: "Images") -> None:
    """Refuse data that have changed since the split: who was public then might be private now.

    What the generator has learnt without noise, no ledger can cover afterwards.
    """
    from sfumato.data.load import load_images

    kept = run.path / "stages" / "split" / "public.npz"
    if not kept.exists():
        return
    before = load_images(str(kept), "train", private=False)
    pairs = ((before.pixels, public.pixels), (before.labels, public.labels))
    if not all(one.shape == other.shape and one.equal(other) for one, other in pairs):
        raise PrivacyError(
            f"the public images are others than when the stage split ran ({kept}): the data of "
            f'"{public.name}" have changed, and images that were learnt as public might count as '
            "private now. Bring the data back, or begin anew with another --out."
        )


def check_plan(context: Context) -> None:
    """Refuse a promise that cannot be kept."""
    from sfumato.commands.train.promise import plan_for

    plan_for(context.config.training, context.units)


def check_number(context: Context) -> None:
    """Refuse to draw too few images."""
    require_all_classes(context.config.number, context.private.classes)


def require_all_classes(number: int, classes: Sequence[str]) -> None:
    """Refuse to draw less than an image of each class."""
    if number < len(classes):
        raise ConfigError(
            f"--number {number} is less than an image of each of {len(classes)} classes."
        )


def check_parts(context: Context) -> None:
    """Refuse a public share of which nothing can be held out, or nothing is left."""
    from sfumato.commands.warmup.generator import parts_of

    held_out, own = parts_of(context)
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
    from sfumato.commands.warmup.generator import make_denoiser

    make_denoiser(context)


def build_classifier(context: Context) -> None:
    """The same for the classifier."""
    import torch

    from sfumato.commands import train

    train.prepare(context.config.training, context.private.select([0]), torch.device("cpu"))
