"""Counting, read-only. These look at every message of a queue: meant for people and dashboards, not
for loops. A message that is past its expiry and that nobody holds is not counted: it will never be
handed out, and the next dequeue takes it to the archive.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, bindparam, case, func, or_, select
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.models import archive, messages, queues
from pgqrs.repositories.expressions import at, moment
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.sqltypes import BigId
from pgqrs.types import ArchiveReason, QueueStats

_returned = and_(messages.c.vt <= moment("now"), messages.c.blocked == UNBLOCKED)
_expires_later = or_(messages.c.expires_at.is_(None), messages.c.expires_at > moment("now"))
_due = and_(or_(messages.c.ready, _returned), _expires_later)
_waits = and_(~messages.c.ready, ~_returned)
_blocked = messages.c.blocked != UNBLOCKED
_held = messages.c.consumer_worker_id.is_not(None)


def _count(condition: ColumnElement[bool]) -> ColumnElement[Any]:
    return func.count(case((condition, 1)))


_LIVE = (
    select(
        queues.c.queue_name,
        queues.c.paused,
        _count(and_(messages.c.id.is_not(None), _due)),
        _count(and_(_waits, ~_blocked, ~_held, _expires_later)),
        _count(and_(_waits, ~_blocked, _held)),
        _count(and_(_blocked, _expires_later)),
        func.min(case((_due, messages.c.enqueued_at)), type_=messages.c.enqueued_at.type),
        moment("now"),
    )
    .join_from(queues, messages, messages.c.queue_id == queues.c.id, isouter=True)
    .group_by(queues.c.id, queues.c.queue_name, queues.c.paused)
    .order_by(queues.c.queue_name)
)
_ENDED = (
    select(queues.c.queue_name, archive.c.archive_reason, func.count())
    .join_from(archive, queues, archive.c.queue_id == queues.c.id)
    .group_by(queues.c.queue_name, archive.c.archive_reason)
)


def queue_stats(
    connection: Connection, queue: str | None, *, now: datetime | None
) -> list[QueueStats]:
    """What each queue, or this one, holds now."""
    live, ended = _LIVE, _ENDED
    if queue is not None:
        live = live.where(queues.c.queue_name == queue)
        ended = ended.where(queues.c.queue_name == queue)
    archived: dict[str, dict[ArchiveReason, int]] = {}
    for name, reason, count in connection.execute(ended):
        archived.setdefault(name, {})[reason] = count
    return [
        QueueStats(
            queue=name,
            paused=paused,
            ready=ready,
            delayed=delayed,
            leased=leased,
            blocked=blocked,
            oldest_age=None if oldest is None else max(0.0, (asked - oldest).total_seconds()),
            archived={reason: archived.get(name, {}).get(reason, 0) for reason in ArchiveReason},
        )
        for name, paused, ready, delayed, leased, blocked, oldest, asked in connection.execute(
            live, at(now=(now, 0.0))
        )
    ]


_UNFINISHED = (
    select(func.count())
    .join_from(queues, messages, messages.c.queue_id == queues.c.id)
    .where(
        queues.c.queue_name == bindparam("queue"),
        messages.c.id <= bindparam("through", type_=BigId),
        or_(_due, and_(_blocked, _expires_later), and_(_held, messages.c.vt <= moment("soon"))),
    )
)


def unfinished(
    connection: Connection, queue: str, *, through: int, within: float, now: datetime | None
) -> int:
    """How many messages up to this id can be claimed now, or are held by who may lose them in the next
    seconds.
    """
    bound = {"queue": queue, "through": through} | at(now=(now, 0.0), soon=(now, within))
    return int(connection.execute(_UNFINISHED, bound).scalar_one())
