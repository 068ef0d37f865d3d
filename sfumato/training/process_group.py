"""Several processes as one: each takes a share of a batch, and one of them adds the noise.

Started with `torchrun --nproc-per-node N -m sfumato train ...`. All processes draw the same
Poisson batches from the same secret, clip their share, and add their sums up; the leader alone
charges the ledger, adds noise, once, and hands the result round. So the guarantee is that of one
process.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sfumato.errors import SfumatoError
from sfumato.processes import num_processes

T = TypeVar("T")

PATIENCE = timedelta(hours=12)
"""How long processes wait for one that works alone. One that dies takes the others along."""


@dataclass(frozen=True)
class ProcessGroup:
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process keeps the run directory and the ledger."""
        return self.rank == 0

    def share(self, chunks: Sequence[T]) -> list[tuple[int, T]]:
        """This process's chunks of a batch, each with its place in it."""
        return list(enumerate(chunks))[self.rank :: self.size]

    def all_reduce(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace each tensor, on every process, by its sum over all of them."""
        if self.size > 1 and tensors:
            flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
            dist.all_reduce(flat)
            _unflatten(flat, tensors)

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace each tensor, on every process, by the leader's."""
        if self.size > 1 and tensors:
            flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
            dist.broadcast(flat, src=0)
            _unflatten(flat, tensors)

    def agree(self, value: Any) -> Any:
        """The leader's value, on every process."""
        if self.size == 1:
            return value
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def ask(self, read: Callable[[], T]) -> T:
        """What the leader reads, on every process; what it objects to is raised on each."""
        found, problem = None, None
        try:
            found = read() if self.leads else None
        except SfumatoError as met:
            problem = met
        problem = self.agree(problem)
        if problem is not None:
            raise problem
        return self.agree(found)

    def collect(self, tensor: Tensor) -> list[Tensor]:
        """For the leader every process's tensor, all of one shape, on the CPU; else nothing."""
        if self.size == 1:
            return [tensor.cpu()]
        by_gpu = dist.get_backend() == "nccl"
        ours = tensor.cuda() if by_gpu else tensor.cpu()
        found = [torch.empty_like(ours) for _ in range(self.size)] if self.leads else None
        dist.gather(ours, found, dst=0)
        return [each.cpu() for each in found or ()]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        if self.size == 1:
            return flag
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, flag)
        return any(found)


def join_processes(device: torch.device) -> ProcessGroup:
    """Meet the processes that torchrun started; one alone without it."""
    size = num_processes()
    if size == 1:
        return ProcessGroup()
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    return ProcessGroup(dist.get_rank(), size)


def leave_processes() -> None:
    """Say good-bye to the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # a group that is kept by a cycle would have its threads torn down at the end


def _unflatten(flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    start = 0
    for tensor in tensors.values():
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
