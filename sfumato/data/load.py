"""`load_images`: a name or a path, and the images are here, marked private or public for good."""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from sfumato.data.alike import to_grey
from sfumato.data.arrays import load_npz
from sfumato.data.embedded import load_digits, load_patches
from sfumato.data.folder import load_folder
from sfumato.data.images import Images
from sfumato.data.named import SOURCES, load_named
from sfumato.errors import ConfigError, DataError

EMBEDDED = {"digits": load_digits, "patches": load_patches}
NAMES = (*EMBEDDED, *SOURCES)


def load_images(
    source: str | Path,
    split: str = "train",
    private: bool = True,
    *,
    image_size: int | None = None,
    data_root: Path = Path("data"),
    download: bool = False,
    people: str | None = None,
    grey: bool = False,
) -> Images:
    """The train or test split of `source`, resized to `image_size` if given, and grey if asked for.

    `source` is a name (digits and patches, which are embedded; mnist, fashion_mnist,
    emnist-letters, cifar10, cifar100, svhn, celeba, imagenette), a path to an .npz file in the
    Keras layout, or a folder with one folder a class. Images are private unless said otherwise.
    `people` says who is on each image of a folder: "folder" for class/PERSON/image, or
    FILE.csv[:COLUMN]; an .npz has arrays for it. Raises `DataError` for data that cannot be trained
    on: no images, or a single class.
    """
    if split not in ("train", "test"):
        raise ConfigError(f'split="{split}" must be "train" or "test".')
    if image_size is not None and image_size < 1:
        raise ConfigError(f"image_size={image_size} must be at least 1.")
    images = _load(str(source), split, private, image_size, data_root, download, people)
    if image_size is not None:
        images = resize(images, image_size)
    images = to_grey(images) if grey else images
    if len(images) == 0:
        raise DataError(f'"{images.name}" has no images.')
    present = images.labels.unique()
    if split == "train" and len(present) < 2:
        raise DataError(
            f'"{images.name}" has one class only, "{images.classes[int(present[0])]}": there is '
            "nothing to tell apart. Give at least two."
        )
    return images


def load_splits(source: str | Path, private: bool = True, **options: Any) -> tuple[Images, Images]:
    """Train and test images of `source`, of one size and with the same classes.

    Whatever is wrong with either is found here, before any budget is spent.
    """
    train = load_images(source, "train", private, **options)
    test = load_images(source, "test", private, **options)
    if train.shape != test.shape:
        raise DataError(
            f'"{train.name}" has images of {train.shape} (channels, height, width) and '
            f'"{test.name}" of {test.shape}. Give --image-size, or make them alike.'
        )
    unseen = set(test.labels.tolist()) - set(train.labels.tolist())
    if unseen:
        name = train.classes[min(unseen)]
        raise DataError(f'"{test.name}" has images of class "{name}", and train has none.')
    return train, test


def resize(images: Images, image_size: int) -> Images:
    """The same images, square with sides of `image_size` pixels, antialiased."""
    if images.shape[1:] == (image_size, image_size):
        return images
    from torchvision.transforms.v2.functional import center_crop, resize

    # In pieces, so that the float copy stays small beside the images.
    pieces = [
        center_crop(resize(piece, [image_size], antialias=True), [image_size])
        for piece in images.pixels.split(4096)
    ]
    return replace(images, pixels=torch.cat(pieces))


def _load(
    source: str,
    split: str,
    private: bool,
    image_size: int | None,
    data_root: Path,
    download: bool,
    people: str | None,
) -> Images:
    if people is not None and not Path(source).expanduser().is_dir():
        raise ConfigError(
            f'people="{people}" is for folders, and "{source}" is none. An .npz file says who is '
            "on each image by arrays people_train and people_test."
        )
    if source in EMBEDDED:
        return EMBEDDED[source](split, private=private)
    if source.partition(":")[0] in SOURCES:
        return load_named(
            source,
            split,
            private=private,
            data_root=data_root,
            image_size=image_size,
            download=download,
        )
    path = Path(source).expanduser()
    if path.suffix == ".npz":
        return load_npz(path, split, private=private)
    if path.exists():
        return load_folder(path, split, private=private, image_size=image_size, people=people)
    near = get_close_matches(source, NAMES, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise DataError(
        f'"{source}" is neither a file, a folder nor a known name ({", ".join(NAMES)}).{hint}'
    )
