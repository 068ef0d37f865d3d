"""The page on architecture says what is so."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(name="rooms")
def rooms_module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import rooms

    yield rooms
    del sys.modules["rooms"]


def test_the_drawing_and_the_walk_on_the_page_are_those_of_the_code(rooms):
    page = (ROOT / "docs/architecture.md").read_text()
    assert rooms.filled(page) == page, "run python docs/rooms.py"


def test_a_private_step_is_at_most_fifteen_calls_from_the_command_line(rooms):
    assert 5 < len(rooms.walk()) <= 15


def texts(tree):
    """The strings of a module that are no docstrings."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


@pytest.mark.parametrize("room", ["engine", "clipping", "privacy"])
def test_what_people_use_without_a_command_line_names_none_of_its_flags(room):
    files = (ROOT / "sfumato" / room).rglob("*.py")
    found = [text for file in files for text in texts(ast.parse(file.read_text()))]
    assert len(found) > 100
    assert [text for text in found if re.search(r"--[a-z]", text)] == []
