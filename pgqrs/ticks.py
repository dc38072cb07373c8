"""When a schedule ticks: pure functions of the schedule and the time.

Cron expressions are read in the schedule's time zone, as Debian's cron does: what is due in the hour
that is skipped in spring runs right after it, and what is due in the hour that comes twice in autumn
runs once, unless it runs every hour or more often anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import islice
from typing import NamedTuple
from zoneinfo import ZoneInfo

from pgqrs.errors import InvalidArgument
from pgqrs.types import MissedTicks, Schedule

LATE = timedelta(seconds=60)
"""A tick that is noticed later than this was missed."""
AT_ONCE = 1000
"""Ticks enqueued in one transaction."""


class Ticks(NamedTuple):
    """Those to enqueue now, and when the next one is."""

    due: list[datetime]
    next_at: datetime


def after(
    when: datetime, *, cron: str | None, every: float | None, timezone: str, start: datetime
) -> Iterator[datetime]:
    """The ticks after this time, in UTC, one by one."""
    if every is not None:
        step = timedelta(seconds=every)
        count = max(0, (when - start) // step) + 1
        while True:
            yield start + count * step
            count += 1
    zone = zone_named(timezone)
    for found in _cron(cron or "", when.astimezone(zone)):
        yield found.astimezone(UTC)


def check(*, cron: str | None, every: float | None, timezone: str) -> None:
    """Raise if this is no schedule."""
    zone_named(timezone)
    if (cron is None) == (every is None):
        raise InvalidArgument("cron", "give a cron expression or an interval, one of them")
    if cron is not None:
        next(_cron(cron, datetime.now(UTC)))
    elif every is not None and every < 1:
        raise InvalidArgument("every", f"expected at least a second, got {every!r}")


def zone_named(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except Exception as exc:
        raise InvalidArgument("timezone", f"{name!r} is not known here") from exc


def _cron(expression: str, when: datetime) -> Iterator[datetime]:
    library = import_module("cronsim")  # not when pgqrs is imported
    try:
        found: Iterator[datetime] = library.CronSim(expression, when)
    except library.CronSimError as exc:
        raise InvalidArgument("cron", f"{expression!r}: {exc}") from exc
    return found


def decide(schedule: Schedule, now: datetime) -> Ticks:
    """What to do about a schedule at this time."""
    if schedule.next_at > now:
        return Ticks([], schedule.next_at)
    due = [schedule.next_at]
    following = _following(schedule, schedule.next_at)
    most = AT_ONCE if schedule.missed is MissedTicks.ALL else None
    for tick in islice(following, most):
        if tick > now:
            return Ticks(_to_run(schedule, due, now), tick)
        due.append(tick)
        if schedule.missed is not MissedTicks.ALL:
            due = due[-1:]
    return Ticks(due[:-1], due[-1])  # more than fit: the rest comes with the next look


def between(schedule: Schedule, start: datetime, end: datetime) -> list[datetime]:
    """The ticks from one time, up to another and without it."""
    found: list[datetime] = []
    for tick in _following(schedule, start - timedelta(microseconds=1)):
        if tick >= end:
            return found
        found.append(tick)
    return found


def _following(schedule: Schedule, when: datetime) -> Iterator[datetime]:
    return after(
        when,
        cron=schedule.cron,
        every=schedule.every,
        timezone=schedule.timezone,
        start=schedule.starts_at,
    )


def _to_run(schedule: Schedule, due: list[datetime], now: datetime) -> list[datetime]:
    if schedule.missed is MissedTicks.SKIP:
        return [tick for tick in due if now - tick <= LATE]
    return due
