"""The page on architecture says what is so."""

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
