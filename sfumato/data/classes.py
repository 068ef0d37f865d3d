"""Lists of classes, as they stand after the @ of a source: "cat,deer,truck" or "0-4,7".

An item is the name of a class, a number, or a range of numbers. Where classes are called by
numbers, as digits and people often are, a number is that name; everywhere else it is a place,
counted from 0. So "3" never means one class here and its neighbour there.
"""

import re
from collections.abc import Sequence

from sfumato.errors import DataError

SHOWN = 20
NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def find_classes(listed: str, classes: Sequence[str], name: str) -> list[int]:
    """The places in `classes` of those in the list, in its order; a range counts upwards.

    A name goes before what it could mean: a class called "0-2" is one class. Raises `DataError`,
    with the classes there are, for an item that is none of them, a range whose ends are not both
    there, or one that counts down; and for a class that is listed twice.
    """
    named = {place: int(c) for place, c in enumerate(classes) if c.isdecimal()}
    numbers = named or dict(enumerate(range(len(classes))))
    places: list[int] = []
    for item in (part.strip() for part in listed.split(",")):
        found = [place for place, c in enumerate(classes) if c == item] or _count(item, numbers)
        if not found:
            hint = "" if named else f", or by place 0 to {len(classes) - 1}"
            raise DataError(
                f'"{name}" has no class "{item}". There are: {list_some(classes)}{hint}.'
            )
        places += found
    return require_distinct(places, classes, name)


def require_distinct(places: Sequence[int], classes: Sequence[str], name: str) -> list[int]:
    """These places of classes, or a `DataError` if one is beyond them or comes twice."""
    seen: set[int] = set()
    for place in places:
        if not 0 <= place < len(classes):
            raise DataError(
                f'"{name}" has no class at place {place}. There are {len(classes)}, counted from '
                f"0: {list_some(classes)}."
            )
        if place in seen:
            raise DataError(f'class "{classes[place]}" of "{name}" is listed twice. Once will do.')
        seen.add(place)
    return list(places)


def _count(item: str, numbers: dict[int, int]) -> list[int]:
    """Places of the classes with a number in the range; none unless both its ends are there."""
    ends = NUMBERS.fullmatch(item)
    low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
    if not {low, high} <= set(numbers.values()):
        return []
    # By number, not by place: folders are in alphabetical order, with 10 before 2.
    between = [place for place, number in numbers.items() if low <= number <= high]
    return sorted(between, key=lambda place: numbers[place])


def require_same_classes(
    classes: Sequence[str], name: str, others: Sequence[str], other: str
) -> None:
    """Refuse two sets whose classes differ: what a label stands for would not be the same."""
    if tuple(classes) != tuple(others):
        raise DataError(
            f'the classes of "{name}" are {list_some(classes)}, and those of "{other}" '
            f"{list_some(others)}: they must be the same, in one order."
        )


def list_some(classes: Sequence[str]) -> str:
    """The first names, and how many there are."""
    more = f", … ({len(classes)} in all)" if len(classes) > SHOWN else ""
    return ", ".join(classes[:SHOWN]) + more
