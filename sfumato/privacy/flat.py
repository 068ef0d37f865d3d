"""Sums by name that lie behind one another in one flat vector.

A large model has hundreds of parameters. What is done to each of them alone costs more time in
Python than on a GPU; done to the flat vector, noise, checks, tags and division are one operation
each, however many parameters there are.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import torch
from torch import Tensor

from sfumato.errors import PrivacyError


@dataclass(frozen=True)
class FlatSlice:
    """Where a tensor lies: in which flat vector, where it begins, and its shape and strides."""

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
    """Where tensors lie in flat vectors."""

    spans: Mapping[str, FlatSlice]
    kinds: Mapping[tuple[torch.dtype, torch.device], int]
    """One flat vector for each type and device: how many numbers it has."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """The layout of sums of such tensors: in float32, or float64 for those of float64."""
        spans, kinds = {}, {}
        for name, tensor in tensors.items():
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            kind = (dtype, tensor.device)
            start = kinds.setdefault(kind, 0)
            dense = torch.empty_like(tensor, device="meta").stride()
            spans[name] = FlatSlice(list(kinds).index(kind), start, tuple(tensor.shape), dense)
            kinds[kind] = start + tensor.numel()
        return cls(spans, kinds)

    def zeros(self) -> "Sums":
        """New sums that lie so. To make many of them, keep the layout: it takes no memory."""
        return Sums(self)

    @cached_property
    def description(self) -> bytes:
        """Names, types, shapes and where they lie: all but the content.

        Noise of a GPU is other noise than a CPU's, so the kind of device belongs to it too.
        """
        kinds = [(str(dtype), device.type) for dtype, device in self.kinds]
        return json.dumps([kinds, [(n, astuple(span)) for n, span in self.spans.items()]]).encode()


class Sums(Mapping[str, Tensor]):
    """Tensors by name, each a view of a flat vector, in the order they were named.

    There is one flat vector, or one for each type and device where these differ. A tensor keeps the
    strides of the one it was made like, so that it may be the gradient of a parameter in
    channels_last; only tensors with gaps are laid out densely.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @cached_property
    def flats(self) -> tuple[Tensor, ...]:
        """The flat vectors: zero, until something is added."""
        return self._new(torch.zeros)

    @cached_property
    def _views(self) -> dict[str, Tensor]:
        return {name: span.view(self.flats) for name, span in self.layout.spans.items()}

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
        found.add(tensors)
        return found

    @torch.no_grad()
    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add parts to the sums of the same names, in one operation for all that lie alike.

        The first parts are copied, since there is nothing yet to add them to. A part of another
        shape is refused: broadcasting would count it several times.
        """
        for name, part in parts.items():
            span = self.layout.spans.get(name)
            if span is None:
                raise PrivacyError(f'"{name}" is none of these sums: {", ".join(self)}.')
            if tuple(part.shape) != span.shape:
                raise PrivacyError(
                    f'"{name}" is a sum of shape {span.shape}, and would be given a part of shape '
                    f"{tuple(part.shape)}."
                )
        first = "flats" not in self.__dict__ and parts.keys() == self.layout.spans.keys()
        if first:
            self.flats = self._new(torch.empty)
        alike = [n for n, part in parts.items() if _lies_like(part, self[n])]
        if alike:
            # What torch.optim itself calls; there is no public form.
            together = torch._foreach_copy_ if first else torch._foreach_add_  # pyright: ignore
            together([self[n] for n in alike], [parts[n] for n in alike])
        for name in parts.keys() - set(alike):
            (self[name].copy_ if first else self[name].add_)(parts[name])

    def _new(self, make: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        kinds = self.layout.kinds.items()
        return tuple(make(size, dtype=dtype, device=device) for (dtype, device), size in kinds)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.spans)

    def __len__(self) -> int:
        return len(self.layout.spans)


def _lies_like(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same layout: of an axis of size one it is free."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.dtype == other.dtype and all(n == 1 or a == b for n, a, b in steps)
