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
from typing import NamedTuple

WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 66, 44, 12, 26
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
Values = Sequence[float | None]
MOST_MIDNIGHTS, MOST_LABELS = 31, 6
DWARFS = 50.0
"""How many times as high as the typical value of the lowest line the highest one is, for a scale by
powers: on an even one the lowest would lie on the ground.
"""
ROUND_SECONDS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400),
)
POWERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 60, 600, 3600, 36000, 86400, 864000, 8640000)
"""Seconds that are marked on a scale by powers."""


class Axis(NamedTuple):
    """How values are shown: as text, and between which values lines are drawn."""

    show: Callable[[float], str]
    step: Callable[[float], float]
    """The next round step, no less than this."""


def decimal_step(value: float) -> float:
    """1, 2, 2.5 or 5, ten times that, and so on."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= value * 0.999999)


def whole_step(value: float) -> float:
    """The same in whole numbers."""
    return float(next(step for step in (decimal_step(max(value, 1.0)), 3, 5) if step % 1 == 0))


def time_step(value: float) -> float:
    """The same in seconds: of those a minute, an hour and a day are made of."""
    if value <= 0.5:
        return decimal_step(value)
    days = 86400 * decimal_step(max(value / 86400, 1.0))
    return float(next((step for step in ROUND_SECONDS if step >= value * 0.999999), days))


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, and the class that colours them. None is a gap."""

    name: str
    colour: str
    values: Values


def bars(title: str, times: Sequence[datetime], series: Sequence[Series], axis: Axis) -> str:
    """Stacked bars, the first series at the bottom."""
    high = max((sum(column) for column in _columns(series)), default=0.0)
    scale = _Even(high, axis)
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
            tip = f"{_moment(times[index])}: {axis.show(value)} {one.name}"
            parts.append(
                f'<rect class="{one.colour}" x="{LEFT + index * slot:.1f}" y="{y:.1f}" '
                f'width="{width:.1f}" height="{height:.1f}"><title>{escape(tip)}</title></rect>'
            )
    return _chart(title, times, scale, axis, parts)


def lines(title: str, times: Sequence[datetime], series: Sequence[Series], axis: Axis) -> str:
    """Lines, each with its name at its end."""
    known = [value for one in series for value in one.values if value is not None]
    scale = _scale(series, known, axis)
    parts = [part for one in series for part in _line(one, times, scale, axis)]
    parts += _labels(series, len(times), scale)
    return _chart(title, times, scale, axis, parts)


def _columns(series: Sequence[Series]) -> list[list[float]]:
    return [
        [value or 0.0 for value in column]
        for column in zip(*(s.values for s in series), strict=True)
    ]


def _x(index: int, count: int) -> float:
    return LEFT + (index + 0.5) * PLOT_WIDTH / max(count, 1)


def _line(one: Series, times: Sequence[datetime], scale: _Even, axis: Axis) -> Iterator[str]:
    for run in _runs(one.values):
        points = [(_x(index, len(times)), scale.y(value)) for index, value in run]
        radius = 2.5 if len(times) <= 60 else 1.5
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="{one.colour} line" points="{path}"/>'
        for (index, value), (x, y) in zip(run, points, strict=True):
            tip = f"{_moment(times[index])}: {one.name} {axis.show(value)}"
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


def _labels(series: Sequence[Series], count: int, scale: _Even) -> Iterator[str]:
    """Names at the ends of lines, moved apart where they would meet."""
    ends = []
    for one in series:
        last = [(index, value) for index, value in enumerate(one.values) if value is not None][-1:]
        ends += [(scale.y(value), _x(index, count), one.name) for index, value in last]
    floor = HEIGHT - BOTTOM + 12.0
    for y, x, name in sorted(ends, reverse=True):
        floor = min(y + 4, floor - 12)
        yield f'<text class="name" x="{x + 6:.1f}" y="{floor:.1f}">{escape(name)}</text>'


class _Even:
    """From values to heights, evenly from zero, with ticks at round numbers."""

    note = ""

    def __init__(self, high: float, axis: Axis) -> None:
        step = axis.step(high / 4) if high > 0 else axis.step(0.25)
        self.ticks = [n * step for n in range(5)]

    def length(self, value: float) -> float:
        return PLOT_HEIGHT * value / self.ticks[-1]

    def y(self, value: float) -> float:
        return TOP + PLOT_HEIGHT - self.length(value)


class _ByPowers(_Even):
    """Seconds by powers, from the lowest that is not zero."""

    note = "by powers"

    def __init__(self, low: float, high: float) -> None:
        first = max((n for n, tick in enumerate(POWERS) if tick <= low), default=0)
        last = next((n for n, tick in enumerate(POWERS) if tick >= high), len(POWERS) - 1)
        self.ticks = list(POWERS[first : max(last, first + 1) + 1])

    def length(self, value: float) -> float:
        low, high = math.log(self.ticks[0]), math.log(self.ticks[-1])
        part = (math.log(max(value, self.ticks[0])) - low) / (high - low)
        return PLOT_HEIGHT * min(part, 1.0)


def _scale(series: Sequence[Series], known: Sequence[float], axis: Axis) -> _Even:
    """The scale for lines: by powers if it is about seconds, and the highest dwarf the lowest line."""
    high = max(known, default=0.0)
    lowest = sorted(value for value in series[0].values if value)
    if axis.step is time_step and lowest and high >= DWARFS * lowest[len(lowest) // 2]:
        return _ByPowers(min(value for value in known if value), high)
    return _Even(high, axis)


def _chart(
    title: str, times: Sequence[datetime], scale: _Even, axis: Axis, parts: Sequence[str]
) -> str:
    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(tick):.1f}" '
        f'y2="{scale.y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{scale.y(tick) + 4:.1f}" text-anchor="end">'
        f"{escape(axis.show(tick))}</text>"
        for tick in scale.ticks
    )
    if scale.note:
        grid += f'<text class="tick" x="{LEFT + 4}" y="{TOP + 10}">{scale.note}</text>'
    below = "".join([*_midnights(times), *_dates(times)])
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"{grid}{below}{''.join(parts)}</svg>"
    )


def _new_days(times: Sequence[datetime]) -> list[int]:
    """Where a day begins: the first time of each day but the first."""
    return [n for n in range(1, len(times)) if times[n].date() != times[n - 1].date()]


def _midnights(times: Sequence[datetime]) -> Iterator[str]:
    """A line where a day begins, unless there are too many."""
    days = _new_days(times)
    for index in days if len(days) <= MOST_MIDNIGHTS else ():
        x = LEFT + index * PLOT_WIDTH / len(times)
        yield f'<line class="midnight" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


def _dates(times: Sequence[datetime]) -> Iterator[str]:
    """A few times along the bottom: days where they begin, or else round hours."""
    days = _new_days(times)
    if len(days) > 1:
        every = math.ceil(len(days) / MOST_LABELS)
        yield from (_label(times, index, f"{times[index]:%b %d}") for index in days[::every])
        return
    for hours in (1, 2, 3, 6, 12, 24):
        found = [n for n, when in enumerate(times) if when.hour % hours == 0]
        if len(found) <= MOST_LABELS:
            break
    for index in found or range(min(1, len(times))):
        when = times[index]
        yield _label(times, index, f"{when:%b %d}" if when.hour == 0 else f"{when:%H:%M}")


def _label(times: Sequence[datetime], index: int, text: str) -> str:
    return (
        f'<text class="tick" x="{_x(index, len(times)):.1f}" y="{HEIGHT - 8}" '
        f'text-anchor="middle">{text}</text>'
    )


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
