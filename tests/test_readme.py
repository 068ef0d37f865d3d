"""What the README shows works as it is shown."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_library_example_runs_and_keeps_its_budget():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 2.99 < float(done.stdout) <= 3


def test_the_accounting_example_prints_what_it_says():
    shown = README.read_text().split("$ sfumato account")[1].split("```")[0]
    words, _, answer = shown.partition("\n")
    command = [sys.executable, "-m", "sfumato", "account", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == answer.strip()
