"""What seeded commands leave: names of files, tensors along fixed directions, numbers, seeds."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from golden import adapter
from golden.clipping import see
from golden.commands import ACCOUNTS, COMMANDS, do

UNLIKE = ("second", "version")
"""Numbers with this in their name differ from day to day, or from version to version."""


@dataclass(frozen=True)
class Tolerance:
    """How far runs may differ."""

    tensors: float
    """Relative to the tensor's length."""
    numbers: float | None
    """Relative; None: not compared."""


SAME = Tolerance(1e-4, 1e-3)
"""On the same kind of CPU and version of torch a run repeats to the bit. What is left is for sums
in another order: 1e-6 each, which a few steps, and scores that compare, make larger."""
OTHER = Tolerance(5e-2, None)
"""Elsewhere rounding differs from the first product on, and a guess or two may fall elsewhere."""


def compute(place: Path) -> dict[str, dict]:
    """Run every command in that folder."""
    found = {}
    for name, words in {**COMMANDS, **ACCOUNTS}.items():
        with adapter.known_bits(), adapter.recording_seeds() as seeds:
            printed = do(name, words, place)
        found[name] = {"seeds": seeds}
        if name in ACCOUNTS:
            found[name]["files"] = {"": {"numbers": dict(numbers(json.loads(printed)))}}
    for name in COMMANDS:  # at the end: an audit leaves its findings with the run
        found[name]["files"] = digest(place / name)
    return found


def compare(name: str, found: dict, frozen: dict, tolerance: Tolerance) -> None:
    """Fail where files, tensors or numbers differ."""
    assert set(found["files"]) == set(frozen["files"]), f"{name} leaves other files"
    for file, wanted in frozen["files"].items():
        now, what = found["files"][file], f"{name}/{file}"
        assert set(now) == set(wanted), what
        for kind in wanted:
            assert set(now[kind]) == set(wanted[kind]), f"{what}: other {kind}"
        for key, (count, length, *_) in wanted.get("tensors", {}).items():
            assert now["tensors"][key][0] == count, f"{what}: {key}"
            np.testing.assert_allclose(
                now["tensors"][key], wanted["tensors"][key], rtol=0,
                atol=4 * tolerance.tensors * (length + 1e-6), err_msg=f"{what}: {key}",
            )  # fmt: skip
        if tolerance.numbers is not None:
            for key, number in wanted.get("numbers", {}).items():
                np.testing.assert_allclose(
                    now["numbers"][key], number, rtol=tolerance.numbers, atol=1e-6,
                    err_msg=f"{what}: {key}",
                )  # fmt: skip


def digest(run: Path) -> dict[str, dict]:
    """By file: tensors as `see` sees them, numbers as they are, nothing of other files."""
    files = [f for f in sorted(run.rglob("*")) if f.is_file() and f.name != ".lock"]
    return {str(f.relative_to(run)): _content(f) for f in files}


def _content(file: Path) -> dict:
    if file.suffix == ".safetensors":
        return {"tensors": {k: _see(k, v) for k, v in sorted(load_file(file).items())}}
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            found = {
                k: torch.from_numpy(arrays[k])
                for k in sorted(arrays)
                if arrays[k].dtype.kind in "biuf"
            }
        return {"tensors": {k: _see(k, v) for k, v in found.items()}}
    if file.suffix == ".json" and file.name != "config.json":  # settings are no results
        return {"numbers": dict(numbers(json.loads(file.read_text())))}
    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return {"numbers": dict(numbers(lines))}
    return {}


def _see(name: str, value: torch.Tensor) -> list[float]:
    return [float(value.numel()), *see(name, value)]


def numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in a JSON value, by their path in it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not any(word in key for word in UNLIKE):
                yield from numbers(inner, f"{name}/{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, f"{name}/{place}")
    elif isinstance(value, bool | int | float):
        yield name, float(value)
