"""The torchvision data sets by name, from files under a data root.

`NAME.npz` in the root is used when it is there. Otherwise torchvision reads its own files from the
root, and fetches them only when asked to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8

from sfumato.data.arrays import load_npz_splits
from sfumato.data.decode import decode
from sfumato.data.framing import Framing
from sfumato.data.images import Images
from sfumato.errors import DataError

Contents = tuple[np.ndarray | list[Path], np.ndarray, tuple[str, ...]]
"""Pixels n h w [c] or the files that hold them, labels, class names."""


TEN = tuple("0123456789")
CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
FASHION = "T-shirt trouser pullover dress coat sandal shirt sneaker bag boot"
CLASS_NAMES = {"cifar10": tuple(CIFAR10.split()), "fashion_mnist": tuple(FASHION.split())}
"""What the numbers mean in files that do not say."""


@dataclass(frozen=True)
class Source:
    """How torchvision builds a set, and what is in it."""

    build: Callable[..., Any]
    """(root, split, download) -> torchvision data set"""
    read: Callable[[Any], Contents]
    """data set -> its contents"""


def load_named(
    name: str,
    splits: Sequence[str],
    *,
    private: bool,
    data_root: Path,
    framing: Framing,
    download: bool = False,
) -> list[Images]:
    """Splits of the set called `name`.

    `celeba:Smiling` picks the label; `celeba:Black_Hair+Blond_Hair` has a class for each, of the
    images with just one of these.
    """
    base, _, variant = name.partition(":")
    prepared = data_root / prepared_name(name)
    if prepared.exists():
        parts = load_npz_splits(prepared, splits, private=private, name=name, framing=framing)
        classes = parts[0].classes
        known = CLASS_NAMES.get(name, classes) if classes == TEN else classes
        return [replace(images, classes=known) for images in parts]
    if variant and base != "celeba":
        raise DataError(f'"{base}" has no variants: "{variant}" is not known.')
    source = SOURCES[base](variant)
    return [
        _read_split(name, source, split, private, data_root, framing, download) for split in splits
    ]


def _read_split(
    name: str,
    source: Source,
    split: str,
    private: bool,
    data_root: Path,
    framing: Framing,
    download: bool,
) -> Images:
    """One split, from torchvision's own files."""
    try:
        dataset = source.build(str(data_root), split, download)
    except (ValueError, EOFError) as problem:
        raise DataError(f'the files of "{name}" in {data_root} are damaged: {problem}') from problem
    except (RuntimeError, OSError) as problem:
        if download:
            reason = " ".join(str(problem).split()) or type(problem).__name__
            raise DataError(
                f'"{name}" could not be fetched ({reason}). Try again, or bring its files from '
                f"elsewhere and put them under {data_root}."
            ) from problem
        raise DataError(
            f'"{name}" is not under {data_root}, neither as {prepared_name(name)} nor in '
            "torchvision's own layout. Put it there, name the right --data-root, or fetch it with "
            "--download."
        ) from problem
    found, labels, classes = source.read(dataset)
    in_files = isinstance(found, list)
    images = Images(
        pixels=decode(found, framing, name) if in_files else _channels_first(found),
        labels=torch.from_numpy(np.asarray(labels, dtype=np.int64)),
        classes=classes,
        name=f"{name}-{split}",
        private=private,
        people=_identities(dataset),
    )
    return images if in_files else framing.images(images)


def prepared_name(name: str) -> str:
    """The file that is used before torchvision's own, if it is in the data root."""
    return f"{name.replace(':', '-')}.npz"


def _channels_first(pixels: np.ndarray) -> UInt8[torch.Tensor, "n c h w"]:
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def _identities(dataset: Any) -> torch.Tensor | None:
    """Who is on each image, where the set says so, as CelebA does."""
    if not hasattr(dataset, "identity"):
        return None
    return torch.as_tensor(dataset.identity).flatten().unique(return_inverse=True)[1]


def _constructor(kind: str) -> Callable[..., Any]:
    # Here: torchvision takes as long as torch, and sets of one's own do without.
    from torchvision import datasets

    return getattr(datasets, kind)


def _torchvision(kind: str, **options: Any) -> Callable[..., Any]:
    """Sets whose constructor takes train=True or False."""

    def build(root: str, split: str, download: bool) -> Any:
        return _constructor(kind)(root, train=split == "train", download=download, **options)

    return build


def _read_plain(dataset: Any) -> Contents:
    return np.asarray(dataset.data), np.asarray(dataset.targets), tuple(dataset.classes)


def _read_letters(dataset: Any) -> Contents:
    # EMNIST stores its pictures transposed, and counts letters from 1.
    pixels = np.asarray(dataset.data).transpose(0, 2, 1)
    letters = tuple(chr(ord("a") + i) for i in range(26))
    return pixels, np.asarray(dataset.targets) - 1, letters


def _build_svhn(root: str, split: str, download: bool) -> Any:
    return _constructor("SVHN")(root, split=split, download=download)


def _read_svhn(dataset: Any) -> Contents:
    classes = tuple(str(digit) for digit in range(10))
    return np.asarray(dataset.data).transpose(0, 2, 3, 1), np.asarray(dataset.labels), classes


def _build_celeba(root: str, split: str, download: bool) -> Any:
    return _constructor("CelebA")(
        root, split=split, target_type=["attr", "identity"], download=download
    )


def _celeba(variant: str) -> Source:
    label = variant or "Male"

    def read(dataset: Any) -> Contents:
        attributes = [name for name in dataset.attr_names if name]
        folder = Path(dataset.root) / dataset.base_folder / "img_align_celeba"
        if label == "identity":
            people, labels = np.unique(dataset.identity.numpy().ravel(), return_inverse=True)
            classes = tuple(str(person) for person in people)
        elif label in attributes:
            labels = dataset.attr.numpy()[:, attributes.index(label)]
            classes = (f"not {label}", label)
        elif set(label.split("+")) <= set(attributes):
            labels, classes = _exclusive(dataset, label.split("+"), attributes), label.split("+")
        else:
            known = ", ".join(["identity", *attributes])
            raise DataError(
                f'celeba has no label "{label}". There are: {known}; and several with + between '
                "them, for images that have just one of these."
            )
        return [folder / name for name in dataset.filename], labels, tuple(classes)

    return Source(_build_celeba, read)


def _exclusive(dataset: Any, names: list[str], attributes: list[str]) -> np.ndarray:
    """Labels of the images with just one of these attributes; the others leave the data set."""
    table = dataset.attr.numpy()[:, [attributes.index(name) for name in names]]
    kept = np.flatnonzero(table.sum(axis=1) == 1)
    dataset.filename = [dataset.filename[place] for place in kept]
    dataset.identity = dataset.identity[kept]
    return table[kept].argmax(axis=1)


def _build_imagenette(root: str, split: str, download: bool) -> Any:
    where = {"train": "train", "test": "val"}
    return _constructor("Imagenette")(root, split=where[split], size="160px", download=download)


def _read_imagenette(dataset: Any) -> Contents:
    paths, labels = zip(*dataset._samples, strict=True)
    names = tuple(words[0] for words in dataset.classes)
    return [Path(path) for path in paths], np.asarray(labels), names


SOURCES: dict[str, Callable[[str], Source]] = {
    "mnist": lambda _: Source(_torchvision("MNIST"), _read_plain),
    "fashion_mnist": lambda _: Source(_torchvision("FashionMNIST"), _read_plain),
    "emnist-letters": lambda _: Source(_torchvision("EMNIST", split="letters"), _read_letters),
    "cifar10": lambda _: Source(_torchvision("CIFAR10"), _read_plain),
    "cifar100": lambda _: Source(_torchvision("CIFAR100"), _read_plain),
    "svhn": lambda _: Source(_build_svhn, _read_svhn),
    "celeba": _celeba,
    "imagenette": lambda _: Source(_build_imagenette, _read_imagenette),
}
