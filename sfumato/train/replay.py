"""Work that a GPU repeats: recorded once, then replayed with one launch.

A small network on a large GPU waits for Python: hundreds of kernels of a few microseconds each, and
every one is launched by hand. A CUDA graph launches all of them at once.
"""

from collections.abc import Callable

import torch

WARM = 3
"""Calls before the recording: libraries choose their kernels, optimizers make their state."""


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
        self.generator.manual_seed(hash(seed) % 2**63)
        if self.device.type != "cuda":
            self.work(self.generator)
            return
        self.calls += 1
        if self.calls <= WARM:
            self._warm()
            return
        if self.graph is None:
            self.graph = self._record()
        self.graph.replay()

    def _warm(self) -> None:
        # Beside the main stream, where nothing can be recorded.
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            self.work(self.generator)
        torch.cuda.current_stream(self.device).wait_stream(aside)

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # Another thread may ask how far messages between processes are: that is none of our work.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.work(self.generator)
        return graph
