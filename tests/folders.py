"""Images as people keep them: one PNG an image, in one folder per class."""

from PIL import Image

from sfumato.data.images import keras_layout


def save_folder(images, path):
    """Write them, numbered in their order."""
    for place, (picture, label) in enumerate(
        zip(keras_layout(images.pixels), images.labels.tolist(), strict=True)
    ):
        folder = path / images.classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{place:04d}.png")
