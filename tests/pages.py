"""Run directories made by hand, as small as they can be, and a browser to look at reports in."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sfumato.commands.train import command as train
from sfumato.config import dumps, to_json
from sfumato.privacy.budget import make_plan
from sfumato.privacy.ledger import Ledger, LedgerHeader

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63b8fdf43c00050a027d3cd2d7ea0000000049454e44ae426082"
)
MARKER = "marker-that-nobody-may-see"


def make_run(path: Path, *, private=True, steps=30, taken=None, finished=True, **settings) -> Path:
    """A run of `sfumato train`: its ledger is real, its model is not there."""
    path.mkdir(parents=True)
    how = {"noise_multiplier": 2.0} if private else {"mode": "non-private"}
    config = train.Config(batch_size=100, steps=steps, **how, **settings)
    write(path / "config.json", {"verb": "train", "config": to_json(config)})
    noise = 2.0 if private else 0.0
    plan = make_plan(size=1000, batch_size=100, steps=steps, noise_multiplier=noise)
    write(path / "plan.json", to_json(plan))
    lines: list = []
    ledger = Ledger(LedgerHeader(data="digits-train", delta=1e-5), lines.append)
    for step in range(steps if taken is None else taken):
        if private or step == 0:
            ledger.charge(plan.release("train", step))
    (path / "ledger.jsonl").write_text("".join(dumps(dict(line)) + "\n" for line in lines))
    (path / "private").mkdir()
    times = [{"step": i, "loss": 1.0, "seconds": 0.2 if private else 0.1} for i in range(steps)]
    (path / "private" / "metrics.jsonl").write_text("".join(json.dumps(t) + "\n" for t in times))
    if finished:
        write(path / "private" / "scores.json", {"test_accuracy": 0.9, "test_images": 200})
        done = {"epsilon": ledger.epsilon(), "model": "tanh-cnn", "run": str(path)}
        (path / "done.json").write_text(dumps(done))
    return path


def make_audit(path: Path, **changes) -> Path:
    """A run of `sfumato audit`, as far as a report reads it."""
    (path / "private").mkdir(parents=True)
    write(path / "config.json", {"verb": "audit", "config": {"shadows": 4}})
    write(path / "done.json", {"audited": "dp", "methods": ["loss"]})
    fpr = [0.0, *np.geomspace(1e-3, 1, 20).tolist()]
    same = {"delta": 1e-5, "confidence": 0.95, "relation": "add-or-remove", "kept": True}
    found = {
        "target": "runs/dp",
        "promise": {"epsilon": 3.0, "delta": 1e-5, "relation": "add-or-remove", "unit": "example"},
        "bounds": [
            {"name": "one run", "epsilon": 1.0267, "thresholds": "", "assumes": "coins", **same},
            {"name": "many", "epsilon": 1.7391, "thresholds": "halves", "assumes": "noise", **same},
        ],
        "attacks": [
            {
                "name": "loss threshold",
                "auc": [0.51, 0.49, 0.53],
                "tpr_at_1_percent_fpr": [0.011, 0.006, 0.02],
                "tpr_at_0.1_percent_fpr": [0.001, 0.0, 0.004],
                "roc": {"fpr": fpr, "tpr": fpr},
            }
        ],
        "checks": [
            {"name": "noise", "question": "Is it as large?", "passed": True, "p_value": 0.4,
             "says": "2.0, and 2.0 was guaranteed"}
        ],
        "curve": {"fpr": fpr, "tpr": [min(1.0, 3 * x) for x in fpr]},
    }  # fmt: skip
    write(path / "private" / "audit.json", {**found, **changes})
    (path / "private" / "tradeoff.png").write_bytes(PNG)
    return path


def plant(path: Path) -> None:
    """Put the marker into everything private: names, values and pictures, however deep."""
    for place in (
        "private",
        "stages/teacher/private",
        "private/invert/private",
        "private/judges/a/private",
        "stages/a=1/private",
        "stages/s/stages/t/private",
    ):
        folder = path / place
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "scores.json", {
            "test_accuracy": 0.123456789, "warning": MARKER, MARKER: 1.0,
            "controls": {MARKER: 0.5}, "auc": 0.987654321,
        })  # fmt: skip
        bound = {"name": MARKER, "epsilon": 9.87654321}
        write(folder / "audit.json", {"target": MARKER, "bounds": [bound]})
        secret = {"kind": "bound", "name": MARKER, "value": [9.87654321, None, None]}
        write(folder / "findings.json", {"found": [secret], "notes": [MARKER], "target": MARKER})
        write(folder / f"{MARKER}.json", {})
        (folder / f"{MARKER}.png").write_bytes(PNG + MARKER.encode())
        (folder / "gallery.png").write_bytes(PNG + MARKER.encode())
        (folder / "ledger.jsonl").write_text(json.dumps({"header": MARKER}) + "\n")
        (folder / "plan.json").write_text(MARKER)
        (folder / "config.json").write_text(MARKER)
        (folder / "done.json").write_text(MARKER)
        (folder / "log.txt").write_text(MARKER)
        (folder / "metrics.jsonl").write_text(json.dumps({MARKER: 1, "seconds": 0.5}) + "\n")


def write(path: Path, value) -> None:
    path.write_text(json.dumps(value))


def ledger_of(path: Path) -> Ledger:
    lines = (path / "ledger.jsonl").read_text().splitlines()
    return Ledger.from_records(map(json.loads, lines))


def header(**changes) -> dict:
    return {"header": asdict(LedgerHeader(data="faces", delta=1e-5, **changes))}
