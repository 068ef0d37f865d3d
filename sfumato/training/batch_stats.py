"""What a step must know of its chunks before it may go on: early, while sums are still added up.

A release may only follow if no example has spoilt the sums. To wait for the sums to learn that
would leave a GPU idle until it is given more to do. Norms are there earlier, so what is to be known
is added up as soon as they are, and sent to the host at once: the sums are still in the making when
it arrives, and behind them the release and the next batch can line up. (An ordinary step wants its
losses alone: they are there before the backward pass begins.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.training.process_group import ProcessGroup

LOSS, CLIPPED, EXAMPLES, BROKEN, CHUNKS = range(5)
"""Sums of losses; numbers of examples that were clipped, that count, that are not finite; chunks.
An example that is not finite spoils the sums even where it does not count."""


class BatchStats:
    """Told of every chunk (see `clipper.sums.Tell`), also in a capture; read once for all of them.

    All its memory is made beforehand: a capture may make none that the host can read.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.numbers = torch.zeros(5, device=device)
        self._there = torch.zeros(5, pin_memory=on_gpu)
        # External: in a capture it is then a node, of which each replay tells again.
        self._arrived = torch.cuda.Event(external=True) if on_gpu else None

    def begin(self) -> None:
        """Forget what was told before."""
        self.numbers.zero_()
        self._there.zero_()

    def __call__(self, losses: Tensor, norms: Tensor, factors: Tensor, mask: Tensor | None) -> None:
        """Add a chunk whose gradients were clipped."""
        mask = torch.ones_like(norms, dtype=torch.bool) if mask is None else mask
        clipped = (factors[0] < 1) & mask
        self.add(losses.where(mask, 0.0), mask, clipped, ~norms.isfinite())

    def add(self, losses: Tensor, mask: Tensor, *counts: Tensor) -> None:
        """Add a chunk: its losses, zero where the mask is false, and what else is counted."""
        clipped, broken = counts or (torch.zeros_like(mask), torch.zeros_like(mask))
        found = [losses, clipped, mask, broken, mask.new_ones(1)]
        self.numbers += torch.stack([one.float().sum() for one in found])
        self._there.copy_(self.numbers, non_blocking=self._arrived is not None)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self.numbers.device))

    def read(self, chunks: int, processes: ProcessGroup) -> list[float]:
        """What was told of this many chunks. It waits for the norms of the last, not for its sums.

        Of several processes, what they have added up.
        """
        if processes.size > 1:
            return self.numbers.tolist()
        if self._arrived is not None and chunks:
            self._arrived.synchronize()
            if self._there[CHUNKS] != chunks:  # no driver we know; what must be known is waited for
                torch.cuda.synchronize(self.numbers.device)
        assert self._there[CHUNKS] == chunks, "a chunk was clipped and not told of"
        return self._there.tolist()


def averages_of(numbers: Sequence[float]) -> dict[str, float]:
    """What a step says of its batch: private, for no noise covers it."""
    loss, clipped, count, *_ = numbers
    return {"loss": loss / max(count, 1.0), "clipped": clipped / max(count, 1.0), "batch": count}
