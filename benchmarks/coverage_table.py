"""The table of results/coverage.md, from the files the sweep leaves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from families import EXPECTED, LISTED, REFUSED

HEAD = """# Exactness on real architectures

`python benchmarks/coverage.py` (resumes; `--part 1/2` and `--part 2/2` side by side), commit
{commits}, {machine}.
Two random images, random weights, all parameters trained, BatchNorm frozen with the statistics of
one batch, no dropout. Errors are against autograd asked for one loss at a time: of the norms, and
of the clipped sum of the worst parameter (relative to its own gradient, or to a thousandth of the
whole). The goal is 1e-5 in float32. Where a network is so steep, or an activation so near a kink of
ReLU, that rounding alone exceeds it, the column *autograd* has the error of plain autograd itself:
float32 against float64, or against images that differ in their last bit, whichever is more. The
rules are judged by float64. Models over 250 M parameters are compared in float64 by halves of their
parameters. A name in brackets is the same architecture with other pretrained weights, which has
been measured once. Rules: ghost, store and square are the three ways of a product; the rest keep
per-example gradients.

"""
COLUMNS = (
    "| model | pixels | M parameters | trained | rules | norms, float32 | sums | autograd "
    "| norms, float64 | sums | s |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def write(kept: Path, machine: str, architecture: Callable[[str], str]) -> None:
    """Write results/coverage.md from what there is."""
    rows = {p.stem: json.loads(p.read_text()) for p in kept.glob("*.json")}
    commits = ", ".join(sorted({row["commit"] for row in rows.values()}))
    text = HEAD.format(commits=commits, machine=machine)
    for title, names in (("Listed", LISTED), ("Expected", EXPECTED)):
        lines = [line(name, architecture(name), rows) for name in names]
        text += f"## {title}: {len(names)} names\n\n{summary(names, architecture, rows)}\n\n"
        text += COLUMNS + "\n".join(lines) + "\n\n"
    Path("results/coverage.md").write_text(text.rstrip() + "\n")


def line(name: str, same_as: str, rows: dict[str, dict[str, Any]]) -> str:
    """One model."""
    shown = name if name == same_as else f"{name} ({same_as})"
    row = rows.get(same_as, {"problem": "not run"})
    if "problem" in row:
        text = row["problem"].replace("\n", " ")
        why = f"refused, since {REFUSED[name]}: " if name in REFUSED else ""
        return f"| {shown} | | | | {why}{text} | | | | | | |"
    if row["mixes"]:
        return f"| {shown} | | | | MIXES EXAMPLES, and was not refused | | | | | | |"
    rules = ", ".join(f"{rule} {count}" for rule, count in sorted(row["rules"].items()))
    autograd = f"{row['autograd']:.0e}" if "autograd" in row else ""
    return (
        f"| {shown} | {row['size']} | {row['parameters'] / 1e6:.1f} | {100 * row['share']:.2f} % | "
        f"{rules} | {row['norms']:.0e} | {row['sums']:.0e} | {autograd} | {row['norms64']:.0e} | "
        f"{row['sums64']:.0e} | {row['seconds']:.0f} |"
    )


def summary(
    names: list[str], architecture: Callable[[str], str], rows: dict[str, dict[str, Any]]
) -> str:
    """How many are exact, and how exact."""
    found = [rows.get(architecture(name), {"problem": "not run"}) for name in names]
    sound = [row for row in found if "problem" not in row and not row["mixes"]]
    if not sound:
        return "Nothing has been measured."
    within = [row for row in sound if max(row["sums"], row["norms"]) <= 1e-5]
    no_worse = [row for row in sound if row["sums"] <= max(1e-5, 3 * row.get("autograd", 0.0))]
    return (
        f"{len(sound)} of {len(names)} train, {sum(r['share'] == 1 for r in sound)} of them whole; "
        f"worst error in float64 {max(max(r['sums64'], r['norms64']) for r in sound):.0e}; in "
        f"float32 {len(within)} within 1e-5, {len(no_worse)} within 1e-5 or three times autograd's "
        "own error."
    )
