"""Schedules: what is to be enqueued again and again.

A tick is enqueued and the schedule moved on in one transaction, with the schedule's row locked. So each
tick is enqueued once, however many look at the same time. When ticks come is computed before, outside of
the transaction: whoever has the lock checks that the row is still as it was then.

A schedule that cannot tick says why (`error`, `failing_since`) and is left alone until `retry_at`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Text,
    bindparam,
    cast,
    delete,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.errors import ScheduleExists, ScheduleNotFound
from pgqrs.models import schedules
from pgqrs.repositories.expressions import at, moment
from pgqrs.repositories.reading import bare, telling
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
    schedules.c.workflow,
    schedules.c.options,
    schedules.c.error,
    schedules.c.failing_since,
    schedules.c.retry_at,
)
"""In the order of the fields of `Schedule`."""
JSON = ("headers", "payload", "options")
TIMING = ("cron", "every", "timezone")
SHORTEST, LONGEST = timedelta(seconds=5), timedelta(minutes=5)
"""After which a schedule that cannot tick is tried again: each time after as long as it has failed."""
MOST_BACKFILLS = 20
_HEALTHY = {"error": None, "failing_since": None, "retry_at": None}
_NAMED = schedules.c.name == bindparam("schedule")
_GET = select(*COLUMNS).where(_NAMED)
_GET_AT = select(*COLUMNS, moment("now")).where(_NAMED)
_LOCK = select(*COLUMNS).where(_NAMED).with_for_update(skip_locked=True)
_LOCK_FOR_CHANGE = select(*COLUMNS, moment("now")).where(_NAMED).with_for_update()
_LIST = select(*COLUMNS).order_by(schedules.c.name)
_LIST_BARE = select(*bare(COLUMNS)).order_by(schedules.c.name)
_DUE = (
    select(schedules.c.name)
    .where(
        ~schedules.c.paused,
        schedules.c.next_at <= moment("now"),
        or_(schedules.c.retry_at.is_(None), schedules.c.retry_at <= moment("now")),
    )
    .order_by(schedules.c.next_at)
)
_NEXT = select(func.min(func.coalesce(schedules.c.retry_at, schedules.c.next_at)), moment("now"))
_FAILING = (
    select(schedules.c.error, schedules.c.failing_since, schedules.c.retry_at, moment("now"))
    .where(_NAMED)
    .with_for_update(skip_locked=True)
)
_BACKFILL = select(schedules.c.backfill).where(_NAMED).with_for_update()
First = Callable[[datetime, datetime], datetime]
"""The first tick after a time, of a schedule that starts at another."""


@cache
def _insert(dialect: str) -> Any:
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    return insert(schedules)


def create(
    connection: Connection,
    values: dict[str, Any],
    *,
    replace: bool,
    first: First,
    now: datetime | None,
) -> Schedule:
    """A new schedule, or the one of this name, changed where it differs. What is JSON is given as text.

    A schedule keeps what still holds: with the same timing its next tick, and in any case whether it is
    paused. A tick that is due already stays due.
    """
    name = values["name"]
    if _add(connection, values, first=first, now=now):
        return get(connection, name)
    if not replace:
        raise ScheduleExists(name)
    bound = {"schedule": name} | at(now=(now, 0.0))
    (*row, asked) = connection.execute(_LOCK_FOR_CHANGE, bound).one()
    found = _schedule(row)
    changed = _changes(found, values)
    if any(part in changed for part in TIMING):
        changed |= _new_times(found, values, asked, first)
    if found.error is not None:
        changed |= _HEALTHY
    if changed:
        stored = {part: _stored(part, value) for part, value in changed.items()}
        connection.execute(update(schedules).where(_NAMED).values(**stored), bound)
    return get(connection, name)


def _add(connection: Connection, values: dict[str, Any], *, first: First, now: Any) -> bool:
    asked = connection.execute(select(moment("now")), at(now=(now, 0.0))).scalar_one()
    times = {"starts_at": asked, "next_at": first(asked, asked), "created_at": asked}
    stored = {part: _stored(part, value) for part, value in values.items()}
    new = _insert(connection.dialect.name).values(**stored, **times, paused=False)
    added = connection.execute(new.on_conflict_do_nothing().returning(schedules.c.id))
    return added.first() is not None


def _changes(found: Schedule, values: dict[str, Any]) -> dict[str, Any]:
    attributes = {"queue_name": "queue"}
    changed: dict[str, Any] = {}
    for part, value in values.items():
        before = getattr(found, attributes.get(part, part))
        is_alike = _is_alike(before, value) if part in JSON else before == value
        if not is_alike:
            changed[part] = value
    return changed


def _is_alike(before: Any, text: str | None) -> bool:
    # As text: Python calls 1 and True equal.
    after = None if text is None else json.loads(text)
    return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)


def _new_times(
    found: Schedule, values: dict[str, Any], asked: datetime, first: First
) -> dict[str, Any]:
    keeps_start = found.every is not None and values["every"] is not None
    start = found.starts_at if keeps_start else asked
    next_at = found.next_at if found.next_at <= asked else first(asked, start)
    return {"starts_at": start, "next_at": next_at}


def _stored(part: str, value: Any) -> Any:
    return _json(value) if part in JSON else value


def _json(text: str | None) -> ColumnElement[Any]:
    return cast(literal(text, Text()), Json())


def get(connection: Connection, name: str) -> Schedule:
    """The schedule of this name."""
    with telling():
        row = connection.execute(_GET, {"schedule": name}).first()
    if row is None:
        raise ScheduleNotFound(name)
    return _schedule(row)


def get_at(connection: Connection, name: str, *, now: datetime | None) -> tuple[Schedule, datetime]:
    """The schedule of this name, and the time."""
    with telling():
        row = connection.execute(_GET_AT, {"schedule": name} | at(now=(now, 0.0))).first()
    if row is None:
        raise ScheduleNotFound(name)
    return _schedule(row[:-1]), row[-1]


def find(connection: Connection) -> list[Schedule]:
    """All schedules, by name."""
    with telling():
        return [_schedule(row) for row in connection.execute(_LIST)]


def find_bare(connection: Connection) -> list[Schedule]:
    """The same without what is JSON."""
    return [_schedule(row) for row in connection.execute(_LIST_BARE)]


def remove(connection: Connection, name: str) -> None:
    """Forget a schedule."""
    if connection.execute(delete(schedules).where(_NAMED), {"schedule": name}).rowcount == 0:
        raise ScheduleNotFound(name)


def change(connection: Connection, name: str, **values: Any) -> Schedule:
    """Pause it, or resume it."""
    connection.execute(update(schedules).where(_NAMED).values(**values), {"schedule": name})
    return get(connection, name)


def resume(connection: Connection, name: str) -> Schedule:
    """No longer paused; if it could not tick, it is tried again at once."""
    return change(connection, name, paused=False, retry_at=None)


def move_on(connection: Connection, name: str, *, next_at: datetime, last_at: datetime) -> None:
    """It has ticked."""
    values = {"next_at": next_at, "last_at": last_at, **_HEALTHY}
    connection.execute(update(schedules).where(_NAMED).values(**values), {"schedule": name})


def due(connection: Connection, *, now: datetime | None) -> list[str]:
    """The names of those whose next tick has come."""
    return list(connection.execute(_DUE, at(now=(now, 0.0))).scalars())


def lock(connection: Connection, name: str) -> Schedule | None:
    """A schedule, for the one who ticks; None if another worker is at it, or it is gone."""
    row = connection.execute(_LOCK, {"schedule": name}).first()
    return None if row is None else _schedule(row)


def next_in(connection: Connection, *, now: datetime | None) -> float | None:
    """Seconds until the next tick of any; None if there is none."""
    found = connection.execute(_NEXT.where(~schedules.c.paused), at(now=(now, 0.0))).one()
    return None if found[0] is None else float((found[0] - found[1]).total_seconds())


def fail(connection: Connection, name: str, error: str, *, now: datetime | None) -> bool:
    """A schedule could not tick: leave it alone for a while. True if that is news."""
    found = connection.execute(_FAILING, {"schedule": name} | at(now=(now, 0.0))).first()
    if found is None:
        return False
    before, since, retry_at, asked = found
    if retry_at is not None and retry_at > asked:
        return False  # another worker has noted it meanwhile
    since = since or asked
    pause = min(max(asked - since, SHORTEST), LONGEST)
    values = {"error": error, "failing_since": since, "retry_at": asked + pause}
    connection.execute(update(schedules).where(_NAMED).values(**values), {"schedule": name})
    return bool(before != error)


class Backfill(NamedTuple):
    """Ticks of the past that are being enqueued, and from which on they are still to be."""

    start: datetime
    end: datetime
    left: datetime

    @property
    def is_begun(self) -> bool:
        return self.left != self.start


def lock_backfills(connection: Connection, name: str) -> list[Backfill]:
    """The backfills of a schedule that have not come to their end. Nobody else goes on with them
    meanwhile.
    """
    row = connection.execute(_BACKFILL, {"schedule": name}).first()
    if row is None:
        raise ScheduleNotFound(name)
    return [
        Backfill(*map(datetime.fromisoformat, line.split("/")))
        for line in (row[0] or "").splitlines()
    ]


def note_backfills(connection: Connection, name: str, backfills: Sequence[Backfill]) -> None:
    """How far backfills have come. Of those that nobody goes on with, the oldest are forgotten."""
    lines = ["/".join(part.isoformat() for part in one) for one in backfills[-MOST_BACKFILLS:]]
    text = "\n".join(lines) or None
    connection.execute(update(schedules).where(_NAMED).values(backfill=text), {"schedule": name})


def _schedule(row: Sequence[Any]) -> Schedule:
    return Schedule(*row)
