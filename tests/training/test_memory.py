"""`--physical-batch-size auto`: few trials, of what will be run, and nothing kept of failures."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from people import portraits
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.training import memory
from sfumato.training.chunks import ChunkSizes
from sfumato.training.inputs import Inputs
from sfumato.training.memory import (
    StepWork,
    fits_in_memory,
    fitting_batch,
    largest_that_fits,
    out_of_memory,
)
from sfumato.training.process_group import ProcessGroup

MB = 2**20


def inputs():
    return Inputs(portraits(), torch.device("cpu"), (0.5,), (0.5,))


class Meter:
    """A GPU that is none: `peak(n)` bytes for n examples, and `installed` of them."""

    def __init__(self, peak, installed):
        self.peak, self.installed, self.measured, self.ran = peak, installed, [], []

    def measure(self, size):
        self.measured.append(size)
        return self._found(size)

    def run(self, size):
        self.ran.append(size)
        return self._found(size)

    def _found(self, size):
        found = self.peak(size)
        return None if found > self.installed else found


def straight(n):
    return 300 * MB + 7 * MB * n


def bent(n):
    # What grows fastest is not yet the peak in a small step.
    return max(500 * MB + MB * n, 12 * MB * n)


@pytest.mark.parametrize("room", [1, 320, 330, 420, 1000, 5000, 80_000, 10**6])
@pytest.mark.parametrize("most", [1, 3, 13, 16, 100, 4096])
@pytest.mark.parametrize("peak", [straight, bent])
def test_the_largest_power_of_two_that_fits_is_found(peak, most, room):
    meter = Meter(peak, room * MB)
    found = largest_that_fits(meter.measure, meter.run, room * MB, most)
    right = [n for n in {most, *(2**k for k in range(13) if 2**k <= most)} if peak(n) <= room * MB]
    assert found == max(right, default=1)
    # What was found has been run, and it was the last that was.
    assert found == 1 or meter.ran[-1] == found


def test_three_trials_are_enough_where_memory_grows_evenly():
    meter = Meter(straight, 80_000 * MB)
    assert largest_that_fits(meter.measure, meter.run, 80_000 * MB, 4096 * 4) == 8192
    assert meter.measured == [4, 16]
    assert meter.ran == [8192]


def test_room_is_left_for_what_a_step_keeps_beside():
    # 100 would run, and then the optimizer would find nothing left.
    meter = Meter(bent, 2000 * MB)
    assert largest_that_fits(meter.measure, meter.run, 900 * MB, 100) == 64
    assert meter.ran == [100, 64]


def test_a_failed_trial_keeps_nothing():
    kept = []

    def work(losses, tensors, examples, mask):
        large = torch.zeros(1000)
        kept.append(weakref.ref(large))
        large.cycle = [large]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    assert not fits_in_memory(work, inputs(), 4)
    gc.collect()
    assert kept[0]() is None


def test_other_errors_are_not_taken_for_want_of_memory():
    def work(*_):
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        fits_in_memory(work, inputs(), 4)
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))


def test_on_a_gpu_what_is_tried_is_what_is_run(monkeypatch):
    # With --compile a few examples are measured uncompiled: each new size takes minutes.
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    tried = []

    def note(name):
        return lambda losses, tensors, examples, mask: tried.append((name, len(tensors[0])))

    def peak_bytes(work, inputs, size):
        assert fits_in_memory(work, inputs, size)
        return straight(size)

    monkeypatch.setattr(memory, "peak_bytes", peak_bytes)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1500 * MB)
    work = StepWork(note("compiled"), note("eager"))
    assert memory.measured_batch(GradientClipper(model), inputs(), 1000, work) == 128
    assert tried == [("eager", 4), ("eager", 16), ("compiled", 128)]


@pytest.mark.parametrize(("expected", "most"), [(4096, 4352), (256, 320), (10, 13), (0.5, 1)])
def test_room_is_wanted_for_chance_and_no_more(monkeypatch, expected, most):
    monkeypatch.setattr(memory, "LARGEST", {"cpu": 8192})
    monkeypatch.setattr(memory, "free_bytes", lambda _: 10**15)
    clipper = GradientClipper(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)))
    alone = ChunkSizes(expected, expected**0.5)
    assert fitting_batch(clipper, inputs(), "auto", alone, ProcessGroup()) == most
    shared = replace(alone, processes=2)
    assert shared.longest == (most + 1) // 2
    for asked in ("auto", 8192):
        found = fitting_batch(clipper, inputs(), asked, shared, ProcessGroup())
        assert found == shared.length(shared.longest) <= shared.longest


def test_of_what_fits_a_length_is_tried_that_wastes_little():
    chunk_sizes = ChunkSizes(600.0, 24.0, shapes=1)
    meter = Meter(straight, 80_000 * MB)
    room = straight(515) + 1
    found = largest_that_fits(
        meter.measure, meter.run, room, chunk_sizes.longest, chunk_sizes.length
    )
    assert found == chunk_sizes.length(512) < 350
    assert meter.ran == [found]
    meter = Meter(lambda n: straight(n) if n < 20 else 2 * straight(n), 80_000 * MB)
    found = largest_that_fits(
        meter.measure, meter.run, room, chunk_sizes.longest, chunk_sizes.length
    )
    assert meter.ran == [chunk_sizes.length(512), found]
    assert found == chunk_sizes.length(256)


def test_plain_work_is_an_ordinary_gradient_of_what_counts():
    torch.manual_seed(0)
    model, read = nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), inputs()
    x, y = read.trial(4)
    mask = torch.tensor([True, True, False, True])
    found = StepWork.plain(model).run(read.losses, (x, y), 4, mask)
    wanted = torch.autograd.grad(read.losses(model, x[mask], y[mask]).sum(), model.parameters())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
