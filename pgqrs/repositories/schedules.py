"""Schedules: what is to be enqueued again and again.

A tick is enqueued and the schedule moved on in one transaction, with the schedule's row locked. So each
tick is enqueued once, however many look at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    Text,
    bindparam,
    cast,
    delete,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.errors import ScheduleExists, ScheduleNotFound
from pgqrs.models import schedules
from pgqrs.repositories.expressions import at, moment
from pgqrs.sqltypes import Json
from pgqrs.types import Schedule

COLUMNS = (
    schedules.c.name,
    schedules.c.queue_name,
    schedules.c.cron,
    schedules.c.every,
    schedules.c.timezone,
    schedules.c.missed,
    schedules.c.paused,
    schedules.c.starts_at,
    schedules.c.next_at,
    schedules.c.last_at,
    schedules.c.created_at,
    schedules.c.priority,
    schedules.c.codec,
    schedules.c.headers,
    schedules.c.payload,
)
"""In the order of the fields of `Schedule`."""
_NAMED = schedules.c.name == bindparam("schedule")
_GET = select(*COLUMNS).where(_NAMED)
_LOCK = select(*COLUMNS, moment("now")).where(_NAMED).with_for_update(skip_locked=True)
_LIST = select(*COLUMNS).order_by(schedules.c.name)
_DUE = (
    select(schedules.c.name)
    .where(~schedules.c.paused, schedules.c.next_at <= moment("now"))
    .order_by(schedules.c.next_at)
)
_NEXT = (
    select(schedules.c.next_at, moment("now"))
    .where(~schedules.c.paused)
    .order_by(schedules.c.next_at)
    .limit(1)
)


def create(
    connection: Connection,
    values: dict[str, Any],
    *,
    replace: bool,
    first: Callable[[datetime], datetime],
    now: datetime | None,
) -> Schedule:
    """A new schedule, whose first tick is what `first` makes of the time.

    Its payload and headers are JSON texts.
    """
    name = values["name"]
    found = connection.execute(_GET, {"schedule": name}).first()
    if found is not None:
        if not replace:
            raise ScheduleExists(name)
        connection.execute(delete(schedules).where(_NAMED), {"schedule": name})
    asked = connection.execute(select(moment("now")), at(now=(now, 0.0))).scalar_one()
    json = {part: _json(values[part]) for part in ("headers", "payload")}
    times = {"starts_at": asked, "next_at": first(asked), "created_at": asked}
    connection.execute(insert(schedules).values(**(values | json | times), paused=False))
    return get(connection, name)


def _json(text: str | None) -> ColumnElement[Any]:
    return cast(literal(text, Text()), Json())


def get(connection: Connection, name: str) -> Schedule:
    """The schedule of this name."""
    row = connection.execute(_GET, {"schedule": name}).first()
    if row is None:
        raise ScheduleNotFound(name)
    return _schedule(row)


def find(connection: Connection) -> list[Schedule]:
    """All schedules, by name."""
    return [_schedule(row) for row in connection.execute(_LIST)]


def remove(connection: Connection, name: str) -> None:
    """Forget a schedule."""
    if connection.execute(delete(schedules).where(_NAMED), {"schedule": name}).rowcount == 0:
        raise ScheduleNotFound(name)


def change(connection: Connection, name: str, **values: Any) -> Schedule:
    """Pause it, resume it, move it on."""
    connection.execute(update(schedules).where(_NAMED).values(**values), {"schedule": name})
    return get(connection, name)


def due(connection: Connection, *, now: datetime | None) -> list[str]:
    """The names of those whose next tick has come."""
    return list(connection.execute(_DUE, at(now=(now, 0.0))).scalars())


def lock(
    connection: Connection, name: str, *, now: datetime | None
) -> tuple[Schedule, datetime] | None:
    """A schedule and the time, for the one who ticks; None if somebody else is at it."""
    row = connection.execute(_LOCK, {"schedule": name} | at(now=(now, 0.0))).first()
    return None if row is None else (_schedule(row[:-1]), row[-1])


def next_in(connection: Connection, *, now: datetime | None) -> float | None:
    """Seconds until the next tick of any; None if there is none."""
    row = connection.execute(_NEXT, at(now=(now, 0.0))).first()
    return None if row is None else float((row[0] - row[1]).total_seconds())


def _schedule(row: Sequence[Any]) -> Schedule:
    return Schedule(*row)
