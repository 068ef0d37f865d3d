"""Where a recipe's images come from: the settings that all verbs with images have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Images by name or path, and their size."""

    data: str = "digits"
    """Images: a name, an .npz file, or a folder with one folder a class; NAME@CLASSES for some."""
    data_root: Path = Path("data")
    """Where named data sets are."""
    download: bool = False
    """Let torchvision fetch a named data set that is not there."""
    centre_crop: int | None = None
    """Cut so many pixels a side out of the middle, before any resizing."""
    image_size: int | None = None
    """Resize images to this many pixels a side."""
    grey: bool = False
    """Make colour images grey."""

    @property
    def loading(self) -> dict[str, Any]:
        """What `load_images` and `load_splits` want to know besides the name."""
        return {
            "image_size": self.image_size, "data_root": self.data_root, "download": self.download,
            "grey": self.grey, "centre_crop": self.centre_crop,
        }  # fmt: skip
