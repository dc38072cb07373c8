"""When a schedule ticks: pure functions of the schedule and the time.

Cron expressions are read in the schedule's time zone, as Debian's cron does: what is due in the hour
that is skipped in spring runs right after it, and what is due in the hour that comes twice in autumn
runs once, unless it runs every hour or more often anyway.

A schedule may not have been looked at for years. So the last tick before a time is not found by going
through all before it: for an interval it is computed, for a cron expression the time in between is
halved until it is found, which takes some thirty searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import islice, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo

from pgqrs.errors import InvalidArgument
from pgqrs.types import MissedTicks, Schedule

LATE = timedelta(seconds=60)
"""A tick that is noticed later than this was missed."""
AT_ONCE = 250
"""Ticks enqueued in one transaction."""
_CLOSE = timedelta(seconds=0.5)
"""Ticks of cron are whole seconds apart."""


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
        # In the hour that comes twice, cron also finds what was in its first half.
        if (tick := found.astimezone(UTC)) > when:
            yield tick


def first_after(
    when: datetime, *, cron: str | None, every: float | None, timezone: str, start: datetime
) -> datetime:
    """The first tick after this time."""
    found = after(when, cron=cron, every=every, timezone=timezone, start=start)
    tick = next(found, None)
    if tick is None:
        raise InvalidArgument("cron", f"{cron!r} never comes")
    return tick


def check(*, cron: str | None, every: float | None, timezone: str, seconds: bool = False) -> None:
    """Raise if this is no schedule. With `seconds`, cron has six fields, the first of them seconds."""
    zone_named(timezone)
    if (cron is None) == (every is None):
        raise InvalidArgument("cron", "give a cron expression or an interval, one of them")
    if cron is not None:
        _check_fields(cron, 6 if seconds else 5)
        now = datetime.now(UTC)
        first_after(now, cron=cron, every=None, timezone=timezone, start=now)
    elif seconds:
        raise InvalidArgument("seconds", "it is about cron expressions, not about intervals")
    elif every is not None and every < 1:
        raise InvalidArgument("every", f"expected at least a second, got {every!r}")


def _check_fields(cron: str, expected: int) -> None:
    count = len(cron.split())
    if count == expected:
        return
    problem = f"{cron!r}: expected {expected} fields, got {count}"
    if (count, expected) == (6, 5):
        problem += "; seconds=True allows a first field of seconds"
    raise InvalidArgument("cron", problem)


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
    if schedule.missed is MissedTicks.ALL:
        return _all(schedule, now)
    last = _last(schedule, now)
    is_late = schedule.missed is MissedTicks.SKIP and now - last > LATE
    return Ticks([] if is_late else [last], _first_after(schedule, now))


def _all(schedule: Schedule, now: datetime) -> Ticks:
    due = [schedule.next_at]
    for tick in islice(following(schedule, schedule.next_at), AT_ONCE):
        if tick > now:
            return Ticks(due, tick)
        due.append(tick)
    return Ticks(due[:-1], due[-1])  # more than fit: the rest comes with the next look


def _last(schedule: Schedule, now: datetime) -> datetime:
    """The last tick up to this time; the next one of the schedule is not after it."""
    last = schedule.next_at
    if schedule.every is not None:
        step = timedelta(seconds=schedule.every)
        return max(last, schedule.starts_at + (now - schedule.starts_at) // step * step)
    until = now  # there is no tick between this and now
    while until - last > _CLOSE:
        middle = last + (until - last) / 2
        found = _first_after(schedule, middle)
        if found <= now:
            last = found
        else:
            until = middle
    return last


def between(schedule: Schedule, start: datetime, end: datetime) -> Iterator[datetime]:
    """The ticks from one time, up to another and without it. Those of an interval also before it was
    made: as if it had been counted from then.
    """
    if schedule.every is not None and start < schedule.starts_at:
        step = timedelta(seconds=schedule.every)
        earlier = schedule.starts_at - ((schedule.starts_at - start) // step + 2) * step
        schedule = replace(schedule, starts_at=earlier)
    found = following(schedule, start - timedelta(microseconds=1))
    return takewhile(lambda tick: tick < end, found)


def following(schedule: Schedule, when: datetime) -> Iterator[datetime]:
    """The ticks of a schedule after this time, one by one."""
    return after(
        when,
        cron=schedule.cron,
        every=schedule.every,
        timezone=schedule.timezone,
        start=schedule.starts_at,
    )


def _first_after(schedule: Schedule, when: datetime) -> datetime:
    return first_after(
        when,
        cron=schedule.cron,
        every=schedule.every,
        timezone=schedule.timezone,
        start=schedule.starts_at,
    )
