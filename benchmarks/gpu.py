"""What a private step costs on a GPU, against plain training and other libraries, in one run.

    python benchmarks/gpu.py --cases vit-b vgg19 --out gpu.jsonl     time and memory
    python benchmarks/gpu.py --chunks 8 --out gpu.jsonl              eight physical batches a step
    python benchmarks/gpu.py --ways bf16+graphs --methods plain private "plain loop" "private loop"
    python benchmarks/gpu.py --max-batch --cases vgg19 --out gpu.jsonl
    python benchmarks/gpu.py --check --out gpu.jsonl                 norms, sums and the bound
    python benchmarks/gpu.py --profile --cases vit-b --out gpu.jsonl   where the time goes
    python benchmarks/gpu.py --layers --cases vit-b --out gpu.jsonl    the same by layer
    python benchmarks/gpu.py --warm --jobs 8                         only fill the compile cache
    python benchmarks/gpu.py --table gpu.jsonl > results/gpu.md

Every case and way has a process of its own, in which plain, private and the others take turns;
medians on the clock. With --jobs several of them compile at once, and then measure one by one.
Every finding is a line of JSON, so that a run can be made in pieces: no piece begins a case after
`--minutes`, and a case that fails or takes too long does not stop the others. On a machine without
a GPU, `--tiny` shows that it runs.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from gpu_cases import CASES, TINY, WAYS
from gpu_checks import check_case, check_collinear
from gpu_layers import measure_layers
from gpu_measure import (
    Record,
    compile_only,
    measure_kernels,
    measure_largest,
    measure_times,
    runs_in,
    use_tf32,
)
from gpu_steps import METHODS, PEERS
from gpu_table import kernel_table, layer_table, tables

PLAIN_WAYS = [name for name, way in WAYS.items() if not way.graphs]
EAGER_WAYS = [name for name in PLAIN_WAYS if not WAYS[name].compiled]


def read_words() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *TINY])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=PLAIN_WAYS)
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--graphs", action="store_true", help="each way with CUDA graphs as well")
    parser.add_argument("--chunks", type=int, default=1, help="physical batches of a step")
    parser.add_argument("--max-batch", action="store_true", help="the largest batch that fits")
    parser.add_argument("--gib", type=float, default=24.0, help="memory that --max-batch allows")
    parser.add_argument("--check", action="store_true", help="norms, sums and the bound")
    parser.add_argument("--profile", action="store_true", help="time by kind of kernel")
    parser.add_argument("--layers", action="store_true", help="time by layer, each alone")
    parser.add_argument("--warm", action="store_true", help="only compile")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once")
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=240, help="seconds until a method is ready")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after so long")
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--table", nargs="+", type=Path, help="print the tables of these files")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    words.cases = words.cases or list(TINY if words.tiny else CASES)
    if words.graphs:
        words.ways = [name for way in words.ways for name in (way, f"{way}+graphs")]
    if words.max_batch or words.layers:  # every trial would be compiled, or captured, anew
        words.ways = [name for name in words.ways if name in EAGER_WAYS]
    there = [method for method, (package, _) in PEERS.items() if find_spec(package)]
    others = [] if words.profile or words.warm else there
    words.methods = words.methods or ["plain", "private", *others]
    return words


def main() -> None:
    """Begin a process for each case and way, and write down those that do not come back."""
    words = read_words()
    if words.table:
        print(tables(load(words.table), " ".join(map(str, words.table))))
        return
    if words.inside:
        inside(words, *words.inside)
        return
    deadline = time.monotonic() + 60 * words.minutes
    pairs = [(case, way) for case in words.cases for way in words.ways]
    if words.check:
        pairs.append(("collinear", "bf16"))
    alone = words.profile or words.layers or words.max_batch or words.check
    jobs = 1 if alone else words.jobs
    with TemporaryDirectory() as gates, ThreadPoolExecutor(jobs) as pool:
        for first in range(0, len(pairs), jobs):
            group = pairs[first : first + jobs]
            gate = {pair: Path(gates) / f"{'-'.join(pair)}.preparing" for pair in group}
            for place in gate.values():
                place.touch()
            done = [pool.submit(one_process, words, pair, gate[pair], deadline) for pair in group]
            for one in done:
                one.result()


def one_process(
    words: argparse.Namespace, pair: tuple[str, str], gate: Path, deadline: float
) -> None:
    """Measure a case in a way, in a process of its own, if there is time left.

    Several of them compile side by side. While its `gate` is there a process is preparing itself;
    when all are ready, they measure one after the other.
    """
    case, way = pair
    left = deadline - time.monotonic()
    if left < 0:
        print(f"{case} {way}: no time left", flush=True)
        gate.unlink(missing_ok=True)
        return
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--gate", str(gate)]
    command += ["--inside", case, way]
    problem = ""
    try:
        # As long as two methods may take, and a little more; but not much beyond the end.
        most = min(2 * words.limit + 60, left + 20)
        done = subprocess.run(command, timeout=most, check=False)
        if done.returncode:
            problem = f"ended with {done.returncode}"
    except subprocess.TimeoutExpired as late:
        problem = f"stopped after {late.timeout:.0f} s"
    gate.unlink(missing_ok=True)
    if problem:
        write(words, {"kind": "process", "case": case, "way": way, "error": problem})


def inside(words: argparse.Namespace, case: str, way: str) -> None:
    """The work of one process: every finding is written at once."""
    warnings.filterwarnings("ignore")
    use_tf32()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = {
        "case": case,
        "way": way,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "commit": words.commit,
        "run": time.time_ns(),
    }
    profiles = []
    for record in findings(words, case, way, device):
        write(words, {**where, **record})
        profiles += [record] if record["kind"] == "kernels" else []
        if record["kind"] == "layers":
            print(layer_table(record), flush=True)
    if profiles:
        print(kernel_table(f"{case}, {way}", profiles), flush=True)


def findings(
    words: argparse.Namespace, name: str, way_name: str, device: torch.device
) -> Iterator[Record]:
    """What was asked for: one kind of measurement."""
    if name == "collinear":
        return iter([check_collinear(device)])
    case, way = {**CASES, **TINY}[name], WAYS[way_name]
    if words.check:
        return check_case(case, way, device)
    if words.layers:
        return measure_layers(case, way, device)
    methods = [method for method in words.methods if runs_in(method, way)]
    ask: Any = partial(measure_times, limit=words.limit, gate=words.gate, chunks=words.chunks)
    if words.max_batch:
        ask = partial(measure_largest, gib=words.gib)
    elif words.profile:
        ask = measure_kernels
    elif words.warm:
        ask = partial(compile_only, limit=words.limit)
    return ask(case, way, methods, device)


def write(words: argparse.Namespace, record: Record) -> None:
    """Append a line, and show it."""
    with words.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in record.items()}
    hidden = ("machine", "torch", "timm", "commit", "run", "top", "kinds", "groups")
    print(" ".join(f"{k}={v}" for k, v in shown.items() if k not in hidden), flush=True)


def load(paths: list[Path]) -> list[Record]:
    """All lines of some files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
