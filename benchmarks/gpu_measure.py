"""How `benchmarks/gpu.py` measures: time, peak memory, the largest batch, and kinds of kernels."""

import fcntl
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Case, Way
from gpu_steps import PEERS, Step, new_step
from torch.profiler import ProfilerActivity, profile

import sfumato
from sfumato.training.cuda_graph import WARM
from sfumato.training.memory import out_of_memory, release_memory

ROUNDS, IN_A_ROW = 5, 3
"""Turns of each method, and steps in a turn: a loop does not wait for the GPU after every step."""
LARGEST, IDLE = 2**16, "nothing: the GPU waits (before the first step it is not counted)"
Record = dict[str, Any]


def use_tf32() -> None:
    """The settings that all methods are measured with."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def runs_in(method: str, way: Way) -> bool:
    """Whether the method knows that way: other libraries know float32 in eager mode alone."""
    return method not in PEERS or way.name == "tf32"


@contextmanager
def one_at_a_time(gate: Path | None) -> Iterator[None]:
    """Wait until no other process prepares itself, and none measures; see `benchmarks/gpu.py`."""
    if gate is None:
        yield
        return
    gate.unlink(missing_ok=True)
    while any(gate.parent.glob("*.preparing")):
        time.sleep(0.1)
    with (gate.parent / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def measure_times(
    case: Case, way: Way, methods: Sequence[str], device: torch.device, limit: int,
    gate: Path | None = None, chunks: int = 1,
) -> Iterator[Record]:  # fmt: skip
    """Peak memory of each method as it is made, then times of a physical batch, in turns."""
    steps: dict[str, Step] = {}
    found: dict[str, Record] = {}
    touch(device)
    for method in methods:
        release_memory()
        try:
            with limited(limit):
                steps[method], found[method] = first_steps(method, case, way, device, chunks)
        except Exception as problem:  # a method that fails is a cell of the table
            found[method] = {"error": in_few_words(problem)}
    times: dict[str, list[float]] = {method: [] for method in steps}
    with one_at_a_time(gate):
        for _ in range(ROUNDS):
            for method, step in steps.items():
                times[method].append(time_of(step, device))
    for method, record in found.items():
        if method in times:
            record["ms"] = 1000 * statistics.median(times[method]) / chunks
        kind = "time" if chunks == 1 else f"time, one of {chunks}"
        yield {"kind": kind, "method": method, "batch": case.batch, **record}


def first_steps(
    method: str, case: Case, way: Way, device: torch.device, chunks: int
) -> tuple[Step, dict[str, Any]]:
    """A step that has been taken a few times; what it took, above what was there before it.

    Models of other methods stay where they are: they are in what was there before. A CUDA graph is
    captured in the last of these steps, which is where its memory is asked for.
    """
    before, start = allocated(device), time.perf_counter()
    step, trained = new_step(method, case, way, device, case.batch, chunks)
    for _ in range(WARM):
        step()
    release_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    ready = time.perf_counter() - start
    return step, {"mb": (peak - before) / 2**20, "trained": trained, "ready_s": ready}


def time_of(step: Step, device: torch.device) -> float:
    """Seconds a step, of a few in a row."""
    wait(device)
    start = time.perf_counter()
    for _ in range(IN_A_ROW):
        step()
    wait(device)
    return (time.perf_counter() - start) / IN_A_ROW


def compile_only(
    case: Case, way: Way, methods: Sequence[str], device: torch.device, limit: int
) -> Iterator[Record]:
    """Take one step, so that what was compiled is found in the cache next time."""
    for method in methods:
        start = time.perf_counter()
        try:
            with limited(limit):
                new_step(method, case, way, device, case.batch)[0]()
            record: Record = {"seconds": time.perf_counter() - start}
        except Exception as problem:
            record = {"error": in_few_words(problem)}
        release_memory()
        yield {"kind": "warm", "method": method, **record}


def measure_largest(
    case: Case, way: Way, methods: Sequence[str], device: torch.device, gib: float
) -> Iterator[Record]:
    """The largest batch whose step fits a part of the device's memory."""
    torch.backends.cudnn.benchmark = False  # every trial has another shape
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / whole))
    most = LARGEST if device.type == "cuda" else 2 * case.batch
    for method in methods:
        try:
            record: Record = {"largest": largest(fits_in(method, case, way, device), most)}
        except Exception as problem:
            record = {"error": in_few_words(problem)}
        release_memory()
        yield {"kind": "largest", "method": method, "gib": gib, **record}


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch that fits, to one part in eight: doubling, then halving what is added."""
    size = 0
    while size < most and fits(max(1, 2 * size)):
        size = max(1, 2 * size)
    if size == most:
        return size
    added = size // 2
    while added and added >= size // 8:
        size += added if fits(size + added) else 0
        added //= 2
    return size


def fits_in(method: str, case: Case, way: Way, device: torch.device) -> Callable[[int], bool]:
    """Whether a step of this many examples fits; each is tried with a model of its own."""

    def fits(batch: int) -> bool:
        release_memory()  # the last trial's error is gone, with all that its frames held
        try:
            step, _ = new_step(method, case, way, device, batch)
            step()
            step()
            wait(device)
        except (torch.OutOfMemoryError, RuntimeError) as problem:
            if not out_of_memory(problem):
                raise
            return False
        return True

    return fits


def measure_kernels(
    case: Case, way: Way, methods: Sequence[str], device: torch.device
) -> Iterator[Record]:
    """Milliseconds of a step by kind of kernel, its longest kernels, and when none runs."""
    for method in methods:
        try:
            step, _ = new_step(method, case, way, device, case.batch)
            for _ in range(WARM + 1):
                step()
            times, counts, idle = kernel_times(step, device)
        except Exception as problem:
            yield {"kind": "kernels", "method": method, "error": in_few_words(problem)}
            continue
        kinds: Counter[str] = Counter({IDLE: idle})
        for name, ms in times.items():
            kinds[kind_of(name)] += ms  # pyright: ignore
        top = [(name[:120], ms, counts[name]) for name, ms in times.most_common(25)]
        yield {"kind": "kernels", "method": method, "launches": counts.total(),
               "kinds": dict(kinds), "top": top}  # fmt: skip
        del step
        release_memory()


def kernel_times(step: Step, device: torch.device) -> tuple[Counter[str], Counter[str], float]:
    """Milliseconds and launches of a step by name (without a GPU, of operations), and idle ms."""
    on_gpu = device.type == "cuda"
    wait(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(IN_A_ROW):
            step()
        wait(device)
    times, counts, spans = Counter(), Counter(), []
    for event in seen.events() or ():
        elsewhere = on_gpu and event.device_type.name != "CUDA"
        if elsewhere or getattr(event, "is_user_annotation", False):
            continue
        spent = event.device_time if on_gpu else event.self_cpu_time_total
        times[event.name] += spent / 1000 / IN_A_ROW
        counts[event.name] += 1
        spans.append((event.time_range.start, event.time_range.end))
    each = Counter({name: round(count / IN_A_ROW) for name, count in counts.items()})
    return times, each, gaps(spans) / 1000 / IN_A_ROW if on_gpu else 0.0


def gaps(spans: list[tuple[float, float]]) -> float:
    """How much between the first and the last of some spans is in none of them."""
    empty, reached = 0.0, min((start for start, _ in spans), default=0.0)
    for start, end in sorted(spans):
        empty, reached = empty + max(0.0, start - reached), max(reached, end)
    return empty


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    own = _own_kernels()
    if any(kernel == name or kernel.startswith(f"{name}_") for name in own):
        return "ours"
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel, re.I)), "rest")


KINDS = {
    "fused by the compiler": r"^triton_",
    "attention": r"flash|fmha|attention|sdpa",
    "convolution": r"conv|dgrad|wgrad|fprop|winograd|implicit|im2col",
    "product": r"gemm|gemv|cutlass|nvjet|cublas|splitk|aten::(mm|bmm|addmm|baddbmm)",
    "normalisation": r"norm(?!al)|moments|internalgradients|fusedparams",
    "noise": r"philox|distribution|normal_",
    "optimizer": r"multi_tensor_apply|fused_sgd",
    "copy": r"memcpy|memset|copy|catarray|nchwtonhwc|nhwctonchw|transpose|aten::(to|cat)",
    "reduction": r"reduce|sum",
    "elementwise": r"elementwise|aten::",
}
"""Words in the names of kernels; the first kind that fits is taken."""


def _own_kernels() -> list[str]:
    home = Path(sfumato.__file__).parent
    text = "".join(path.read_text() for path in home.glob("**/kernels/*.py"))
    return re.findall(r"@triton\.jit(?:\(.*\))?\s+(?:@no_type_check\s+)?def (\w+)", text)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """TimeoutError for what takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_few_words(problem: BaseException) -> str:
    """An error, short enough for a table."""
    if isinstance(problem, RuntimeError) and out_of_memory(problem):
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(problem))
        return "out of memory" + (f" ({asked[1]} asked)" if asked else "")
    first = next((line for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {first[:90]}".replace("|", "/")


def touch(device: torch.device) -> None:
    """Let libraries take their workspace, which is nobody's."""
    square = torch.ones(64, 64, device=device)
    square @ square


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the device now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def wait(device: torch.device) -> None:
    """Until the device has done all that was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
