"""What the package says of itself to installers and type checkers."""

import subprocess
from pathlib import Path

import pytest

import sfumato

ROOT = Path(__file__).parents[1]


def test_type_checkers_are_told_that_the_package_is_typed():
    assert (Path(sfumato.__file__).parent / "py.typed").exists()


def test_no_run_directory_is_committed():
    """A run made by hand in the checkout, then `git add -A`: 45 MB came along that way once."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    )
    runs = [path for path in listed.stdout.split() if path.endswith(("/.lock", "/done.json"))]
    assert [path for path in runs if not path.startswith("tests/golden/runs/")] == []
