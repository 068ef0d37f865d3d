"""Many images, drawn piece by piece: never all in memory, by any number of processes.

An image is a function of its number, so a piece is the same for everyone who draws it, and one that
is on disk is not drawn again. Pieces are small: a command that is cut loses minutes, on any
machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from sfumato.files import atomic
from sfumato.training.process_group import ProcessGroup
from sfumato.training.progress import progress

Draw = Callable[[int, int], UInt8[Tensor, "n c h w"]]
"""The images from one number to another."""
GOLDEN = 0x9E3779B1
"""2^32 by the golden ratio: its multiples lie far apart on the circle of 32-bit numbers."""


def piece_size(device: torch.device) -> int:
    """Images in a piece: a batch on a GPU; so few on a CPU that a wide network takes minutes."""
    return 256 if device.type == "cuda" else 32


def image_seeds(seed: int, numbers: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """A seed for each image of a drawing; with another `seed` they are others.

    Guarantee: a million images of any of a thousand seeds have seeds of their own. torch uses 32
    bits of a seed alone, so they must be apart there; those of seed 0 are the numbers themselves.
    """
    return (numbers + seed * GOLDEN % 2**32) % 2**32


@dataclass(frozen=True)
class ImageShards:
    """A number of images, in files of a fixed size; the folder is the leader's alone."""

    folder: Path | None
    count: int
    size: int

    def draw(self, draw: Draw, processes: ProcessGroup, say: Callable[[str], None]) -> None:
        """Draw whatever is not there yet: each process a piece at a time, for the leader to write.

        A command that is cut has lost one piece of each process at most.
        """
        missing = processes.agree(
            [start for start in self._starts if not self._path(start).exists()]
            if self.folder
            else None
        )
        there = self.count - sum(self._length(start) for start in missing)
        if missing and there:
            say(f"going on after {there} images")
        tell = progress(self.count, there, None, say, unit="images", counted="image")
        for first in range(0, len(missing), processes.size):
            turn = missing[first : first + processes.size]
            # Processes that have nothing left to draw repeat a piece: all meet at each turn.
            start = turn[processes.rank % len(turn)]
            begin = self._window(start)
            drawn = draw(begin, begin + min(self.size, self.count))
            for start, pixels in zip(turn, processes.collect(drawn), strict=False):
                with atomic(self._path(start)) as file:
                    np.save(file, pixels[start - self._window(start) :].numpy())
            new = sum(map(self._length, turn))
            there += new
            tell(there, {"batch": new})
        say(f"{self.count} images drawn")

    def __iter__(self) -> Iterator[UInt8[Tensor, "n c h w"]]:
        for start in self._starts:
            yield torch.from_numpy(np.load(self._path(start)))

    def first(self, count: int) -> UInt8[Tensor, "k c h w"]:
        """The first images, as many as asked for, or all if there are fewer."""
        found: list[Tensor] = []
        for piece in self:
            found.append(piece)
            if sum(map(len, found)) >= count:
                break
        return torch.cat(found)[:count]

    def remove(self) -> None:
        """Delete the files, also those of pieces of another size."""
        assert self.folder is not None, "another process has the pieces"
        for path in self.folder.glob("piece-*.npy"):
            path.unlink(missing_ok=True)

    @property
    def _starts(self) -> range:
        return range(0, self.count, self.size)

    def _length(self, start: int) -> int:
        return min(self.size, self.count - start)

    def _window(self, start: int) -> int:
        """Where drawing begins for a piece: for a short last one earlier.

        All are drawn in one shape: a compiled network and other processes want that.
        """
        return max(0, min(start, self.count - self.size))

    def _path(self, start: int) -> Path:
        assert self.folder is not None, "another process has the pieces"
        # Both ends are named: another machine may cut the images into other pieces.
        return self.folder / f"piece-{start:07d}-{start + self._length(start):07d}.npy"
