"""Charts over time as SVG text, for a page that loads nothing.

Colours are classes, so that the page decides on them, for light and dark. A chart has a name for those
who do not see it; its numbers are in a table on the same page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 44, 12, 26
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
Values = Sequence[float | None]
Show = Callable[[float], str]
"""A value as text."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, and the class that colours them. None is a gap."""

    name: str
    colour: str
    values: Values


def bars(title: str, times: Sequence[datetime], series: Sequence[Series], show: Show) -> str:
    """Stacked bars, the first series at the bottom."""
    high = max((sum(column) for column in _columns(series)), default=0.0)
    scale = _Scale(high)
    slot = PLOT_WIDTH / max(len(times), 1)
    width = max(slot - (1 if slot > 3 else 0), 0.5)
    parts = []
    for index, column in enumerate(_columns(series)):
        y = float(TOP + PLOT_HEIGHT)
        for one, value in zip(series, column, strict=True):
            if not value:
                continue
            height = scale.length(value)
            y -= height
            tip = f"{_moment(times[index])}: {show(value)} {one.name}"
            parts.append(
                f'<rect class="{one.colour}" x="{LEFT + index * slot:.1f}" y="{y:.1f}" '
                f'width="{width:.1f}" height="{height:.1f}"><title>{escape(tip)}</title></rect>'
            )
    return _chart(title, times, scale, show, parts)


def lines(title: str, times: Sequence[datetime], series: Sequence[Series], show: Show) -> str:
    """Lines, each with its name at its end."""
    known = [value for one in series for value in one.values if value is not None]
    scale = _Scale(max(known, default=0.0))
    parts = [part for one in series for part in _line(one, times, scale, show)]
    parts += _labels(series, len(times), scale)
    return _chart(title, times, scale, show, parts)


def _columns(series: Sequence[Series]) -> list[list[float]]:
    return [
        [value or 0.0 for value in column]
        for column in zip(*(s.values for s in series), strict=True)
    ]


def _x(index: int, count: int) -> float:
    return LEFT + (index + 0.5) * PLOT_WIDTH / max(count, 1)


def _line(one: Series, times: Sequence[datetime], scale: _Scale, show: Show) -> Iterator[str]:
    for run in _runs(one.values):
        points = [(_x(index, len(times)), scale.y(value)) for index, value in run]
        radius = 2.5 if len(times) <= 60 else 1.5
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="{one.colour} line" points="{path}"/>'
        for (index, value), (x, y) in zip(run, points, strict=True):
            tip = f"{_moment(times[index])}: {one.name} {show(value)}"
            yield (
                f'<circle class="{one.colour} dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
                f"<title>{escape(tip)}</title></circle>"
            )


def _runs(values: Values) -> Iterator[list[tuple[int, float]]]:
    """The pieces between gaps."""
    run: list[tuple[int, float]] = []
    for index, value in enumerate(values):
        if value is not None:
            run.append((index, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _labels(series: Sequence[Series], count: int, scale: _Scale) -> Iterator[str]:
    """Names at the ends of lines, moved apart where they would meet."""
    ends = []
    for one in series:
        last = [(index, value) for index, value in enumerate(one.values) if value is not None][-1:]
        ends += [(scale.y(value), _x(index, count), one.name) for index, value in last]
    floor = HEIGHT - BOTTOM + 12.0
    for y, x, name in sorted(ends, reverse=True):
        floor = min(y + 4, floor - 12)
        yield f'<text class="name" x="{x + 6:.1f}" y="{floor:.1f}">{escape(name)}</text>'


class _Scale:
    """From values to heights, with ticks at round numbers."""

    def __init__(self, high: float) -> None:
        step = _round_up(high / 4) if high > 0 else 0.25
        self.ticks = [n * step for n in range(5)]
        self._high = self.ticks[-1]

    def length(self, value: float) -> float:
        return PLOT_HEIGHT * value / self._high

    def y(self, value: float) -> float:
        return TOP + PLOT_HEIGHT - self.length(value)


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= value * 0.999999)


def _chart(
    title: str, times: Sequence[datetime], scale: _Scale, show: Show, parts: Sequence[str]
) -> str:
    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(tick):.1f}" '
        f'y2="{scale.y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{scale.y(tick) + 4:.1f}" text-anchor="end">'
        f"{escape(show(tick))}</text>"
        for tick in scale.ticks
    )
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"{grid}{''.join(parts)}{''.join(_dates(times))}</svg>"
    )


def _dates(times: Sequence[datetime]) -> Iterator[str]:
    """A few times along the bottom."""
    every = max(1, math.ceil(len(times) / 5))
    long = len(times) > 1 and (times[-1] - times[0]).days >= 2
    for index in range(0, len(times), every):
        text = f"{times[index]:%b %d}" if long else f"{times[index]:%d %H:%M}"
        yield (
            f'<text class="tick" x="{_x(index, len(times)):.1f}" y="{HEIGHT - 8}" '
            f'text-anchor="middle">{text}</text>'
        )


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
