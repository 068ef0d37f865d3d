"""`Images`: pixels, labels and, above all, whether they are private.

Privacy is marked once, at loading, and travels with every selection and split. A step that adds
no noise calls `require_public` on what it reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sfumato.data.classes import find_classes, list_some, require_distinct, require_same_classes
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.files import atomic


@dataclass(frozen=True, kw_only=True)
class Images:
    """A labelled set of images of one size. `labels[i]` is the place of its class in `classes`."""

    pixels: UInt8[Tensor, "n c h w"] = field(repr=False)
    labels: Int[Tensor, " labels"] = field(repr=False)
    classes: tuple[str, ...]
    name: str
    private: bool
    people: Int[Tensor, " people"] | None = field(default=None, repr=False)
    """The number of the person on each image, where that is known; gaps are closed."""
    drawn_part: bool = False
    """Whether `split` made this part: one image more may have moved others out of it."""

    def __post_init__(self) -> None:
        self._check_types()
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            raise DataError(f'"{self.name}": pixels must be uint8 of shape n c h w.')
        if len(self.pixels) != len(self.labels):
            raise DataError(
                f'"{self.name}" has {len(self.pixels)} images and {len(self.labels)} labels: each '
                "image needs one."
            )
        if self.people is not None and len(self.people) != len(self.labels):
            raise DataError(
                f'"{self.name}" has {len(self.labels)} images and names people for '
                f"{len(self.people)}: each image needs one."
            )
        if len(set(self.classes)) < len(self.classes):
            raise DataError(
                f'"{self.name}" has two classes of one name: {list_some(self.classes)}.'
            )
        if self.people is not None:  # from 0 and without gaps, whatever they were called
            numbers = self.people.unique(return_inverse=True)[1]
            object.__setattr__(self, "people", numbers)
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(
            self.classes
        ):
            raise DataError(f'"{self.name}" has labels outside its {len(self.classes)} classes.')

    def _check_types(self) -> None:
        for name in ("pixels", "labels", "people"):
            value = getattr(self, name)
            if name == "people" and value is None:
                continue
            if not isinstance(value, Tensor):
                raise DataError(
                    f'"{self.name}": {name} must be a tensor, and are a {type(value).__name__}.'
                )
            no_whole = value.is_floating_point() or value.is_complex() or value.ndim != 1
            if name != "pixels" and no_whole:
                raise DataError(f'"{self.name}": {name} must be one whole number per image.')
        names = self.classes
        if not isinstance(names, tuple | list) or not all(isinstance(one, str) for one in names):
            raise DataError(f'"{self.name}": classes must be a tuple of names.')

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def require_public(self, purpose: str) -> "Images":
        """These images, or a `PrivacyError` if they are private: `purpose` adds no noise."""
        if self.private:
            raise PrivacyError(
                f'{purpose} would read "{self.name}", which is private, and adds no noise. Give it '
                "public images, or split some off with a public share."
            )
        return self

    def to(self, device: torch.device) -> "Images":
        """The same images, on a GPU if that has ten times the room."""
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            device = device if 10 * self.pixels.nbytes < free else torch.device("cpu")
        return replace(self, pixels=self.pixels.to(device))

    def select(self, indices: Int[Tensor, " k"] | Sequence[int]) -> "Images":
        """The images at these places, in this order."""
        where = torch.as_tensor(indices, dtype=torch.int64)
        people = None if self.people is None else self.people[where]
        return replace(self, pixels=self.pixels[where], labels=self.labels[where], people=people)

    def joined(self, other: "Images", name: str = "") -> "Images":
        """These images and then others of the same classes; private if either are.

        Who is on them is not known any more: sets number their people each on its own.
        """
        require_same_classes(self.classes, self.name, other.classes, other.name)
        return replace(
            self,
            pixels=torch.cat([self.pixels, other.pixels]),
            labels=torch.cat([self.labels, other.labels]),
            name=name or self.name,
            private=self.private or other.private,
            people=None,
            drawn_part=self.drawn_part or other.drawn_part,
        )

    def only(self, classes: str | Sequence[int]) -> "Images":
        """The images of these classes alone, which are renumbered, from 0, as they are listed.

        `classes` is a list as after the @ of a source ("cat,deer", "0-4,7"; see `find_classes`), or
        places in `classes`. Images stay in their order; names, people and privacy go with them.
        """
        if isinstance(classes, str):
            listed, places = classes, find_classes(classes, self.classes, self.name)
        else:
            places = require_distinct(classes, self.classes, self.name)
            listed = ",".join(map(str, places))
        renumbered = torch.full((len(self.classes),), -1)
        renumbered[places] = torch.arange(len(places))
        labels = renumbered[self.labels]
        kept = self.select(torch.nonzero(labels >= 0).flatten())
        stem, dash, split = self.name.rpartition("-")
        known = dash and split in ("train", "test")
        return replace(
            kept,
            labels=labels[labels >= 0],
            classes=tuple(self.classes[place] for place in places),
            name=f"{stem}@{listed}-{split}" if known else f"{self.name}@{listed}",
        )

    def split(
        self, share: float, seed: int = 0, *, by_person: bool = True
    ) -> tuple["Images", "Images"]:
        """Two parts: `share` of every class, drawn by `seed`, and the rest.

        The same seed gives the same parts of the same images for ever; one image more or less may
        move others between the parts, so a guarantee is about a part, not the whole (`drawn_part`).
        Each class gives its share rounded to whole images, so that the total is right too. Where
        people are known, all images of a person go to the same part, and the share is one of
        people, unless `by_person` is False.
        """
        if not 0 < share < 1:
            raise ConfigError(f"share={share:g} must lie between 0 and 1.")
        if self.people is None or not by_person:
            first = _stratified(self.labels.numpy(), len(self.classes), share, seed)
        else:
            people, one = np.unique(self.people.numpy(), return_index=True)
            chosen = _stratified(self.labels.numpy()[one], len(self.classes), share, seed)
            first = np.flatnonzero(np.isin(self.people.numpy(), people[chosen]))
        rest = np.setdiff1d(np.arange(len(self)), first)
        drawn = replace(self, drawn_part=True)
        return drawn.select(first.tolist()), drawn.select(rest.tolist())

    def public_share(self, share: float, seed: int = 0) -> tuple["Images", "Images"]:
        """Declare `share` of every class public. Returns the public part and the private rest.

        This is a decision about people, not a computation: the caller guarantees that these
        images may be seen. The ledger of what follows speaks of the private rest alone. Raises
        `DataError` if a class has no image in one of them.
        """
        public, rest = self.split(share, seed)
        for part, kind, remedy in ((public, "public", "Raise"), (rest, "private", "Lower")):
            missing = set(range(len(self.classes))) - set(part.labels.tolist())
            if missing:
                raise DataError(
                    f'a public share of {share:g} of "{self.name}" leaves class '
                    f'"{self.classes[min(missing)]}" with no {kind} image at all. {remedy} the '
                    "share."
                )
        percent = f"{100 * share:g}%"
        public = replace(public, name=f"{self.name}-public-{percent}", private=False)
        return public, replace(rest, name=f"{self.name}-without-{percent}")

    def class_means(self) -> Float[Tensor, "classes c h w"]:
        """The mean image of each class, between 0 and 1. Of private images it is private too."""
        pixels = self.pixels.float() / 255
        classes = range(len(self.classes))
        return torch.stack([pixels[self.labels == label].mean(dim=0) for label in classes])

    def save_npz(self, path: Path | str, test: "Images | None" = None) -> Path:
        """Write the Keras layout that `load_images` reads back."""
        path = Path(path)
        held_out = self.select([]) if test is None else test
        arrays = {
            "x_train": keras_layout(self.pixels),
            "y_train": self.labels.numpy(),
            "x_test": keras_layout(held_out.pixels),
            "y_test": held_out.labels.numpy(),
            "classes": np.array(self.classes, dtype=np.str_),
        }
        if self.people is not None:
            arrays["people_train"] = self.people.numpy()
        if held_out.people is not None:
            arrays["people_test"] = held_out.people.numpy()
        with atomic(path) as file:
            np.savez_compressed(file, **arrays)
        return path


def keras_layout(pixels: UInt8[Tensor, "n c h w"]) -> np.ndarray:
    """Channels last, and none for grey images."""
    array = pixels.cpu().permute(0, 2, 3, 1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array


def _stratified(labels: np.ndarray, num_classes: int, share: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in range(num_classes)]
    exact = np.array([share * len(places) for places in members])
    counts = np.floor(exact).astype(int)
    # Largest remainders first, so that the parts add up to the share of the whole.
    for label in np.argsort(counts - exact, kind="stable")[: round(exact.sum()) - counts.sum()]:
        counts[label] += 1
    drawn = [
        generator.permutation(places)[:count] for places, count in zip(members, counts, strict=True)
    ]
    return np.sort(np.concatenate(drawn))
