"""How many examples fit memory at once.

On a GPU it is measured: two steps of a few examples say what one more of them takes, the number
that should fit follows, and a step of that size is tried, as it will be run; if it fails, half of
it. On a CPU a step too large may end the process, so it is only reckoned: the tensors that autograd
saves for the backward pass, and as much again for gradients on their way and what is kept for sums.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sfumato.clipping.clip import GradientClipper
from sfumato.data.memory_guard import free_memory
from sfumato.errors import ConfigError
from sfumato.training.chunks import ChunkSizes
from sfumato.training.inputs import Inputs
from sfumato.training.process_group import ProcessGroup

LARGEST = {"cpu": 256, "cuda": 4096}
"""Beyond this many rows a step is not faster."""
FEW, SOME = 4, 16
"""Examples in the two small steps that are measured."""
COPIES = 5
"""Copies of the parameters that a step makes beside: sum, noise, gradient, two of an optimizer."""


class StepWork(NamedTuple):
    """What a step does with a chunk: called like `GradientClipper.clip`, with a mask as a step has
    one.
    """

    run: Callable[..., Any]
    """As it is run in the end."""
    measured: Callable[..., Any]
    """As it is measured with a few examples: the same, or uncompiled, which takes no less."""
    captured: bool = False
    """Whether it will run as a CUDA graph. It keeps its memory: other sizes need room beside."""

    @classmethod
    def plain(cls, model: nn.Module) -> "StepWork":
        """An ordinary forward and backward pass."""

        def gradient(
            losses: Callable[..., Tensor], tensors: Any, examples: int, mask: Tensor
        ) -> Any:
            learning = [p for p in model.parameters() if p.requires_grad]
            total = torch.where(mask, losses(model, *tensors), 0.0).sum()
            return torch.autograd.grad(total, learning, allow_unused=True)

        return cls(gradient, gradient, captured=True)


def fitting_batch(
    clipper: GradientClipper,
    inputs: Inputs,
    asked: int | str,
    chunk_sizes: ChunkSizes,
    processes: ProcessGroup,
    work: StepWork | None = None,
) -> int:
    """The physical batch size: what wastes least of as many as asked for, or with "auto" as fit."""
    if isinstance(asked, int):
        return chunk_sizes.length(asked)
    found = largest_batch(clipper, inputs, chunk_sizes.longest, work, chunk_sizes.length)
    return processes.agree(found)


def largest_batch(
    clipper: GradientClipper,
    inputs: Inputs,
    wanted: int,
    work: StepWork | None = None,
    length: Callable[[int], int] = int,
) -> int:
    """The largest power of two of examples that fits, or `wanted` if that is less.

    What a step does is `clipper.clip`, unless other `work` is given. Where n would fit, `length(n)`
    are taken: no more than n.
    """
    limit = max(1, LARGEST.get(inputs.device.type, 256) // inputs.rows)
    most = min(wanted, _power_of_two(limit))
    if inputs.device.type == "cuda":
        work = work or StepWork(clipper.clip, clipper.clip)
        return measured_batch(clipper, inputs, most, work, length)
    room = free_bytes(inputs.device) // max(1, bytes_per_example(clipper, inputs))
    return length(min(_power_of_two(room), most))


def measured_batch(
    clipper: GradientClipper,
    inputs: Inputs,
    most: int,
    work: StepWork,
    length: Callable[[int], int] = int,
) -> int:
    """The largest batch by trial, with room for what a step keeps beside."""
    release_memory()
    beside = COPIES * sum(4 * p.numel() for p in clipper.parameters.values())
    return largest_that_fits(
        lambda size: peak_bytes(work.measured, inputs, size),
        lambda size: peak_bytes(work.run, inputs, size),
        (free_bytes(inputs.device) - beside) // (2 if work.captured else 1),
        most,
        length,
    )


def largest_that_fits(
    measure: Callable[[int], int | None],
    run: Callable[[int], int | None],
    room: int,
    most: int,
    length: Callable[[int], int] = int,
) -> int:
    """The `length` of the largest power of two, or of `most`, that was seen to take at most `room`.

    `measure` and `run` take a step of this many examples, and return the bytes it took at its peak;
    None if there were not as many. A step that takes too much is tried again with half.
    """

    def fit(found: int | None) -> bool:
        return found is not None and found <= room

    few, some = min(FEW, most), min(SOME, most)
    below = measure(few)
    above = measure(some) if fit(below) else None
    size = some - 1 if fit(below) else few - 1
    if below is not None and above is not None and fit(above):
        each = max(1.0, (above - below) / max(1, some - few))
        size = some + int((room - above) / each)
    size = length(most if size >= most else _power_of_two(size))
    while size > 1 and not fit(run(size)):
        size = length(_power_of_two(size - 1))
    return size


def peak_bytes(work: Callable[..., Any], inputs: Inputs, size: int) -> int | None:
    """Bytes on a GPU that a step of `size` examples takes at its peak, above what is there now.

    None if they are not there; all memory is given back then. The second of two steps counts: in
    the first one libraries try programs out, and compilers theirs.
    """
    release_memory()
    before, peak = torch.cuda.memory_allocated(inputs.device), None
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(inputs.device)
        if not fits_in_memory(work, inputs, size):
            peak = None
            break
        peak = torch.cuda.max_memory_allocated(inputs.device) - before
    # Only here: while the error was in hand, so was everything that its frames refer to.
    release_memory()
    return peak


def fits_in_memory(work: Callable[..., Any], inputs: Inputs, size: int) -> bool:
    """Take a step of `size` examples of noise; whether there was memory for it."""
    try:
        mask = torch.ones(size, dtype=torch.bool, device=inputs.device)
        work(inputs.losses, inputs.trial(size), size, mask)
        if inputs.device.type == "cuda":
            torch.cuda.synchronize(inputs.device)
    except (torch.OutOfMemoryError, RuntimeError) as problem:
        if not out_of_memory(problem):
            raise
        return False
    return True


def bytes_per_example(clipper: GradientClipper, inputs: Inputs, examples: int = 2) -> int:
    """Bytes that one more example takes in a step, roughly, and rather too many."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta" and tensor.numel():
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in clipper.model.parameters()}
    tensors = inputs.trial(examples)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = inputs.losses(clipper.model, *tensors)
    del losses
    saved = sum(size for place, size in seen.items() if place not in own)
    return 2 * saved // examples


def out_of_memory(problem: BaseException) -> bool:
    """Whether that is what went wrong: libraries and compilers have their own words for it."""
    words = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(problem, torch.OutOfMemoryError) or any(w in str(problem) for w in words)


def advise(
    clipper: GradientClipper, inputs: Inputs, tried: int, work: StepWork | None
) -> ConfigError:
    """The error that says which physical batch size fits."""
    release_memory()
    fits = largest_batch(clipper, inputs, max(1, tried // 2), work)
    if tried > 1:
        advice = f"{fits} fit: repeat the command with --physical-batch-size {fits} (or auto)."
    else:
        advice = "One is too much already: use smaller images or a smaller model."
    return ConfigError(f"out of memory with {tried} examples at once. {advice} Nothing is lost.")


def release_memory() -> None:
    """Give memory back that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Four fifths of what is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 4 // 5
    return free_memory() * 4 // 5


def _power_of_two(number: int) -> int:
    """The largest that is not above the number; 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


@contextmanager
def memory_advice(
    clipper: GradientClipper, inputs: Inputs, size: int, work: StepWork | None = None
) -> Iterator[None]:
    """Say out of memory in words that help, for what is done inside with `size` examples."""
    try:
        yield
        return
    except (torch.OutOfMemoryError, RuntimeError) as problem:
        if not out_of_memory(problem):
            raise
    raise advise(clipper, inputs, size, work)
