"""Charts as SVG text that we draw ourselves: small, without a script, and readable in any light.

Colours are CSS variables of the page (`--accent`, `--ink`, `--soft`), so one drawing serves light,
dark and print. Every chart has a title and a sentence for who cannot see it.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 14, 40
Line = tuple[Sequence[float], Sequence[float]]


def epsilon_curve(steps: Sequence[float], epsilon: Sequence[float], done: float, says: str) -> str:
    """Epsilon over uses of private data: a full line as far as it was spent, dashes beyond."""
    across = _scale(0, steps[-1], LEFT, WIDTH - RIGHT)
    ticks = _round_ticks(epsilon[-1])
    up = _scale(0, max(epsilon[-1], ticks[-1]), HEIGHT - BOTTOM, TOP)
    points = [(across(x), up(y)) for x, y in zip(steps, epsilon, strict=True)]
    spent = [point for point, x in zip(points, steps, strict=True) if x <= done]
    parts = [
        *_grid_up(ticks, up),
        *_grid_across({x: f"{x:,.0f}" for x in _round_ticks(steps[-1], whole=True)}, across),
        _path(points, "line planned"),
        _path(spent, "line"),
        _area(spent, up(0)),
        f'<circle class="dot" cx="{spent[-1][0]:.1f}" cy="{spent[-1][1]:.1f}" r="4"/>',
        _axis("uses of private data (steps)", "ε"),
    ]
    return _svg(parts, "Epsilon as it was spent", says)


def roc_chart(
    curves: Mapping[str, Line], bound: Line | None, says: str, bands: Mapping[str, Line]
) -> str:
    """ROC curves with a logarithmic false-positive rate; nothing can be in the shaded part.

    A band is the interval of a curve, point by point: lower ends, and upper ones.
    """
    finest = min((x for fpr, _ in curves.values() for x in fpr if x > 0), default=1e-3)
    low = max(1e-4, min(finest, 1e-2))
    across, up = _log_scale(low, 1, LEFT, WIDTH - RIGHT), _scale(0, 1, HEIGHT - BOTTOM, TOP)

    def points(line: Line) -> list[tuple[float, float]]:
        pairs = [(max(x, low), y) for x, y in zip(*line, strict=True)]
        return [(across(x), up(y)) for x, y in pairs]

    tens = [10.0**power for power in range(math.ceil(math.log10(low)), 1)]
    chance = [low * (1 / low) ** (i / 40) for i in range(41)]
    parts = [
        *_grid_up([0, 0.25, 0.5, 0.75, 1], up),
        *_grid_across({x: f"{100 * x:g} %" for x in tens}, across),
    ]
    if bound is not None:
        edge = points(bound)
        parts.append(_area([*edge, (across(1), up(1))], up(1), "forbidden"))
        parts.append(_path(edge, "line bound"))
    parts.append(_path(points((chance, chance)), "line chance"))
    for number, (name, line) in enumerate(curves.items()):
        if name in bands:
            under, over = (points((line[0], ends)) for ends in bands[name])
            parts.append(_path([*under, *reversed(over)], f"band attack-{number % 6}"))
        parts.append(_path(points(line), f"line attack-{number % 6}"))
    parts.append(_axis("false-positive rate", "true-positive rate"))
    return _svg(parts, "What attacks reach", says)


def bars(rows: Sequence[tuple[str, float, float | None]], says: str) -> str:
    """Epsilon proved, a bar each, with a mark where the guarantee stands."""
    height = 44 * len(rows) + 30
    finite = [value for _, *pair in rows for value in pair if value is not None]
    ticks = _round_ticks(max(finite, default=1.0) or 1.0)
    across = _scale(0, ticks[-1], 2, WIDTH - RIGHT)
    parts = [
        f'<line class="grid" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="4" y2="{height - 24}"/>'
        f'<text class="tick" x="{across(x):.1f}" y="{height - 8}" text-anchor="middle">{x:g}</text>'
        for x in ticks[1:]
    ]
    for number, (name, proved, guaranteed) in enumerate(rows):
        y = 44 * number + 6
        broken = guaranteed is not None and proved > guaranteed
        at_least = math.floor(100 * proved) / 100
        label = f"{escape(name)}: at least {at_least:.2f}"
        parts.append(f'<text class="label" x="2" y="{y + 10}">{label}</text>')
        if guaranteed is not None:
            parts.append(_rect(2, y + 16, across(guaranteed) - 2, "guaranteed"))
        parts.append(_rect(2, y + 16, across(proved) - 2, "broken" if broken else "proved"))
        if guaranteed is not None:
            x = across(guaranteed)
            parts.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 12}" y2="{y + 34}"/>'
            )
    return _svg(parts, "Epsilon proved beside epsilon guaranteed", says, height)


def _svg(parts: Sequence[str], title: str, says: str, height: int = HEIGHT) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(f"{title}. {says}")}">{"".join(parts)}</svg>'
    )


def _scale(low: float, high: float, start: float, end: float):  # noqa: ANN202 (a function)
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * (min(max(value, low), high) - low) / span


def _log_scale(low: float, high: float, start: float, end: float):  # noqa: ANN202 (a function)
    scale = _scale(math.log10(low), math.log10(high), start, end)
    return lambda value: scale(math.log10(value))


def _round_ticks(highest: float, whole: bool = False) -> list[float]:
    """Three to five round numbers from 0 to just above the highest."""
    rough = max(highest, 1e-9) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 2.5, 5, 10) if unit * times >= rough * 0.999)
    step = max(1, round(step)) if whole else step
    count = math.floor(highest / step) if whole else math.ceil(highest / step - 1e-9)
    return [step * i for i in range(max(1, count) + 1)]


def _grid_up(values: Sequence[float], up) -> list[str]:  # noqa: ANN001 (a scale)
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
        for y in values
    ]


def _grid_across(names: dict[float, str], across) -> list[str]:  # noqa: ANN001 (a scale)
    return [
        f'<text class="tick" x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" '
        f'text-anchor="middle">{name}</text>'
        for x, name in names.items()
    ]


def _axis(across: str, up: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{across}</text>'
        f'<text class="axis" transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{up}</text>'
    )


def _path(points: Sequence[tuple[float, float]], kind: str) -> str:
    route = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{route}"/>'


def _area(points: Sequence[tuple[float, float]], base: float, kind: str = "area") -> str:
    ends = [(points[0][0], base), *points, (points[-1][0], base)]
    return f'<polygon class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in ends)}"/>'


def _rect(x: float, y: float, width: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{max(0.0, width):.1f}" height="14" rx="3"/>'
    )
