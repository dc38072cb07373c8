"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from html import escape
from itertools import groupby

from pgqrs.spark.charts import Axis, Series, bars, decimal_step, lines, time_step, whole_step
from pgqrs.spark.hours import Hour, Total, totals

MOST_CHARTS = 12
"""Queues with charts, the busiest; the others are in the tables."""
MOST_POINTS = 240
"""Of a chart: what is longer is shown in pieces of several hours."""

STYLE = """
:root { color-scheme: light dark;
  --ground: #fcfcfb; --card: #ffffff; --ink: #1d1d1b; --soft: #5c5b57; --rule: #e4e3df;
  --good: #2a78d6; --bad: #d03b3b; --other: #98968f;
  --low: #86b6ef; --middle: #2a78d6; --high: #104281; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #161615; --card: #1e1e1c; --ink: #f2f1ed; --soft: #b3b1a9; --rule: #383733;
  --good: #4c93e6; --bad: #ef6a63; --other: #8b897f;
  --low: #2f66a8; --middle: #5b9ee9; --high: #b7d3f6; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 1240px; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 19px; margin: 36px 0 8px }
h3 { font-size: 14px; margin: 0 0 4px; font-weight: 600 }
p { margin: 4px 0; color: var(--soft) }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 }
.tile, .chart { padding: 12px 16px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px }
.tile b { display: block; font-size: 24px; font-weight: 600 } .tile span { color: var(--soft) }
.charts { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)) }
.key { display: inline-block; margin-right: 14px; color: var(--soft); font-size: 13px }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px }
svg { display: block; width: 100%; height: auto }
svg text { fill: var(--soft); font-size: 11px } svg .name { fill: var(--ink) }
.grid { stroke: var(--rule) } .midnight { stroke: var(--soft); stroke-dasharray: 2 3 }
.line { fill: none; stroke-width: 2 } .dot { stroke: none }
rect.good { fill: var(--good) } rect.bad { fill: var(--bad) } rect.other { fill: var(--other) }
.low { stroke: var(--low); fill: var(--low) } .middle { stroke: var(--middle); fill: var(--middle) }
.high { stroke: var(--high); fill: var(--high) } .line.low, .line.middle, .line.high { fill: none }
i.good { background: var(--good) } i.bad { background: var(--bad) }
i.other { background: var(--other) } i.low { background: var(--low) }
i.middle { background: var(--middle) } i.high { background: var(--high) }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule) }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere }
th { color: var(--soft); font-weight: 600 }
summary { cursor: pointer; margin: 10px 0; color: var(--soft) }
@media (max-width: 600px) { body { padding: 16px 8px 48px } .chart { padding: 10px 8px }
  svg text { font-size: 16px } .tile { flex: 1 1 40% } th, td { padding: 5px 6px } }
@media print { .chart { break-inside: avoid } }
"""
HEADINGS = (
    *("hour", "ended", "failed", "failure rate", "retries"),
    *("wait p50", "p90", "p99", "run p50", "p90", "p99"),
)


def page(hours: Sequence[Hour]) -> str:
    """The page."""
    queues = {name: list(each) for name, each in groupby(hours, key=lambda hour: hour.queue)}
    summed = totals(hours)
    shown = [total.queue for total in summed]
    sections = "".join(
        _section(name, queues[name], charts=index < MOST_CHARTS) for index, name in enumerate(shown)
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Report on queues</title><style>{STYLE}</style></head><body><main>"
        f"<h1>Report on queues</h1>{_period(hours)}{_tiles(hours)}{_totals(summed)}{sections}"
        "</main></body></html>\n"
    )


def _period(hours: Sequence[Hour]) -> str:
    if not hours:
        return "<p>Nothing ended in this time.</p>"
    first = min(hour.hour for hour in hours)
    last = max(hour.hour for hour in hours) + timedelta(hours=1)
    return f"<p>What ended from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC</p>"


def _tiles(hours: Sequence[Hour]) -> str:
    ended, failed = sum(hour.ended for hour in hours), sum(hour.failed for hour in hours)
    facts = [
        ("messages ended", count(ended)),
        ("of them failed", percent(failed / ended if ended else 0.0)),
        ("retries", count(sum(hour.retries for hour in hours))),
        ("queues", count(len({hour.queue for hour in hours}))),
    ]
    tiles = "".join(
        f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in facts
    )
    return f'<div class="tiles">{tiles}</div>'


def _totals(summed: Iterable[Total]) -> str:
    rows = [
        (
            *(escape(total.queue), count(total.ended), count(total.per_hour)),
            *(percent(total.failure_rate), count(total.retries)),
            *(duration(value) for value in (total.wait_p50, total.wait_p99)),
            *(duration(value) for value in (total.run_p50, total.run_p99)),
        )
        for total in summed
    ]
    headings = ("queue", "ended", "per hour", "failure rate", "retries")
    times = ("wait, typical", "p99 at worst", "run, typical", "p99 at worst")
    return _table("All queues", (*headings, *times), rows)


def _section(queue: str, hours: Sequence[Hour], *, charts: bool) -> str:
    drawn = f'<div class="charts">{"".join(_charts(queue, hours))}</div>' if charts else ""
    rows = [
        (
            *(f"{hour.hour:%Y-%m-%d %H:%M}", count(hour.ended), count(hour.failed)),
            *(percent(hour.failure_rate), count(hour.retries)),
            *(duration(value) for value in (hour.wait_p50, hour.wait_p90, hour.wait_p99)),
            *(duration(value) for value in (hour.run_p50, hour.run_p90, hour.run_p99)),
        )
        for hour in hours
    ]
    table = _table(f"{queue}, hour by hour", HEADINGS, rows)
    return (
        f"<section><h2>{escape(queue)}</h2>{drawn}"
        f"<details><summary>{len(hours)} hours as a table</summary>{table}</details></section>"
    )


def _charts(queue: str, hours: Sequence[Hour]) -> Iterable[str]:
    pieces, length = _pieces(hours)
    times = [when for when, _ in pieces]
    per = "hour" if length == 1 else f"{length} hours"

    def summed(value: Callable[[Hour], int]) -> list[float]:
        return [float(sum(map(value, piece))) for _, piece in pieces]

    def worst(name: str) -> list[float | None]:
        return [
            max((v for hour in piece if (v := getattr(hour, name)) is not None), default=None)
            for _, piece in pieces
        ]

    ended = summed(lambda hour: hour.ended)
    failed = summed(lambda hour: hour.failed)
    throughput = (
        Series("completed", "good", summed(lambda hour: hour.completed)),
        Series("failed", "bad", failed),
        Series(
            "expired or ended by hand", "other", summed(lambda hour: hour.expired + hour.manual)
        ),
    )
    rate = [f / e if e else None for f, e in zip(failed, ended, strict=True)]
    troubles = (Series("retries", "other", summed(lambda hour: hour.retries)),)
    yield _figure(
        f"Ended per {per}", throughput, bars(f"{queue}: ended per {per}", times, throughput, COUNTS)
    )
    for what, title in (("wait", "Time until claimed"), ("run", "Time to run")):
        series = [
            Series(rank, colour, worst(f"{what}_{rank}"))
            for rank, colour in (("p50", "low"), ("p90", "middle"), ("p99", "high"))
        ]
        yield _figure(
            title, series, lines(f"{queue}: {title.lower()}, percentiles", times, series, TIMES)
        )
    failures = (Series("failed", "high", rate),)
    yield _figure("Failure rate", (), lines(f"{queue}: failure rate", times, failures, RATES))
    yield _figure(
        f"Retries per {per}", (), bars(f"{queue}: retries per {per}", times, troubles, COUNTS)
    )


def _pieces(hours: Sequence[Hour]) -> tuple[list[tuple[datetime, list[Hour]]], int]:
    """The time from the first hour to the last in pieces of so many hours, empty ones as well."""
    first = hours[0].hour
    span = round((hours[-1].hour - first) / timedelta(hours=1)) + 1
    length = math.ceil(span / MOST_POINTS)
    pieces: list[list[Hour]] = [[] for _ in range(math.ceil(span / length))]
    for hour in hours:
        pieces[round((hour.hour - first) / timedelta(hours=1)) // length].append(hour)
    return [
        (first + timedelta(hours=index * length), piece) for index, piece in enumerate(pieces)
    ], length


def _figure(title: str, series: Sequence[Series], drawing: str) -> str:
    keys = "".join(
        f'<span class="key"><i class="{one.colour}"></i>{one.name}</span>' for one in series
    )
    return f'<div class="chart"><h3>{title}</h3>{keys}{drawing}</div>'


def _table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table aria-label="{escape(caption)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def count(value: float) -> str:
    """A number of things."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and sign != "k"):
            return f"{value / size:.3g}{sign}"
    return f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def percent(value: float) -> str:
    """A part of the whole."""
    return f"{value * 100:.3g}%"


def duration(value: float | None) -> str:
    """Seconds, in the unit that suits them."""
    if not value:
        return "-" if value is None else "0 s"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1000:.3g} ms"


COUNTS, RATES = Axis(count, whole_step), Axis(percent, decimal_step)
TIMES = Axis(duration, time_step)
