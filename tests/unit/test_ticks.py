"""When schedules tick, also when clocks are put forward or back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import pgqrs.ticks
from pgqrs.ticks import after, between, decide
from pgqrs.types import MissedTicks, Schedule

BERLIN = ZoneInfo("Europe/Berlin")
START = datetime(2026, 1, 1, tzinfo=UTC)


def ticks(cron: str, since: datetime, count: int, timezone: str = "Europe/Berlin") -> list[str]:
    found = after(since, cron=cron, every=None, timezone=timezone, start=START)
    return [tick.astimezone(ZoneInfo(timezone)).isoformat() for tick in islice(found, count)]


def test_a_daily_tick_stays_at_its_hour_when_clocks_change() -> None:
    """In Berlin on 2026-03-29 and 2026-10-25."""
    spring = ticks("0 9 * * *", datetime(2026, 3, 28, 12, tzinfo=BERLIN), 2)
    assert spring == ["2026-03-29T09:00:00+02:00", "2026-03-30T09:00:00+02:00"]
    autumn = ticks("0 9 * * *", datetime(2026, 10, 24, 12, tzinfo=BERLIN), 2)
    assert autumn == ["2026-10-25T09:00:00+01:00", "2026-10-26T09:00:00+01:00"]


def test_what_falls_into_the_missing_hour_runs_after_it() -> None:
    found = ticks("30 2 * * *", datetime(2026, 3, 28, 12, tzinfo=BERLIN), 2)
    assert found == ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]


def test_what_falls_into_the_double_hour_runs_once() -> None:
    found = ticks("30 2 * * *", datetime(2026, 10, 24, 12, tzinfo=BERLIN), 2)
    assert found == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]


def test_every_hour_is_every_hour() -> None:
    found = after(
        datetime(2026, 10, 24, 22, 30, tzinfo=UTC),
        cron="0 * * * *",
        every=None,
        timezone="Europe/Berlin",
        start=START,
    )
    times = list(islice(found, 5))
    assert {b - a for a, b in pairwise(times)} == {timedelta(hours=1)}


@pytest.mark.parametrize("seconds", [1, 90, 86_400])
def test_intervals_are_counted_from_their_start(seconds: int) -> None:
    since = START + timedelta(days=3, seconds=1)
    first = next(after(since, cron=None, every=seconds, timezone="UTC", start=START))
    assert since < first <= since + timedelta(seconds=seconds)
    assert (first - START) % timedelta(seconds=seconds) == timedelta(0)


def schedule(missed: str, **timing: Any) -> Schedule:
    given = dict.fromkeys(field.name for field in fields(Schedule)) | {
        "timezone": "Europe/Berlin",
        "starts_at": START,
        "next_at": START + timedelta(seconds=60),
        "missed": MissedTicks(missed),
    }
    return Schedule(**(given | timing))


@pytest.mark.parametrize(
    "timing",
    [
        {"every": 7.5},
        {"cron": "*/5 * * * *"},
        {"cron": "0 3 * * *"},
        {"cron": "30 2 29 2 *"},
        {"cron": "*/7 * * 1 * *"},
        {"cron": "* * 2 * 10 *"},
    ],
)
@pytest.mark.parametrize("days", [0.01, 1, 30, 300, 800])
def test_the_last_tick_is_found_as_if_all_were_gone_through(
    timing: dict[str, Any], days: float
) -> None:
    now = START + timedelta(days=days, seconds=13.3)
    wanted = schedule("one", **timing)
    decided = decide(wanted, now)
    (last,) = decided.due
    assert wanted.next_at <= last <= now < decided.next_at
    assert not list(between(wanted, last + timedelta(seconds=0.1), now))
    assert decided.next_at == next(between(wanted, now, now + timedelta(days=3000)))


def test_the_last_tick_of_years_takes_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[datetime] = []
    search = pgqrs.ticks._cron

    def count(expression: str, when: datetime) -> Iterator[datetime]:
        searches.append(when)
        return search(expression, when)

    monkeypatch.setattr(pgqrs.ticks, "_cron", count)
    decide(schedule("one", cron="* * * * * *"), START + timedelta(days=3650))
    assert len(searches) < 50


def test_in_the_double_hour_no_tick_is_in_the_past() -> None:
    second = datetime(2026, 10, 25, 1, 15, tzinfo=UTC)  # 02:15 for the second time
    (found,) = ticks("30 2 * * *", second, 1)
    assert found == "2026-10-26T02:30:00+01:00"


def test_an_interval_is_filled_back_also_before_its_start() -> None:
    hour = schedule("one", every=3600.0)
    found = list(between(hour, START - timedelta(hours=3), START + timedelta(hours=2)))
    assert found == [START + timedelta(hours=n) for n in range(-3, 2)]
