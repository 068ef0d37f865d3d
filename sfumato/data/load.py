"""`load_images`: a name or a path, and the images are here, marked private or public for good."""

from collections.abc import Sequence
from difflib import get_close_matches
from os.path import exists, expanduser, isdir
from pathlib import Path

from sfumato.data.arrays import PARTS, load_npz_splits
from sfumato.data.classes import require_same_classes
from sfumato.data.embedded import load_digits, load_patches
from sfumato.data.folder import load_folder
from sfumato.data.framing import Framing
from sfumato.data.images import Images
from sfumato.data.overlap import to_grey
from sfumato.data.torchvision_sets import SOURCES, load_named
from sfumato.errors import ConfigError, DataError

EMBEDDED = {"digits": load_digits, "patches": load_patches}


def load_images(
    source: str | Path,
    split: str = "train",
    private: bool = True,
    *,
    image_size: int | None = None,
    centre_crop: int | None = None,
    data_root: str | Path = "data",
    download: bool = False,
    people: str | Path | None = None,
    grey: bool = False,
) -> Images:
    """The train or test split of `source`, framed as asked for, and grey if asked for.

    `source` is a name (digits and patches, which are embedded; mnist, fashion_mnist,
    emnist-letters, cifar10, cifar100, svhn, celeba, imagenette), a path to an .npz file in the
    Keras layout, or a folder with one folder per class. SOURCE@CLASSES keeps the classes listed
    (mnist@0-4, cifar10@cat,deer), numbered from 0 in that order; a path that is there with an @ in
    its name is that path. Images are private unless said otherwise.

    The middle `centre_crop` pixels are cut out, then resized to `image_size`. `people` says who is
    on each image of a folder: "folder" for class/PERSON/image, or FILE.csv[:COLUMN]; an .npz has
    arrays for it. Raises `DataError` for data that cannot be trained on: no images, or a single
    class.
    """
    if split not in PARTS:
        raise ConfigError(f'split="{split}" must be "train" or "test".')
    framing = Framing(centre_crop=centre_crop, image_size=image_size)
    (images,) = _load(source, (split,), private, framing, data_root, download, people, grey)
    return images


def load_splits(
    source: str | Path,
    private: bool = True,
    *,
    image_size: int | None = None,
    centre_crop: int | None = None,
    data_root: str | Path = "data",
    download: bool = False,
    people: str | Path | None = None,
    grey: bool = False,
) -> tuple[Images, Images]:
    """Train and test images of `source`, of one size and with the same classes, each read once.

    Whatever is wrong with either is found here, before any budget is spent.
    """
    framing = Framing(centre_crop=centre_crop, image_size=image_size)
    train, test = _load(source, PARTS, private, framing, data_root, download, people, grey)
    if train.shape != test.shape:
        sizes, colours = train.shape[1:] != test.shape[1:], train.shape[0] != test.shape[0]
        remedies = [*["--image-size"] * sizes, *["--grey"] * colours]
        raise DataError(
            f'"{train.name}" has images of {train.shape} (channels, height, width) and '
            f'"{test.name}" of {test.shape}. Give {" and ".join(remedies)}, or make them alike.'
        )
    require_same_classes(train.classes, train.name, test.classes, test.name)
    unseen = set(test.labels.tolist()) - set(train.labels.tolist())
    if unseen:
        name = train.classes[min(unseen)]
        raise DataError(f'"{test.name}" has images of class "{name}", and train has none.')
    return train, test


def part_source(source: str) -> tuple[str, str | None]:
    """The name or path in SOURCE@CLASSES, and its list of classes; None where there is no list.

    Of all the @ there may be, in paths as in class names, the last counts whose left side is known
    or exists. If there is none, the source is taken as it stands.
    """
    ends = [len(source), *(i for i in range(len(source) - 1, 0, -1) if source[i] == "@")]
    for end in ends:
        if _is_name(source[:end]) or exists(expanduser(source[:end])):
            return source[:end], None if end == len(source) else source[end + 1 :]
    return source, None


def _is_name(source: str) -> bool:
    return source in EMBEDDED or (source.partition(":")[0] in SOURCES and "@" not in source)


def _load(
    source: str | Path,
    splits: Sequence[str],
    private: bool,
    framing: Framing,
    data_root: str | Path,
    download: bool,
    people: str | Path | None,
    grey: bool,
) -> list[Images]:
    """Splits of a source, of the classes listed, and checked."""
    if not isinstance(source, str | Path):
        raise ConfigError(f"images are loaded by name or path, and not from {source!r}.")
    if not isinstance(data_root, str | Path):
        raise ConfigError(f"data_root={data_root!r} must be the path of a folder.")
    if people is not None and not isinstance(people, str | Path):
        raise ConfigError(f'people={people!r} must be "folder" or the path of a table.')
    people = None if people is None else str(people)
    whole, listed = part_source(str(source))
    found = []
    for split, images in zip(
        splits,
        _read(whole, splits, private, framing, Path(data_root), download, people, listed),
        strict=True,
    ):
        images = images if listed is None else images.only(listed)
        images = to_grey(images) if grey else images
        if len(images) == 0:
            raise DataError(f'"{images.name}" has no images.')
        present = images.labels.unique()
        if split == "train" and len(present) < 2:
            raise DataError(
                f'"{images.name}" has one class only, "{images.classes[int(present[0])]}": there '
                "is nothing to tell apart. Give at least two."
            )
        found.append(images)
    return found


def _read(
    source: str,
    splits: Sequence[str],
    private: bool,
    framing: Framing,
    data_root: Path,
    download: bool,
    people: str | None,
    listed: str | None,
) -> list[Images]:
    path = Path(expanduser(source))
    if people is not None and not isdir(path):
        raise ConfigError(
            f'people="{people}" is for folders, and "{source}" is none. An .npz file says who is '
            "on each image by arrays people_train and people_test."
        )
    if source in EMBEDDED:
        return [framing.images(EMBEDDED[source](split, private=private)) for split in splits]
    if _is_name(source):
        return load_named(
            source, splits, private=private, data_root=data_root, framing=framing, download=download
        )
    if path.suffix == ".npz":
        return load_npz_splits(path, splits, private=private, framing=framing)
    if source and exists(path):  # an empty path would be the folder one stands in
        return load_folder(
            path, splits, private=private, framing=framing, people=people, listed=listed
        )
    names = [*EMBEDDED, *SOURCES]
    near = get_close_matches(source.partition("@")[0], names, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise DataError(
        f'"{source}" is neither a file, a folder nor a known name ({", ".join(names)}).{hint}'
    )
