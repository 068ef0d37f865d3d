"""Do the tests notice a wrong line? Mistakes are planted in clipping and privacy, one at a time.

`python benchmarks/mutations.py --number 80 --seed 0` writes results/mutations.md. Each mistake goes
into a copy of the tree, and the targeted tests of its room run on it until one fails. A mistake
that none notices survives; whether it matters is for people to say. Some change nothing that can be
seen (a message, a path that is only quicker).
"""

import argparse
import ast
import importlib
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("sfumato/clipping", "sfumato/privacy")
LEFT_OUT = ("kernels/", "gpu_kernels.py", "privacy/audit/")
"""Kernels need a GPU, or an interpreter that is too slow; audits measure a guarantee, and give
none."""

TESTS = {
    "sfumato/clipping": "factors rules clip admit meetings tables grams",
    "sfumato/privacy": "noise ledger seal secure flat sampling budget",
}
"""The targeted tests of a room; those called like the changed file come first."""
MORE = {
    "arithmetic": "cancelling", "grams": "cancelling", "lookups": "cancelling",
    "standardised": "cancelling", "mixing": "places", "probe": "places company",
    "buffers": "places",
    "fallback": "numbers", "leaf": "checkpointed", "tape": "checkpointed",
    "accounting": "accounting spent search", "search": "search accounting", "moments": "moments",
    "budget": "schedules accounting", "releases": "spent accounting", "session_key": "session_key",
}  # fmt: skip
"""And those of single files, first."""
GOLDEN = {"sfumato/clipping": "clipping", "sfumato/privacy": "epsilon streams"}

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.MatMult: ast.Add,
}  # fmt: skip
SLOW = "not one_graph and not kernels"
"""Networks compiled in processes of their own, and noise by Triton's interpreter."""

NOISY = ("isinstance", "getattr", "setattr", "zip")
"""Functions whose swapped arguments any test notices."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: what stands where, and what stands there instead."""

    path: str
    kind: str
    line: int
    before: str
    after: str
    span: tuple[int, int]
    """Where `before` is, in bytes."""


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """All mistakes that can be planted in a file."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = data[start:end].decode()
        for kind, after in _changes(node):
            if after != ast.unparse(node):
                yield Mutant(path, kind, node.lineno, before, after, (start, end))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that do something: no annotations, messages, decorators and type aliases."""
    if isinstance(node, ast.Raise):
        yield node
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.keyword) and node.arg in ("strict", "stacklevel"):
        return
    if hasattr(node, "lineno"):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The mistakes at one node: their kind, and the text that takes its place."""
    if isinstance(node, ast.Constant):
        yield from _other_constant(node.value)
    elif isinstance(node, ast.Slice):
        yield from _other_slice(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", ast.unparse(_with(node, ops=[COMPARISONS[type(node.ops[0])]()]))
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if (
            name not in NOISY
            and len(node.args) >= 2
            and not any(isinstance(a, ast.Starred) for a in node.args)
        ):
            one, other, *rest = node.args
            yield "arguments", ast.unparse(_with(node, args=[other, one, *rest]))
    elif isinstance(node, ast.AugAssign | ast.Raise | ast.Expr):
        idle = ast.Constant | ast.Yield | ast.YieldFrom
        if not isinstance(node, ast.Expr) or not isinstance(node.value, idle):
            yield "statement", "pass"
    else:
        yield from _other_operator(node)


def _other_operator(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", f"({ast.unparse(_with(node, op=OPERATORS[type(node.op)]()))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "operator", f"({ast.unparse(_with(node, op=other))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "operator", f"({ast.unparse(node.operand)})"


def _with(node: ast.AST, **changed: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **changed})


def _other_constant(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "constant", repr(not value)
    elif isinstance(value, int):
        yield "constant", repr(value + 1)
    elif isinstance(value, float):
        yield "constant", repr(value * 2 if value else 1.0)


def _other_slice(node: ast.Slice) -> Iterator[tuple[str, str]]:
    for name in ("lower", "upper"):
        bound = getattr(node, name)
        if bound is not None:
            later = ast.BinOp(left=bound, op=ast.Add(), right=ast.Constant(1))
            yield "slice", ast.unparse(_with(node, **{name: later}))


def all_mutants() -> list[Mutant]:
    """Every mistake in both rooms."""
    found = []
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            if not any(part in path for part in LEFT_OUT):
                found += mutants_of(path, file.read_text())
    return found


def sampled(mutants: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """As many of each kind and room as there can be, so that rare kinds are there too."""
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    chance = random.Random(seed)
    for mutant in mutants:
        groups[mutant.kind, room_of(mutant.path)].append(mutant)
    for group in groups.values():
        chance.shuffle(group)
    rounds = max(len(group) for group in groups.values())
    turns = [g[i] for i in range(rounds) for _, g in sorted(groups.items()) if i < len(g)]
    return turns[:number]


def room_of(path: str) -> str:
    """The room a file stands in."""
    return next(room for room in ROOMS if path.startswith(room))


def tests_for(path: str) -> list[str]:
    """The targeted tests, those of this very file first, the goldens last."""
    room, own = room_of(path), Path(path).stem
    names = [*MORE.get(own, "").split(), *TESTS[room].split()]
    names.sort(key=lambda name: name not in own)
    folder = room.replace("sfumato", "tests")
    tests = [f"{folder}/test_{name}.py" for name in dict.fromkeys(names)]
    return tests + [f"tests/golden/test_{name}.py" for name in GOLDEN[room].split()]


def run_tests(tree: Path, tests: list[str], seconds: int, gigabytes: int) -> tuple[str, str]:
    """What became of the tests: "killed", "survived" or "timeout"; and which test failed.

    The tests run in a fork of this process, which has torch in it already.
    """
    log = tree / "mutant.log"
    child = os.fork()
    if child == 0:
        try:
            _become_tests(tree, tests, seconds, gigabytes, log)
        except BaseException:
            traceback.print_exc()
        os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = log.read_text() if log.exists() else ""
    failed = [w for w in text.splitlines() if w.startswith(("FAILED", "ERROR"))]
    name = failed[0].split(" - ")[0].split("tests/")[-1] if failed else f"exit {code}"
    if code == 0:
        return "survived", ""
    return ("timeout", "") if code in (-signal.SIGALRM, -signal.SIGXCPU) else ("killed", name)


def _become_tests(tree: Path, tests: list[str], seconds: int, gigabytes: int, log: Path) -> None:
    """In the child: only the copy is seen, memory and time are limited, pytest runs."""
    import pytest

    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(4 * seconds)
    marks = "not slow and not gpu and not sweep and not full"
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci", "-m", marks]
    options += ["-k", SLOW]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was loaded before
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def copied_tree(folder: Path) -> Path:
    """What the tests need, in a folder that can be thrown away."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("sfumato", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def try_mutant(mutant: Mutant, options: argparse.Namespace) -> tuple[Mutant, str, str, float]:
    """Plant one mistake in a copy, run the tests; what came of it, which failed, and seconds."""
    before = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = copied_tree(Path(folder))
        file = tree / mutant.path
        source, (start, end) = file.read_bytes(), mutant.span
        file.write_bytes(source[:start] + mutant.after.encode() + source[end:])
        found = run_tests(tree, tests_for(mutant.path), options.seconds, options.gigabytes)
    return mutant, *found, time.perf_counter() - before


def main() -> None:
    """Plant, run, count, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=240, help="of CPU, for one mutant")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no more begin")
    parser.add_argument("--gigabytes", type=int, default=20, help="of memory")
    parser.add_argument("--only", default="", help="a pattern: mutants at such a path:line alone")
    parser.add_argument("--out", default="results/mutations.md")
    options = parser.parse_args()
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.dont_write_bytecode = True
    _load_what_is_heavy()
    everything = all_mutants()
    sample = sampled(everything, options.number, options.seed)
    sample = [m for m in sample if re.search(options.only, f"{m.path}:{m.line}")]
    # Nothing planted, first: the tests must pass then.
    nothing = [Mutant(f"{room}/__init__.py", "", 0, "", "", (0, 0)) for room in ROOMS]
    rows, start = [], time.perf_counter()
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        work = partial(try_mutant, options=options)
        for mutant, came, name, took in pool.imap_unordered(work, [*nothing, *sample]):
            print(f"{took:5.0f} s", *line_of(mutant, came, name), sep=" | ", flush=True)
            if mutant.kind:
                rows.append((mutant, came, name))
            elif came != "survived":
                sys.exit(f"the tests fail without any mistake: {name}")
            if time.perf_counter() - start > 60 * options.minutes:
                pool.terminate()
                break
    minutes = (time.perf_counter() - start) / 60
    (ROOT / options.out).write_text(page_of(rows, options, len(everything), minutes))


def _load_what_is_heavy() -> None:
    """Import what all tests import, so that forks have it."""
    for name in ("scipy.stats", "timm", "torchvision"):
        importlib.import_module(name)


def line_of(mutant: Mutant, came: str, test: str) -> list[str]:
    """One mutant as words."""
    before, after = (" ".join(t.split())[:90] for t in (mutant.before, mutant.after))
    return [came, mutant.kind, f"{mutant.path}:{mutant.line}", f"`{before}` -> `{after}`", test]


def page_of(
    rows: list[tuple[Mutant, str, str]], options: argparse.Namespace, of: int, minutes: float
) -> str:
    """The page of results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    rows = sorted(rows, key=lambda row: (row[0].path, row[0].line))
    kinds = Counter((m.kind, came) for m, came, _ in rows)
    survived = sum(came == "survived" for _, came, _ in rows)
    command = f"python benchmarks/mutations.py --number {options.number} --seed {options.seed}"
    lines = [
        "# Planted mistakes",
        "",
        f"`{command}`, commit {commit}, {os.cpu_count()} shared cores, Python "
        f"{platform.python_version()}, {minutes:.0f} minutes. A sample of {len(rows)} of {of} "
        "mistakes in `sfumato/clipping` and `sfumato/privacy` (without kernels), each with the "
        "targeted tests of its room and the goldens, until one fails.",
        "",
        f"**{survived} of {len(rows)} survive.**",
        "",
        "| kind | planted | killed | out of time | survived |",
        "|---|---|---|---|---|",
    ]
    for kind in sorted({m.kind for m, _, _ in rows}):
        each = [kinds[kind, came] for came in ("killed", "timeout", "survived")]
        lines.append(f"| {kind} | {sum(each)} | {' | '.join(map(str, each))} |")
    lines += ["", "## Survivors", "", "| kind | place | mistake |", "|---|---|---|"]
    for row in rows:
        came, kind, place, change, _ = line_of(*row)
        if came == "survived":
            lines.append(f"| {kind} | {place} | {change.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
