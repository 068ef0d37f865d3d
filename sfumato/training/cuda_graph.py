"""Work that a GPU repeats: captured once, then replayed with one launch.

A small network on a large GPU waits for Python: hundreds of kernels of a few microseconds each, and
every one is launched by hand. A CUDA graph launches all of them at once.
"""

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from sfumato.data.example_rng import seed_of

WARM = 3
"""Calls before the capture: libraries choose their kernels, optimizers make their state."""


class Replay:
    """Work that reads and writes the same tensors at each call, with chance from a seed.

    The work must not wait for the GPU, make tensors of numbers, or branch on values; optimizers in
    it are `capturable`. Whoever puts other tensors in the place of those it knows needs another
    `Replay`. Away from a GPU it is the work itself.
    """

    def __init__(self, work: Callable[[torch.Generator], None], device: torch.device) -> None:
        self.work = work
        self.device = device
        self.generator = torch.Generator(device)
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *seed: int) -> None:
        """The work, once: what is drawn in it is a function of the seed."""
        self.generator.manual_seed(seed_of(*seed))
        if self.device.type != "cuda":
            self.work(self.generator)
            return
        self.calls += 1
        if self.calls <= WARM:
            self._warm()
            return
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _warm(self) -> None:
        # Beside the main stream, where nothing can be captured.
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            self.work(self.generator)
        torch.cuda.current_stream(self.device).wait_stream(aside)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # Another thread may ask how far messages between processes are: that is none of our work.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.work(self.generator)
        return graph


CAPTURES = 8
"""Captures that a function has at most: each takes seconds to make, and memory."""


@dataclass(frozen=True)
class Capture:
    """A captured call: the tensors it reads, and those it gives, which every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    given: Any


class Captured:
    """A function of tensors, captured once for each of their shapes and replayed from then on.

    The rules are those of `Replay`; chance in it comes from torch's own generator. What a call
    gives is overwritten by the next. Away from a GPU it is the function itself; so it is after a
    capture that failed.
    """

    def __init__(self, work: Callable[..., Any], device: torch.device) -> None:
        _ALL.add(self)
        self.work = work
        self.device = device
        self.calls: dict[Any, int] = {}
        self.captures: dict[Any, Capture | None] = {}
        """None for what cannot be captured."""
        self.most = CAPTURES

    def __call__(self, name: Any, *inputs: Tensor) -> Any:
        """The function of these inputs; `name` stands for all else that it depends on."""
        if self.device.type != "cuda":
            return self.work(*inputs)
        key = (name, *((tuple(x.shape), x.stride(), x.dtype) for x in inputs))
        self.calls[key] = self.calls.get(key, 0) + 1
        if key not in self.captures and self.calls[key] == WARM + 1:
            self.captures[key] = self._capture(inputs) if self.most else None
        made = self.captures.get(key)
        if made is None:
            return self.work(*inputs)
        self.captures[key] = self.captures.pop(key)  # the one used last stands last
        for place, value in zip(made.inputs, inputs, strict=True):
            place.copy_(value)
        made.graph.replay()
        return made.given

    def _capture(self, inputs: tuple[Tensor, ...]) -> Capture | None:
        if len(self.captures) >= self.most:  # what was not used for longest goes
            torch.cuda.synchronize(self.device)
            oldest = next(iter(self.captures))
            del self.captures[oldest], self.calls[oldest]
        # What the calls before held, the capture needs for itself. And their graphs that are
        # only not collected yet would tie it to the stream that they ran on.
        gc.collect()
        torch.cuda.empty_cache()
        known = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        others = [made.graph.pool() for made in self.captures.values() if made is not None]
        pool = others[0] if others else None
        stream = torch.cuda.stream(torch.cuda.current_stream(self.device))  # also if it fails
        try:
            with stream, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                given = self.work(*known)
        except RuntimeError as problem:
            words = str(problem).splitlines()[0]
            warnings.warn(f"a step cannot be captured, so it is slower: {words}", stacklevel=2)
            self._give_up()
            return None
        return Capture(graph, known, given)

    def _give_up(self) -> None:
        """Capture nothing more, and let chance go on.

        A capture that was broken off leaves torch's generator waiting for its end. It gets
        another state, which captures made before do not know, of whatever function: they go too.
        """
        for one in _ALL:
            one.most, one.captures = 0, dict.fromkeys(one.captures)
        with torch.cuda.device(self.device):
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


_ALL: WeakSet[Captured] = WeakSet()
"""All that may hold a capture."""
