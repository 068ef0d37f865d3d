"""`sfumato release`, whole, for several rows and seeds: accuracies of teacher and student.

    python benchmarks/release.py --rows mnist-eps1 fashion-eps1 --seeds 3 --data-root DIR --jobs 4

Each run is a process of its own with its own teacher, statistics, images and student; a table and
its numbers as JSON lines come out. With --minutes, runs that are not begun by then are left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROWS = ("fashion-eps1", "mnist-eps1", "fashion-cifar-eps1", "fashion-eps10", "mnist-eps10")


def run(row: str, seed: int, arguments: argparse.Namespace, began: float) -> dict[str, object]:
    """One run of the verb; what it scored, and how long it took."""
    if time.monotonic() - began > 60 * arguments.minutes:
        return {}
    out = arguments.out / f"{row}-{seed}"
    words = ["--preset", row, "--seed", str(seed), "--out", str(out)]
    words += ["--data-root", str(arguments.data_root)]
    if seed == 0 and row in arguments.controls:
        words.append("--controls")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "sfumato", "release", *words], capture_output=True, text=True
    )
    taken = time.monotonic() - started
    if done.returncode:
        print(f"{row} seed {seed} failed: {done.stderr[-500:]}", flush=True)
        return {}
    scores = json.loads((out / "private" / "scores.json").read_text())
    summary = json.loads((out / "done.json").read_text())
    kept = ("test_accuracy", "teacher_accuracy", "controls")
    found: dict[str, object] = {"row": row, "seed": seed, "seconds": round(taken)}
    found |= {name: scores[name] for name in kept if name in scores}
    found |= {"epsilon": summary["epsilon"], "auc": scores["membership"]["membership_auc"]}
    with (arguments.out / "found.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\n")
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--controls", nargs="*", default=[])
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/release-rows"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    work = [(row, seed) for seed in range(arguments.seeds) for row in arguments.rows]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(lambda job: run(job[0], job[1], arguments, began), work))
    print("\n| row | seeds | teacher | student | spread | k = 0 | epsilon | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in arguments.rows:
        some = [item for item in found if item.get("row") == row]
        if not some:
            continue
        student = [float(str(item["test_accuracy"])) for item in some]
        teacher = [float(str(item["teacher_accuracy"])) for item in some]
        spread = f"{100 * statistics.stdev(student):.2f}" if len(student) > 1 else "-"
        untouched = [item["controls"]["k=0"] for item in some if "controls" in item]  # pyright: ignore
        shown = f"{100 * untouched[0]:.1f}" if untouched else "-"
        numbers = f"{100 * statistics.mean(teacher):.2f} | {100 * statistics.mean(student):.2f}"
        seconds = statistics.median(float(str(item["seconds"])) for item in some)
        print(
            f"| {row} | {len(some)} | {numbers} | {spread} | {shown} | {some[0]['epsilon']:.3f} | "
            f"{seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
