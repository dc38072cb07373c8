"""The report: its numbers, its page, its command."""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import insert

import pgqrs
from pgqrs.cli.app import app
from pgqrs.models import archive
from pgqrs.spark.charts import Axis, Series, bars, lines
from pgqrs.spark.export import utc_day
from pgqrs.spark.hours import Hour, as_json, from_json, totals
from pgqrs.spark.pages import COUNTS, MOST_POINTS, RATES, TIMES, count, duration, page
from pgqrs.spark.report import report, summarize

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def finished(
    number: int,
    *,
    queue: int = 1,
    at: datetime = NOON,
    reason: str = "completed",
    wait: float | None = 1.0,
    run: float = 1.0,
    attempts: int = 1,
    released: int = 0,
) -> dict[str, Any]:
    """A row of the archive that ended at a time."""
    dequeued = None if wait is None else at - timedelta(seconds=run)
    begun = at if dequeued is None else dequeued
    return {
        "original_message_id": number,
        "queue_id": queue,
        "archive_reason": reason,
        "priority": 0,
        "read_ct": attempts + released,
        "released_ct": released,
        "enqueued_at": begun - timedelta(seconds=wait or 0.0),
        "dequeued_at": dequeued,
        "archived_at": at,
        "payload": "{}",
    }


ROWS = [
    *(
        finished(n, wait=float(n), run=n / 100, at=NOON + timedelta(minutes=n % 60))
        for n in range(100)
    ),
    finished(100, reason="failed", attempts=3, released=2, at=NOON + timedelta(hours=3)),
    finished(
        101, reason="expired", wait=None, attempts=0, at=NOON + timedelta(hours=3, minutes=59)
    ),
    finished(102, queue=2, reason="manual", wait=5.0, run=7.0),
]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[pgqrs.Store]:
    kind = getattr(request, "param", "postgres")
    url = request.getfixturevalue(f"{kind}_database")
    with pgqrs.Store(url, upgrade=True) as store:
        for name in ("emails", "<b>orders</b>"):
            store.admin().create_queue(name)
        store.write(lambda connection: connection.execute(insert(archive), ROWS))
        yield store


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
@pytest.mark.smoke
def test_the_numbers_of_every_hour(spark: Any, store: pgqrs.Store, tmp_path: Path) -> None:
    files = report.run_inline(str(tmp_path / "out"), store=store)
    hours = from_json(Path(files["json"]).read_text())
    assert {hour.queue for hour in hours} == {"<b>orders</b>", "emails"}
    orders, first, later = hours
    assert (first.hour, first.ended, first.completed, first.failure_rate) == (NOON, 100, 100, 0.0)
    assert [first.wait_p50, first.wait_p90, first.wait_p99] == pytest.approx([49, 89, 98], abs=1)
    assert [first.run_p50, first.run_p90, first.run_p99] == pytest.approx(
        [0.49, 0.89, 0.98], abs=0.01
    )
    assert (later.hour, later.ended, later.failed, later.expired) == (
        NOON + timedelta(hours=3),
        2,
        1,
        1,
    )
    assert (later.failure_rate, later.retries, later.wait_p50) == (0.5, 2, 1.0)
    assert (orders.manual, orders.wait_p99, orders.run_p99) == (1, 5.0, 7.0)
    assert files["rows"] == 3
    assert spark.read.parquet(files["parquet"]).count() == 3
    assert "&lt;b&gt;orders" in Path(files["html"]).read_text()
    assert "<b>orders" not in Path(files["html"]).read_text()


def test_a_part_of_the_archive(spark: Any, store: pgqrs.Store, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    since, until = NOON + timedelta(hours=1), NOON + timedelta(hours=4)
    files = report.run_inline(out, ["emails"], since, until, store=store)
    assert [hour.ended for hour in from_json(Path(files["json"]).read_text())] == [2]
    both = report.run_inline(out, ["emails", "<b>orders</b>"], NOON, since, store=store)
    assert [hour.ended for hour in from_json(Path(both["json"]).read_text())] == [1, 100]
    nothing = report.run_inline(out, None, NOON - timedelta(days=1), NOON, store=store)
    assert from_json(Path(nothing["json"]).read_text()) == []
    assert "Nothing ended" in Path(nothing["html"]).read_text()


def test_the_command(spark: Any, store: pgqrs.Store, tmp_path: Path) -> None:
    url = store.engine.url.render_as_string(hide_password=False)
    called = ["--dsn", url, "spark", "report", "--out", str(tmp_path / "out"), "--key", "today"]
    shown = CliRunner().invoke(app, called, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"emails +102 .* 0\.98% +2 ", shown.stdout)
    assert (tmp_path / "out" / "report.html").exists()
    again = CliRunner().invoke(app, [*called, "--json"], catch_exceptions=False)
    assert len(json.loads(again.stdout)["hours"]) == 3
    assert len(store.workflows.list_runs()) == 1  # the same key, the same run
    wrong = CliRunner().invoke(app, [*called[:4], "--queue", "nowhere"])
    assert (wrong.exit_code, "nowhere" in wrong.output) == (1, True)
    swept = CliRunner().invoke(app, [*called[:3], "sweep", str(tmp_path / "out" / "steps")])
    assert "kept 1 on record" in swept.stdout


# The page, without Spark


ENDED = """
SELECT 'q' AS queue, 'completed' AS archive_reason, 1 AS read_ct, 0 AS released_ct,
    ended AS enqueued_at, ended AS dequeued_at, ended AS archived_at
FROM VALUES (timestamp'2026-11-16 20:10:00Z'), (timestamp'2026-11-16 20:50:00Z') AS of(ended)
"""


def test_hours_and_days_are_those_of_utc(spark: Any) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")  # half an hour off
    try:
        rows = spark.sql(ENDED)
        (hour,) = summarize(rows).selectExpr("unix_seconds(hour) AS start", "ended").collect()
        (day,) = rows.selectExpr(f"CAST({utc_day('archived_at')} AS STRING)").distinct().collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert datetime.fromtimestamp(hour.start, UTC) == datetime(2026, 11, 16, 20, tzinfo=UTC)
    assert (hour.ended, day[0]) == (2, "2026-11-16")


def hours_of(queue: str, length: int) -> list[Hour]:
    return [
        Hour(
            queue,
            NOON + timedelta(hours=n),
            10 + n,
            8 + n,
            2,
            0,
            0,
            n,
            0.1,
            1.0 + n,
            None,
            0.01,
            70.0,
            1e5,
        )
        for n in range(length)
        if n % 7
    ]


class Page(html.parser.HTMLParser):
    """Notes what could be loaded, what is open, and what has no name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        given = dict(attributes)
        self.seen.append(tag)
        self.loads += [name for name in ("src", "href", "xlink:href", "onload") if name in given]
        if tag == "svg":
            assert given["role"] == "img"
            assert given["aria-label"]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = page([*hours_of("a", 30), *hours_of("b", 30)])
    found = Page(text)
    assert found.open == []
    assert found.loads == []
    assert found.seen.count("svg") == 10
    assert "script" not in found.seen
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize(
    ("axis", "high", "ticks"),
    [
        (COUNTS, 3, ["0", "1", "2", "3", "4"]),
        (COUNTS, 9, ["0", "3", "6", "9", "12"]),
        (RATES, 0.07, ["0%", "2%", "4%", "6%", "8%"]),
        (TIMES, 0.03, ["0 s", "10 ms", "20 ms", "30 ms", "40 ms"]),
        (TIMES, 100.0, ["0 s", "30 s", "1 min", "1.5 min", "2 min"]),
        (TIMES, 7000.0, ["0 s", "30 min", "1 h", "1.5 h", "2 h"]),
        (TIMES, 3e5, ["0 s", "1 d", "2 d", "3 d", "4 d"]),
    ],
)
def test_ticks_are_round(axis: Axis, high: float, ticks: list[str]) -> None:
    text = lines("a chart", [NOON], [Series("p50", "low", [high])], axis)
    assert re.findall('text-anchor="end">([^<]*)<', text) == ticks


def test_midnight_is_marked() -> None:
    series = (Series("retries", "other", [1.0] * 30),)
    times = [NOON + timedelta(hours=n) for n in range(30)]
    text = bars("a chart", times, series, COUNTS)
    assert text.count('class="midnight"') == 1
    labels = re.findall('text-anchor="middle">([^<]*)<', text)
    assert labels == ["12:00", "18:00", "Nov 17", "06:00", "12:00"]
    days = [NOON + timedelta(hours=n) for n in range(24 * 10)]
    text = bars("a chart", days, (Series("retries", "other", [1.0] * 240),), COUNTS)
    assert text.count('class="midnight"') == 10
    assert re.findall('text-anchor="middle">([^<]*)<', text)[:2] == ["Nov 17", "Nov 19"]


def test_a_line_that_others_dwarf_is_seen() -> None:
    def heights(p99: float) -> list[float]:
        series = [Series("p50", "low", [0.02, 0.03]), Series("p99", "high", [p99, p99])]
        text = lines("a chart", [NOON, NOON + timedelta(hours=1)], series, TIMES)
        assert ("by powers" in text) == (p99 > 1)
        return [float(y) for y in re.findall(r'<circle [^>]*cy="([\d.]+)"', text)]

    for p99 in (0.5, 300.0):
        low, other, *high = heights(p99)
        assert low - other > 1  # it does not lie on the ground
        assert all(height < 80 for height in high)  # in the upper half


def test_a_long_time_is_shown_in_pieces() -> None:
    text = page(hours_of("a", 24 * 365))
    assert "Ended per 37 hours" in text
    assert text.count("<rect") <= 4 * MOST_POINTS
    assert len(hours_of("a", 24 * 365)) == text.count("<tr>") - 3


def test_rows_survive_json() -> None:
    hours = hours_of("a", 5)
    assert from_json(as_json(hours)) == hours


def test_totals() -> None:
    (total,) = totals(hours_of("a", 3))
    assert (total.ended, total.per_hour, total.failure_rate) == (23, 11.5, 4 / 23)
    assert (total.wait_p50, total.wait_p99, total.run_p99) == (0.1, None, 1e5)
    assert totals([]) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.5, "0.5"), (1968.4, "1968"), (33_300, "33.3k"), (1e6, "1M"), (2.5e9, "2.5G")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert count(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.0123, "12.3 ms"),
        (59, "59 s"),
        (90, "1.5 min"),
        (1e6, "11.6 d"),
    ],
)
def test_durations_have_the_unit_that_suits_them(value: float | None, shown: str) -> None:
    assert duration(value) == shown
