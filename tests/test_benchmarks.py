"""Benchmarks use names of the package that are there."""

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_is_there(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("sfumato"):
            continue
        module = importlib.import_module(str(node.module))
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):  # a module, then
                importlib.import_module(f"{node.module}.{name}")
