"""What has been brought to the disk: kills cannot show it, so calls are counted."""

import os
from pathlib import Path


class Synced:
    """Files and folders that were brought to the disk, and how long they were then."""

    def __init__(self, monkeypatch):
        self.sizes: dict[int, int] = {}
        fsync = os.fsync

        def listen(descriptor):
            fsync(descriptor)
            found = os.fstat(descriptor)
            self.sizes[found.st_ino] = found.st_size

        monkeypatch.setattr(os, "fsync", listen)

    def holds(self, path: Path) -> bool:
        """Whether all that is in a file was on disk, and a folder has been there at all."""
        found = path.stat()
        known = self.sizes.get(found.st_ino)
        return known is not None and (path.is_dir() or known == found.st_size)
