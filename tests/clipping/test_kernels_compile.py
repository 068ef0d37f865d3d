"""Kernels as a card's own compiler sees them: the interpreter takes much that it refuses."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

HERE = Path(__file__).parents[1]
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on an H200."""


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200_and_fits():
    command = [sys.executable, "-W", "ignore", str(HERE / "for_h200.py")]
    compiler = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=compiler, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    kinds = Counter(name for name, *_ in lines)
    written = [
        line.split("(")[0].removeprefix("def ")
        for file in HERE.parent.glob("sfumato/*/kernels/*.py")
        for line in file.read_text().splitlines()
        if line.startswith("def ")
    ]
    assert kinds.keys() <= set(written)
    assert len(kinds) == 19, sorted(kinds)
    assert all(int(line[-1]) <= SHARED for line in lines)
