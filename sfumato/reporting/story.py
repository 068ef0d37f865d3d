"""Several runs told as one story: chapters of words, pictures and numbers, on one page.

Where a report sets runs side by side, a story says what they mean together. It is `sfumato demo`
that has one to tell. What it shows was computed from private images without a mechanism, so the
page says that it must not be shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.reporting import words
from sfumato.reporting.page import made_by, pictures_of, safe, template


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A heading, what there is to say, and what there is to see."""

    title: str
    words: Sequence[str]
    rows: Sequence[Sequence[str]] = ()
    """A table; the first row has its headings."""
    pictures: Sequence[tuple[Path, str]] = ()
    """Pictures and their captions."""
    chart: str = ""
    chart_says: str = ""
    links: Sequence[tuple[str, str]] = ()
    """Where there is more: words, and an address beside the page."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """All that the page says."""

    title: str
    lede: str
    pair: Sequence[tuple[str, str, str]]
    """Figures that stand side by side: over each its name, under it what it means."""
    chapters: Sequence[Chapter]
    limits: Sequence[str]
    commands: Sequence[str]


def render_story(story: Story) -> str:
    """The page; it needs nothing else, and opens from disk."""
    chapters = [_shown(chapter) for chapter in story.chapters]
    shown = {**vars(story), "chapters": chapters}
    return template("story.html.jinja").render(
        story=shown, made_by=made_by(), private=words.PRIVATE
    )


def _shown(chapter: Chapter) -> dict[str, Any]:
    pictures = [
        {**picture, "caption": caption}
        for path, caption in chapter.pictures
        for picture in pictures_of(path.parent, [path.name])
    ]
    return {**vars(chapter), "pictures": pictures, "chart": safe(chapter.chart)}
