"""What the stored runs of earlier versions say: predictions of their models, and their epsilon."""

import json
from pathlib import Path

from golden import adapter
from golden.commands import inside
from golden.store import RUNS

MODELS = ("train", "plain", "canaries", "warmup", "release", "warmup/stages/warmup")
LEDGERS = (
    "train", "plain", "canaries", "release", "release/bundle", "release/stages/teacher",
    "warmup/stages/train", "invert/private/stages/target",
)  # fmt: skip


def compute(version: str) -> dict[str, dict]:
    folder = RUNS / version
    return {
        "logits": {name: adapter.answers(folder / name).tolist() for name in MODELS},
        "account": {name: account(folder, name) for name in LEDGERS},
    }


def account(folder: Path, name: str) -> dict:
    """Epsilon and stages, by the command."""
    with inside(folder):
        code, printed = adapter.command(["account", "--ledger", name, "--json"])
    assert code == 0, printed
    found = json.loads(printed)
    return {key: found[key] for key in ("epsilon", "delta", "stages", "damage")}
