"""Keeps docs/architecture.md true: draws the rooms from their imports, and lists one private step.

Run `python docs/rooms.py` after a change; a test compares.
"""

import ast
import tempfile
import traceback
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sfumato import cli, runs
from sfumato.files import append_line

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"


def imports_of_rooms() -> dict[str, set[str]]:
    """Which folder of sfumato imports which others."""
    edges: dict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "sfumato").glob("*/**/*.py"):
        room = file.relative_to(ROOT / "sfumato").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sfumato."):
                other = str(node.module).split(".")[1]
                if (ROOT / "sfumato" / other).is_dir() and other != room:
                    edges[room].add(other)
    return edges


def below(room: str, edges: dict[str, set[str]]) -> set[str]:
    """All rooms that a room reaches."""
    direct = edges.get(room, set())
    return direct.union(*(below(other, edges) for other in direct))


def drawing() -> str:
    """A Mermaid graph; an arrow is left out where a longer way leads to the same room."""
    edges = imports_of_rooms()
    lines = ["graph TD"]
    for room in sorted(edges):
        longer = set().union(*(below(other, edges) for other in edges[room]))
        lines += [f"    {room} --> {other}" for other in sorted(edges[room] - longer)]
    return "\n".join(lines)


def walk() -> list[str]:
    """The calls that stand between `sfumato train` and the ledger's line for the first step."""
    found: list[str] = []

    def stop(*arguments: Any, **options: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if "sfumato/" in frame.filename]
        calls = [f"{f.filename.rpartition('sfumato/')[2]}: {f.name}" for f in frames]
        if any("noisy_gradient" in call for call in calls):
            found.extend(call for call in calls if "docs/" not in call)
            raise KeyboardInterrupt
        append_line(*arguments, **options)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(runs, "append_line", stop),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        suppress(SystemExit),
    ):
        cli.main(["train", "--preset", "digits-cpu", "--out", f"{folder}/run"])
    return found


def filled(page: str) -> str:
    """The page with the drawing and the list as they are now."""
    for name, text in (("mermaid", drawing()), ("text", "\n".join(walk()))):
        head, mark, rest = page.partition(f"```{name}\n")
        page = head + mark + text + "\n```" + rest[rest.index("```") + 3 :]
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
