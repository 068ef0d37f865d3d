"""Buffers and parameters stay as they are while a private batch goes through a model.

They are saved with the weights, and noise covers the weights alone: a running mean that a layer
keeps of its inputs would be released as it is. A trial on noise cannot guarantee that no pass
writes to one, for a model may do so only with gradients on, or from some call on. So every pass is
looked at: it costs a glance at identities and versions, and on a GPU no wait. Parameters, which are
many and can be written to behind the back of their versions (`.data`), are looked at now and then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sfumato.errors import UnsupportedLayer


class BufferVersion(NamedTuple):
    """A buffer as it was found."""

    buffer: Tensor
    version: int
    values: Tensor

    @classmethod
    def of(cls, buffer: Tensor) -> "BufferVersion":
        """The buffer as it is now."""
        return cls(buffer, buffer._version, buffer.detach().clone())

    def is_of(self, buffer: Tensor, *, values: bool = False) -> bool:
        """Whether nobody has written to it since, by its version alone if it is on a GPU.

        Versions do not count what a recording does that is replayed; `values` looks there too.
        """
        # Counts changes in place, as autograd does; nothing public tells of them.
        same = buffer is self.buffer and buffer._version == self.version
        return same and (not (values or buffer.device.type == "cpu") or self.equals(buffer))

    def equals(self, buffer: Tensor) -> bool:
        """Whether it holds what it held, to the bit; what was no number may still be none."""
        if (buffer.shape, buffer.dtype) != (self.values.shape, self.values.dtype):
            return False
        now, before = buffer.detach(), self.values.to(buffer.device)
        return bool(((now == before) | ((now != now) & (before != before))).all())


class Buffers:
    """The buffers and parameters of a model, watched: what a pass writes there is an error.

    What is written between passes is the caller's own (weights that are loaded, statistics of
    public images), and so is a table that a layer writes again each time with what it held before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen: dict[str, BufferVersion] = {}
        self._parameters: dict[str, Tensor] = {}
        self.remember()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """For a pass: what is written inside is an error at the end."""
        self.remember()
        yield
        self.check()

    def remember(self) -> None:
        """Take the buffers as they are: a pass begins, and its parameters are not looked at."""
        self._parameters = {}
        before, self._seen = self._seen, {}
        for name, buffer in self.model.named_buffers():
            known = before.get(name)
            kept = known is not None and known.is_of(buffer)
            self._seen[name] = known if known is not None and kept else BufferVersion.of(buffer)

    def remember_parameters(self) -> None:
        """Take the parameters as they are, too: for this pass they are to be looked at."""
        self._parameters = _sums_of_bits(self.model)

    def check(self, *, values: bool = False) -> None:
        """Raise if one was written to since, and put back what it held.

        With `values` those that recordings wrote to are found too, for which a GPU is waited for.
        """
        for name, buffer in self.model.named_buffers():
            known = self._seen.get(name)
            if known is not None and known.is_of(buffer, values=values):
                continue
            if known is None or not known.equals(buffer):
                if known is not None and known.values.shape == buffer.shape:
                    buffer.detach().copy_(known.values)
                raise UnsupportedLayer(
                    f'the forward pass writes to the buffer "{name}": it would keep statistics of '
                    "private images that no noise covers. Turn running statistics off, or put that "
                    "layer into evaluation mode."
                )
            self._seen[name] = BufferVersion(buffer, buffer._version, known.values)
        now = _sums_of_bits(self.model) if self._parameters else {}
        for name, before in self._parameters.items():
            if name not in now or not torch.equal(before, now[name]):
                raise UnsupportedLayer(
                    f'the forward pass writes to the parameter "{name}": it would keep numbers of '
                    "private images that no noise covers. Let the optimizer alone change weights."
                )


@torch.no_grad()
def _sums_of_bits(model: nn.Module) -> dict[str, Tensor]:
    """One number for each parameter, that another content hardly has."""
    sums = {}
    for name, parameter in model.named_parameters():
        words = torch.int16 if parameter.element_size() == 2 else torch.int32
        sums[name] = parameter.contiguous().reshape(-1).view(words).sum(dtype=torch.int64)
    return sums
