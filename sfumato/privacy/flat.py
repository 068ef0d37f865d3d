"""Sums by name that lie behind one another in one flat vector.

A large model has hundreds of parameters. What is done to each of them alone costs more time in
Python than on a GPU; done to the flat vector, noise, checks, tags and division are one operation
each, however many parameters there are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: in which flat vector, from where on, and how."""

    flat: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, flats: Sequence[Tensor]) -> Tensor:
        """The tensor in these flat vectors."""
        flat = flats[self.flat]
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in flat vectors: one for each type and device, of so many numbers."""

    places: Mapping[str, Place]
    kinds: Mapping[tuple[torch.dtype, torch.device], int]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """That of sums of such tensors: in float32, or float64 for those who compute in it."""
        places, kinds = {}, {}
        for name, tensor in tensors.items():
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            kind = (dtype, tensor.device)
            start = kinds.setdefault(kind, 0)
            dense = torch.empty_like(tensor, device="meta").stride()
            places[name] = Place(list(kinds).index(kind), start, tuple(tensor.shape), dense)
            kinds[kind] = start + tensor.numel()
        return cls(places, kinds)

    def zeros(self) -> "Sums":
        """New sums that lie so. To make many of them, keep the layout: it takes no memory."""
        flats = [torch.zeros(size, dtype=d, device=v) for (d, v), size in self.kinds.items()]
        return Sums(self, flats)

    @cached_property
    def description(self) -> bytes:
        """Names, types, shapes and where they lie: all but the content.

        Noise of a GPU is other noise than a CPU's, so the kind of device belongs to it too.
        """
        kinds = [(str(dtype), device.type) for dtype, device in self.kinds]
        return json.dumps([kinds, [(n, astuple(p)) for n, p in self.places.items()]]).encode()


class Sums(Mapping[str, Tensor]):
    """Tensors by name, each a view of a flat vector, in the order they were named.

    There is one flat vector, or one for each type and device where these differ. A tensor keeps the
    strides of the one it was made like, so that it may be the gradient of a parameter in
    channels_last; only tensors with gaps are laid out densely.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor]) -> None:
        self.layout, self.flats = layout, tuple(flats)
        self._views = {name: place.view(flats) for name, place in layout.places.items()}

    @classmethod
    def zeros(cls, like: Mapping[str, Tensor]) -> "Sums":
        """Zeros for sums of such tensors."""
        return Layout.of(like).zeros()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Sums":
        """The same sums laid out flat: a copy, unless they lie so already."""
        if isinstance(tensors, Sums):
            return tensors
        found = cls.zeros(tensors)
        if tensors:
            given = [tensor.detach() for tensor in tensors.values()]
            torch._foreach_copy_(list(found.values()), given)  # pyright: ignore
        return found

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add parts to the sums of the same names, in one operation for all that lie alike."""
        alike = [n for n, part in parts.items() if _lies_like(part, self[n])]
        if alike:
            pairs = ([self[n] for n in alike], [parts[n] for n in alike])
            torch._foreach_add_(*pairs)  # pyright: ignore
        for name in parts.keys() - set(alike):
            self[name].add_(parts[name])

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def _lies_like(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same layout: of an axis of size one it is free."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.dtype == other.dtype and all(n == 1 or a == b for n, a, b in steps)
