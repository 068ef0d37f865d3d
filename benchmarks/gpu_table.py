"""The tables of results/gpu.md, from the lines that `benchmarks/gpu.py` wrote."""

from collections import Counter
from collections.abc import Sequence
from math import inf

from gpu_cases import CASES, TINY, WAYS
from gpu_measure import IDLE, IN_A_ROW, KINDS, ROUNDS, Record
from gpu_steps import METHODS, PEERS

Key = tuple[str, str, str]


def tables(records: Sequence[Record], files: str) -> str:
    """All tables there is something for. A later line stands for an earlier one."""
    kinds = {kind: latest(records, kind) for kind in ("time", "largest", "check", "collinear")}
    parts = ["# A private step on the GPU", f"`python benchmarks/gpu.py --table {files}`"]
    parts += ["; ".join(where(records)), NOTES]
    if kinds["time"]:
        parts += ["## Time and memory", time_table(kinds["time"])]
        parts += ["## Private bf16 against plain TF32", headline(kinds["time"])]
        parts += views_table(kinds["time"])
    if kinds["largest"]:
        parts += ["## Largest batch", largest_table(kinds["largest"])]
    if kinds["check"]:
        parts += ["## Is it right?", check_table(kinds["check"], kinds["collinear"])]
    profiles = latest(records, "kernels")
    for case, way in dict.fromkeys((case, way) for case, way, _ in profiles):
        found = [r for (c, w, _), r in profiles.items() if (c, w) == (case, way)]
        parts += [f"## Kernels of {title(case)}, {way}", kernel_table("kind of kernel", found)]
    for (case, way, _), record in latest(records, "layers").items():
        parts += [f"## Layers of {title(case)}, {way}", layer_table(record)]
        parts += [whole_step(kinds["time"], case, way)]
    parts += [problems(records)]
    return "\n\n".join(part for part in parts if part)


NOTES = f"""A step is forward, backward, clip, noise and SGD. *Plain* and *private* of a row were
measured in one process, in turns: medians on the clock of {ROUNDS} turns of {IN_A_ROW} steps; peak
of allocated memory. BatchNorm is GroupNorm for all. Private trains every parameter; others train
what they can (their share is given), without tokens, positions and LayerScale."""


def latest(records: Sequence[Record], kind: str) -> dict[Key, Record]:
    """The last line of a kind for each case, way and method."""
    return {(r["case"], r["way"], r["method"]): r for r in records if r["kind"] == kind}


def where(records: Sequence[Record]) -> list[str]:
    """Machines, versions and commits of the lines."""
    found = []
    for word in ("machine", "torch", "timm", "commit"):
        values = dict.fromkeys(str(r[word]) for r in records if r.get(word))
        if values:
            found.append(f"{word} {', '.join(values)}")
    return found


def title(case: str) -> str:
    """A case in words."""
    known = {**CASES, **TINY}.get(case)
    return known.title if known else case


def time_table(found: dict[Key, Record]) -> str:
    """A row for each case and way: plain, private with its ratios, and the others with theirs."""
    others = [method for method in METHODS[2:] if any(key[2] == method for key in found)]
    rows = []
    for case, way in in_order(found):
        plain, private = (found.get((case, way, method)) for method in METHODS[:2])
        batch = next(r["batch"] for (c, w, _), r in found.items() if (c, w) == (case, way))
        row = [f"{title(case)} ({batch})", way, absolute(plain), absolute(private)]
        row += ratios(private, plain)
        rows.append(row + [beside(found.get((case, way, method)), plain) for method in others])
    return markdown(["case (batch)", "way", "plain", "private", "time", "memory", *others], rows)


def in_order(found: dict[Key, Record]) -> list[tuple[str, str]]:
    """Cases as they came, and the ways of each as they are listed."""
    ways = list(WAYS)
    pairs = dict.fromkeys((case, way) for case, way, _ in found)
    cases = list(dict.fromkeys(case for case, _ in pairs))
    return sorted(pairs, key=lambda pair: (cases.index(pair[0]), ways.index(pair[1])))


def headline(found: dict[Key, Record]) -> str:
    """The quickest private step in bf16 beside ordinary float32 training, and how often it wins."""
    rows, eager, compiled = [], [], []
    for case in dict.fromkeys(case for case, *_ in found):
        plain = found.get((case, "tf32", "plain"), {})
        private = [
            record for (c, way, method), record in found.items()
            if c == case and way.startswith("bf16") and method == "private"
        ]  # fmt: skip
        if "ms" not in plain or not any("ms" in record for record in private):
            continue
        for wins, asked in ((eager, False), (compiled, True)):  # one that failed has not won
            tried = [r for r in private if WAYS[r["way"]].compiled == asked]
            wins += [any(r.get("ms", inf) < plain["ms"] for r in tried)] if tried else []
        best = min(private, key=lambda record: record.get("ms", inf))
        times = [one.removeprefix("~") for one in ratios(best, plain)]
        rows.append([title(case), absolute(plain), f"{absolute(best)} ({best['way']})", *times])
    if not rows:
        return "Not measured."
    counted = [
        f"{words} in {sum(wins)} of {len(wins)} cases"
        for words, wins in (("compiled", compiled), ("eager", eager)) if wins
    ]  # fmt: skip
    table = markdown(["case", "plain tf32", "quickest private bf16", "time", "memory"], rows)
    said = f"Private bf16 is faster than plain, eager TF32: {', '.join(counted)}"
    return f"{said}; in processes of their own.\n\n{table}"


def views_table(found: dict[Key, Record]) -> list[str]:
    """Passes a second, where an image has several views; a pass is one view of one image."""
    known = {**CASES, **TINY}
    several = {key: r for key, r in found.items() if key[0] in known and known[key[0]].views > 1}
    if not several:
        return []
    methods = list(dict.fromkeys(method for *_, method in several))
    rows = []
    for case, way in dict.fromkeys((case, way) for case, way, _ in several):
        row = [title(case), way]
        for method in methods:
            record = several.get((case, way, method), {})
            passes = record.get("batch", 0) * known[case].views
            row.append(f"{1000 * passes / record['ms']:,.0f}" if "ms" in record else "-")
        rows.append(row)
    return ["## Passes a second", markdown(["case", "way", *methods], rows)]


def largest_table(found: dict[Key, Record]) -> str:
    """The largest batches, and how many times that of Opacus ours is."""
    methods = list(dict.fromkeys(method for _, _, method in found))
    rows = []
    for case, way in dict.fromkeys((case, way) for case, way, _ in found):
        records = [found.get((case, way, method)) for method in methods]
        cells = ["-" if r is None else str(r.get("largest", r.get("error"))) for r in records]
        ours = found.get((case, way, "private"), {}).get("largest")
        peers = [found.get((case, way, peer), {}).get("largest", 0) for peer in PEERS]
        times = f"{ours / max(peers):.1f}x" if ours and max(peers, default=0) else "-"
        rows.append([title(case), way, *cells, times])
    gib = ", ".join(dict.fromkeys(f"{r['gib']:g}" for r in found.values()))
    table = markdown(["case", "way", *methods, "ours / best of the others"], rows)
    return f"Within {gib} GiB, by doubling and then to one part in eight.\n\n{table}"


def check_table(found: dict[Key, Record], collinear: dict[Key, Record]) -> str:
    """Errors of norms and sums, and the case that Grams in bf16 get wrong."""
    head = ["case", "way", "what is added / bound", "norm of what is added", "norms (median)",
            "clipped sum", "norms, float32", "bf16 alone moves norms by"]  # fmt: skip
    rows = []
    for (case, way, _), r in found.items():
        if "error" in r:
            rows.append([title(case), way, r["error"], *["-"] * 5])
            continue
        added, norms, median, *others = (
            f"{r[key]:.1e}"
            for key in ("added", "norms", "norms_median", "sum", "norms_float32", "moved")
        )
        most = f"{r['of_bound']:.4f}"
        rows.append([title(case), way, most, added, f"{norms} ({median})", *others])
    text = (
        "The most that an example adds; how far its norm was off; then largest relative errors "
        "against autograd, one loss at a time (8 examples).\n\n"
    )
    text += markdown(head, rows)
    for r in collinear.values():
        low, high = r["lowest"], r["highest"]
        text += (
            "\n\nTokens one per cent apart, output gradients of mean zero, bf16: the norms found "
            f"are {low:.4f} to {high:.4f} times the right ones."
        )
    return text


def kernel_table(head: str, found: Sequence[Record]) -> str:
    """Milliseconds by kind of kernel, the methods side by side."""
    found = [r for r in found if "kinds" in r]
    kinds = [
        kind for kind in ("ours", *KINDS, "rest", IDLE) if any(kind in r["kinds"] for r in found)
    ]
    rows = [[kind, *(f"{r['kinds'].get(kind, 0):.2f}" for r in found)] for kind in kinds]
    rows.append(["all", *(f"{sum(r['kinds'].values()):.2f}" for r in found)])
    rows.append(["launches", *(str(r["launches"]) for r in found)])
    text = markdown([head, *(f"{r['method']} ms" for r in found)], rows)
    for r in found:
        lines = [f"{ms:8.2f} ms {count:5d}x {name}" for name, ms, count in r["top"]]
        text += f"\n\n```\n{r['method']}\n" + "\n".join(lines) + "\n```"
    return text


def layer_table(record: Record) -> str:
    """Groups of equal layers, the one that costs most above plain training first."""
    if "error" in record:
        return record["error"]
    head = ["layers (the first of them)", "count", "method", "T", "D", "P", "counted extra GFLOP",
            "plain ms", "private ms (norms + sum)", "extra ms, all", "counted TFLOP/s"]  # fmt: skip
    rows, totals = [], Counter[str]()
    for r in sorted(record["groups"], key=extra_ms, reverse=True):
        count, norms, sums = r["count"], r["norms"], r["sums"]
        sizes = [str(r["T"]), str(r["D"]), str(r["P"]) + (f" x {r['G']}" if r["G"] > 1 else "")]
        rows.append([
            r["layer"], str(count), r["method"], *sizes, f"{count * r['gflop']:.3g}",
            f"{r['plain']:.3f}", f"{norms + sums:.3f} ({norms:.3f} + {sums:.3f})",
            f"{extra_ms(r):.2f}", f"{r['gflop'] / max(norms, 1e-6):.3g}",
        ])  # fmt: skip
        for word, one in (("plain", r["plain"]), ("norms", norms), ("sums", sums)):
            totals[word] += count * one  # pyright: ignore
        totals["gflop"] += count * r["gflop"]
        totals["count"] += count
    plain, norms, sums = totals["plain"], totals["norms"], totals["sums"]
    rows.append([
        "all", str(totals["count"]), "", "", "", "", f"{totals['gflop']:.3g}", f"{plain:.2f}",
        f"{norms + sums:.2f} ({norms:.2f} + {sums:.2f})", f"{norms + sums - plain:.2f}",
        f"{totals['gflop'] / max(norms, 1e-6):.3g}",
    ])  # fmt: skip
    text = (
        f"Batch {record['batch']}. Each layer's gradient of the weight alone, plain and private; "
        "times of one layer, GFLOP and extra ms of all in the row. Counted: whole Gram matrices, "
        "of which the kernel makes half; repeated calls find small layers in the cache.\n\n"
    )
    return text + markdown(head, rows)


def whole_step(found: dict[Key, Record], case: str, way: str) -> str:
    """What the layers' extra time is to explain, where it was measured."""
    lines = []
    for name in (way, f"{way}+graphs"):
        plain, private = (found.get((case, name, method), {}) for method in METHODS[:2])
        if "ms" in plain and "ms" in private:
            extra = private["ms"] - plain["ms"]
            lines.append(f"The whole step, {name}: {extra:.1f} ms above {plain['ms']:.1f} ms.")
    return " ".join(lines)


def extra_ms(group: Record) -> float:
    """What all layers of a group take above plain training."""
    return group["count"] * (group["norms"] + group["sums"] - group["plain"])


def problems(records: Sequence[Record]) -> str:
    """Processes that did not come back."""
    lines = [f"- {r['case']}, {r['way']}: {r['error']}" for r in records if r["kind"] == "process"]
    return "\n".join(lines)


def absolute(record: Record | None) -> str:
    """Milliseconds and megabytes, or what went wrong."""
    if record is None:
        return "-"
    return record.get("error") or f"{record['ms']:.1f} ms / {record['mb']:,.0f} MB"


def ratios(record: Record | None, plain: Record | None) -> list[str]:
    """Time and memory as multiples of plain; ~ if that is from another run."""
    if record is None or plain is None or "error" in record or "error" in plain:
        return ["-", "-"]
    about = "" if record.get("run") == plain.get("run") else "~"
    memory = f"{about}{record['mb'] / plain['mb']:.2f}x" if plain["mb"] else "-"
    return [f"{about}{record['ms'] / plain['ms']:.2f}x", memory]


def beside(record: Record | None, plain: Record | None) -> str:
    """All of it in one cell, and the share of the parameters that are trained if not all are."""
    if record is None or "error" in record:
        return absolute(record)
    share = [] if record["trained"] == 1 else [f"trains {100 * record['trained']:.3g} %"]
    found = [one for one in ratios(record, plain) if one != "-"]
    return ", ".join([absolute(record), *found, *share])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
