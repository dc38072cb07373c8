"""When schedules tick, also when clocks are put forward or back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest

from pgqrs.ticks import after

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
