"""Store one small finished run of every command: PYTHONPATH=.:tests python -m golden.store v2

The runs of a version stay as they are for ever: later versions must read them.
"""

import re
import shutil
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from golden.commands import COMMANDS, do

RUNS = Path(__file__).parent / "runs"
LEFT_OUT = (
    "*.lock", "*log.txt", "*/samples/*", "*/tradeoff.png", "release/pictures.png",
    "warmup/stages/guide/*.safetensors", "audit/private/stages/*", "invert/private/members.npz",
    "invert/private/judges/*", "invert/private/stages/prior/*",
    "invert/private/stages/target/*.safetensors", "reconstruct/private/*.png",
    "reconstruct/stages/*.safetensors",
)  # fmt: skip
"""What no command reads of a run that is finished, or can do without."""


def store(version: str) -> None:
    """Make the runs without a fixed seed, as users do, and keep what others read of them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, words in COMMANDS.items():
            if name != "report":
                do(name, re.sub(r" --noise-seed \d+", "", words), Path(folder))
        for file in Path(folder).rglob("*"):
            name = str(file.relative_to(folder))
            if file.is_file() and not any(fnmatch(name, pattern) for pattern in LEFT_OUT):
                to = RUNS / version / name
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)


if __name__ == "__main__":
    store(sys.argv[1])
