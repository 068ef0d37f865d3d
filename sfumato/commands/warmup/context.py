"""Who has what in `sfumato warmup`: the public share, the private rest, and the test images."""

from dataclasses import dataclass, field, replace

import torch

from sfumato.commands.origin import (
    log_origin,
    note_start,
    require_covered,
    require_no_ledger,
    require_other_data,
)
from sfumato.commands.train.train_state import group_by_person
from sfumato.data.classes import require_same_classes
from sfumato.data.images import Images
from sfumato.data.load import load_images, load_splits
from sfumato.data.overlap import require_alike
from sfumato.errors import DataError, PrivacyError
from sfumato.runs import Run
from sfumato.settings.warmup import Warmup
from sfumato.training.process_group import ProcessGroup
from sfumato.training.setup import pick_device, quick_precision


@dataclass(frozen=True)
class Context:
    """Three sets of images."""

    config: Warmup
    directory: Run | None
    """The run; of several processes the leader alone has it."""
    device: torch.device
    public: Images
    """Declared public: what everything before the private stage learns from; empty if it is
    the generator that is private."""
    private: Images
    """The rest: what the ledger speaks of."""
    test: Images
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
    def precision(self) -> torch.dtype:
        """What public images are trained on in."""
        return quick_precision(self.device)


def make_context(config: Warmup, run: Run | None, processes: ProcessGroup | None = None) -> Context:
    """Load images, declare a share of them public, and refuse at once what cannot work."""
    require_covered(config.train)
    images, test = load_splits(config.data, people=config.people, **config.train.source.loading)
    require_other_data(config.train, images)
    if run is not None:
        log_origin(config.train, images, run.log)
        note_start(config.weights, run)
    public, private = split_images(config, images, test)
    if run is not None:
        require_same_split(run, public)
    device, processes = pick_device(config.device), processes or ProcessGroup()
    return Context(config, run, device, public, private, test, processes)


def split_images(config: Warmup, images: Images, test: Images) -> tuple[Images, Images]:
    """What is public, and what is private: of the images a share and the rest, or all."""
    if config.private:
        return replace(images.select([]), name="no image", private=False), images
    if config.public_images is not None:
        return own_public(config, images, test), images
    assert config.public_share is not None, "the settings are checked"
    return images.public_share(config.public_share, config.seed)


def own_public(config: Warmup, private: Images, test: Images) -> Images:
    """The images of --public-images, or why they cannot stand beside the private ones."""
    assert config.public_images is not None
    require_no_ledger(config.public_images, private.name)
    public = load_images(
        config.public_images, "train", private=False, **config.train.source.loading
    )
    require_same_classes(public.classes, public.name, private.classes, private.name)
    missing = set(private.labels.tolist()) - set(public.labels.tolist())
    if missing:
        raise DataError(
            f'"{public.name}" has no image of class "{public.classes[min(missing)]}". Every class '
            "needs public images."
        )
    for images in (private, test):
        require_alike(images, public)
    return public


def require_same_split(run: Run, public: Images) -> None:
    """Refuse data that have changed since the split: who was public then might be private now.

    What the generator was trained on without noise, no ledger can cover afterwards.
    """
    kept = run.path / "stages" / "split" / "public.npz"
    if not kept.exists():
        return
    before = load_images(str(kept), "train", private=False)
    pairs = ((before.pixels, public.pixels), (before.labels, public.labels))
    if not all(one.shape == other.shape and one.equal(other) for one, other in pairs):
        raise PrivacyError(
            f"the public images are others than when the stage split ran ({kept}): the data of "
            f'"{public.name}" have changed, and images that were used as public might count as '
            "private now. Bring the data back, or start again with another --out."
        )
