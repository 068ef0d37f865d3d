"""How many examples fit memory at once.

What a step keeps is counted on a few examples of noise: the tensors that autograd saves for the
backward pass, and as much again for gradients on their way and what is kept for the sums. On a
GPU the number is then tried out, and halved until it fits.
"""

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.ghost.clip import Ghost
from sfumato.train.reading import Reading
from sfumato.train.world import World

LARGEST = {"cpu": 256, "cuda": 4096}
"""Beyond this many rows a step is not faster."""


def fitting_batch(
    ghost: Ghost, reading: Reading, asked: int | str, expected: float, world: World
) -> int:
    """The physical batch size: the one asked for, or with "auto" the largest that fits.

    Several processes share a batch, so none takes more than its part of it.
    """
    part = max(1, math.ceil(1.25 * expected / world.size))
    if isinstance(asked, int):
        return min(asked, part) if world.size > 1 else asked
    return world.agree(largest_batch(ghost, reading, part))


def largest_batch(ghost: Ghost, reading: Reading, wanted: int) -> int:
    """The largest power of two of examples that fits, or `wanted` if that is less."""
    limit = max(1, LARGEST.get(reading.device.type, 256) // reading.rows)
    room = free_bytes(reading.device) // max(1, bytes_per_example(ghost, reading))
    size = min(_power_of_two(min(limit, room)), wanted)
    while reading.device.type == "cuda" and size > 1 and not _fits(ghost, reading, size):
        size //= 2
    return max(1, size)


def few_shapes(size: int, device: torch.device) -> int:
    """What the length of a chunk is rounded to: on a GPU every new length costs seconds once.

    (cuDNN looks for the best program for each convolution of each shape.)
    """
    return max(1, math.ceil(size / 4)) if device.type == "cuda" else 1


def bytes_per_example(ghost: Ghost, reading: Reading, examples: int = 2) -> int:
    """Bytes that one more example takes in a step, roughly, and rather too many."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta" and tensor.numel():
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in ghost.model.parameters()}
    inputs = reading.trial(examples)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = reading.losses(ghost.model, *inputs)
    del losses
    saved = sum(size for place, size in seen.items() if place not in own)
    return 2 * saved // examples


def out_of_memory(problem: BaseException) -> bool:
    """Whether that is what went wrong; on a CPU torch has no name of its own for it."""
    text = str(problem)
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in text


def advise(ghost: Ghost, reading: Reading, tried: int) -> ConfigError:
    """The error that says which physical batch size fits."""
    release()
    fits = largest_batch(ghost, reading, max(1, tried // 2))
    if tried > 1:
        advice = f"{fits} fit: repeat the command with --physical-batch-size {fits} (or auto)."
    else:
        advice = "One is too much already: use --two-pass, smaller images or a smaller model."
    return ConfigError(f"out of memory with {tried} examples at once. {advice} Nothing is lost.")


def release() -> None:
    """Give memory back that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _fits(ghost: Ghost, reading: Reading, size: int) -> bool:
    try:
        ghost.clip(reading.losses, reading.trial(size), size)
    except (torch.OutOfMemoryError, RuntimeError) as problem:
        if not out_of_memory(problem):
            raise
        return False
    finally:
        release()
    return True


def free_bytes(device: torch.device) -> int:
    """Four fifths of what is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 4 // 5
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024 * 4 // 5
    except (OSError, KeyError):  # not Linux
        pages: Callable[[str], int] = os.sysconf
        return pages("SC_PHYS_PAGES") * pages("SC_PAGE_SIZE") // 2


def _power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


@contextmanager
def advised(ghost: Ghost, reading: Reading, size: int) -> Iterator[None]:
    """Say out of memory in words that help, for what is done inside with `size` examples."""
    try:
        yield
        return
    except (torch.OutOfMemoryError, RuntimeError) as problem:
        if not out_of_memory(problem):
            raise
    raise advise(ghost, reading, size)
