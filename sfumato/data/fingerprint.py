"""Data that are known again: how many images, which classes, and a digest of all of them.

Steps of a run are paid for the images that it began with, and its coins fall by their places. So it
goes on with these alone, and is audited with these. A digest lets a guess at an image be checked:
it stays in `private/`.
"""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from sfumato.config import from_json
from sfumato.data.classes import list_some
from sfumato.data.images import Images
from sfumato.errors import DataError
from sfumato.files import read_json
from sfumato.resume_check import DATA
from sfumato.runs import Run


@dataclass(frozen=True, kw_only=True)
class DataFingerprint:
    """What is kept of a set of images."""

    images: int
    classes: tuple[str, ...]
    digest: str
    """Of pixels, labels and people, in their order."""

    @classmethod
    def of(cls, images: Images) -> "DataFingerprint":
        """That of these images."""
        made = blake2b(repr(tuple(images.pixels.shape)).encode(), digest_size=16)
        parts = (images.pixels, images.labels, images.people)
        for part in parts if images.people is not None else parts[:2]:
            assert part is not None
            made.update(part.cpu().contiguous().numpy().data.cast("B"))
        return cls(images=len(images), classes=images.classes, digest=made.hexdigest())

    def require(self, images: Images, who: str, remedy: str) -> None:
        """Refuse other images than these; `who` was trained on them."""
        found = DataFingerprint.of(images)
        if found == self:
            return
        what = "images, labels or people are others, or in another order"
        if found.classes != self.classes:
            what = f"its classes were {list_some(self.classes)}, and are {list_some(found.classes)}"
        elif found.images != self.images:
            what = f"it had {self.images} images, and has {found.images}"
        raise DataError(
            f'{who} was trained on other data: "{images.name}" has changed since ({what}). {remedy}'
        )


def known_data(run: Path) -> DataFingerprint | None:
    """The data that a run or stage was trained on; None where nobody wrote that down."""
    file = run / "private" / DATA
    return from_json(DataFingerprint, read_json(file)) if file.exists() else None


def require_same_data(images: Images, run: Run | None) -> None:
    """Refuse to go on with other images than a run began with; of a new one, write them down."""
    if run is None:
        return
    known = known_data(run.path) if run.has_begun else None
    if known is not None:
        remedy = "What it paid was for those. Bring them back, or start again with another --out."
        known.require(images, str(run.path), remedy)
    elif not run.has_begun:
        run.write_json(f"private/{DATA}", DataFingerprint.of(images))
