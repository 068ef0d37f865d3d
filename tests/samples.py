"""A sample of a large matrix of cases in `make test`, all of it in `make test-all`."""

from itertools import combinations, product

import pytest


def sampled(strength=1, indirect=(), **axes):
    """Parametrise by all combinations, of which those outside a sample are marked `full`.

    In the sample every value comes at least once; with strength 2 every pair of values of two axes.
    """
    rows = list(product(*axes.values()))
    chosen = set(_covering([range(len(values)) for values in axes.values()], strength))
    places = product(*(range(len(values)) for values in axes.values()))
    params = [
        pytest.param(*row, marks=() if place in chosen else pytest.mark.full)
        for place, row in zip(places, rows, strict=True)
    ]
    return pytest.mark.parametrize(",".join(axes), params, indirect=list(indirect))


def _covering(axes, strength):
    """Rows of places, one after the other, each with the most that no row before it has."""
    missing = {
        some
        for which in combinations(range(len(axes)), strength)
        for some in product(*([(axis, place) for place in axes[axis]] for axis in which))
    }
    turn = 0
    while missing:
        row = dict(min(missing))
        for axis, places in enumerate(axes):
            if axis not in row:
                own = [*places[turn % len(places) :], *places[: turn % len(places)]]
                row[axis] = max(own, key=lambda p, a=axis: _met(row | {a: p}, missing, strength))
        missing -= set(combinations(sorted(row.items()), strength))
        turn += 1
        yield tuple(row[axis] for axis in range(len(axes)))


def _met(row, missing, strength):
    return sum(some in missing for some in combinations(sorted(row.items()), strength))


def few(names, rows, every=3):
    """Parametrise by the rows of a table, of which all but one in `every` are marked `full`."""
    marks = [() if i % every == 0 else pytest.mark.full for i in range(len(rows))]
    params = [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize(names, params)
