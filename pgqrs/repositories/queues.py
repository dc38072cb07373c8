"""Queues and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Text, bindparam, delete, func, insert, select, update

from pgqrs.errors import QueueExists, QueueNotEmpty, QueueNotFound
from pgqrs.models import archive, keys, messages, queues, slots, streams, workers
from pgqrs.models import groups as group_rows
from pgqrs.repositories import groups, limits, workflows
from pgqrs.repositories.expressions import at, moment
from pgqrs.types import Queue, Rate

COLUMNS = (
    queues.c.id,
    queues.c.queue_name,
    queues.c.created_at,
    queues.c.lease,
    queues.c.max_read_ct,
    queues.c.retention,
    queues.c.paused,
    queues.c.max_in_flight,
    queues.c.max_in_flight_per_key,
    queues.c.rate_limit,
    queues.c.rate_period,
)
_INSERT = insert(queues).values(
    queue_name=bindparam("new_name"),
    lease=bindparam("new_lease"),
    max_read_ct=bindparam("new_max_read_ct"),
    retention=bindparam("new_retention"),
    paused=False,
    max_in_flight=bindparam("new_max_in_flight"),
    max_in_flight_per_key=bindparam("new_max_in_flight_per_key"),
    rate_limit=bindparam("new_rate_limit"),
    rate_period=bindparam("new_rate_period"),
    created_at=moment("now"),
)
LIMITS = frozenset(("max_in_flight", "max_in_flight_per_key", "rate_limit"))
_NAMED = queues.c.queue_name == bindparam("queue")
_GET = select(*COLUMNS).where(_NAMED)
_LOCK = select(queues.c.id).where(_NAMED).with_for_update()
_LIST = select(*COLUMNS).order_by(queues.c.queue_name)
_COUNT = select(func.count()).where(messages.c.queue_id == bindparam("queue_id"))


def create(
    connection: Connection,
    name: str,
    *,
    if_not_exists: bool,
    now: datetime | None,
    **settings: Any,
) -> Queue:
    """A new queue, or with `if_not_exists` the one that is there, unchanged."""
    values = {"new_name": name} | {f"new_{key}": value for key, value in settings.items()}
    found = connection.execute(_GET, {"queue": name}).first()
    if found is None:
        connection.execute(_INSERT, values | at(now=(now, 0.0)))
    elif not if_not_exists:
        raise QueueExists(name)
    return get(connection, name)


def get(connection: Connection, name: str) -> Queue:
    """The queue of this name."""
    row = connection.execute(_GET, {"queue": name}).first()
    if row is None:
        raise QueueNotFound(name)
    return _queue(row)


def find(connection: Connection) -> list[Queue]:
    """All queues by name."""
    return [_queue(row) for row in connection.execute(_LIST)]


def configure(connection: Connection, name: str, *, now: datetime | None, **settings: Any) -> Queue:
    """Change settings; they count from the next operation on."""
    if settings:
        connection.execute(update(queues).where(queues.c.queue_name == name).values(settings))
    queue = get(connection, name)
    if settings.keys() & LIMITS:
        limits.change(connection, queue.id, now=now)
    return queue


_NO_FSYNC = func.set_config("synchronous_commit", "off", True)
"""For this transaction: who waits matters for seconds, so it need not survive a crash of the server.
Waiting for the disk would make waking up slower by as much as an enqueue costs."""
_EXPECT = update(queues).where(_NAMED).values(waiting_until=moment("until")).returning(_NO_FSYNC)
TELL_WHO_WAITS = (
    update(queues)
    .where(_NAMED, queues.c.waiting_until > moment("now"))
    .values(waiting_until=None)
    .returning(func.pg_notify(bindparam("channel", type_=Text()), queues.c.queue_name), _NO_FSYNC)
)
"""PostgreSQL's NOTIFY, if anybody waits, and then once for all of them: under load nobody waits, and
so nothing is sent."""


def expect(connection: Connection, name: str, *, seconds: float, now: datetime | None) -> None:
    """Somebody waits for a message: who enqueues in the next seconds should say so."""
    connection.execute(_EXPECT, {"queue": name} | at(until=(now, seconds))).close()


def tell(connection: Connection, name: str, *, channel: str, now: datetime | None) -> None:
    """There is something for who waits for this queue."""
    bound = {"queue": name, "channel": channel} | at(now=(now, 0.0))
    connection.execute(TELL_WHO_WAITS, bound).close()


def tell_at_commit(connection: Connection, name: str, *, channel: str) -> None:
    """The same from a transaction that may commit much later: who will wait then is not known yet."""
    connection.execute(select(func.pg_notify(channel, name))).close()


_EXPECT_RESULTS = update(queues).where(_NAMED).values(results_wanted_until=moment("until"))
_TELL_OF_RESULTS = (
    update(queues)
    .where(_NAMED, queues.c.results_wanted_until > moment("now"))
    .values(results_wanted_until=None)
    .returning(
        func.pg_notify(bindparam("channel", type_=Text()), bindparam("results", type_=Text()))
    )
)
"""As above, for those who wait for what becomes of a message."""


def expect_results(
    connection: Connection, name: str, *, seconds: float, now: datetime | None
) -> None:
    """Somebody waits for results: who ends messages in the next seconds should say so."""
    connection.execute(_EXPECT_RESULTS, {"queue": name} | at(until=(now, seconds)))


def tell_of_results(
    connection: Connection, name: str, *, channel: str, payload: str, now: datetime | None
) -> None:
    """There are results for who waits for those of this queue."""
    bound = {"queue": name, "channel": channel, "results": payload} | at(now=(now, 0.0))
    connection.execute(_TELL_OF_RESULTS, bound).close()


def purge(connection: Connection, name: str, *, limit: int, now: datetime | None) -> int:
    """Delete up to `limit` messages, held or not; whoever held one loses it. Returns how many."""
    queue = get(connection, name)
    some = select(messages.c.id).where(messages.c.queue_id == queue.id).limit(limit)
    ids = connection.execute(some).scalars().all()
    with groups.ending(connection, ids, now=now):
        purged = connection.execute(delete(messages).where(messages.c.id.in_(ids))).rowcount
    workflows.end_lost(connection, ids, error="its message was purged from the queue", now=now)
    return purged


def remove(connection: Connection, name: str, *, force: bool) -> None:
    """Delete an empty queue and its archive; by force also its messages.

    The queue's row is locked first. Enqueueing locks it too, so no message can slip in behind the
    count.
    """
    queue_id = connection.execute(_LOCK, {"queue": name}).scalar()
    if queue_id is None:
        raise QueueNotFound(name)
    remaining = connection.execute(_COUNT, {"queue_id": queue_id}).scalar_one()
    if remaining and not force:
        raise QueueNotEmpty(name, remaining)
    for table in (messages, archive, workers, group_rows, keys, slots, streams):
        connection.execute(delete(table).where(table.c.queue_id == queue_id))
    connection.execute(delete(queues).where(queues.c.id == queue_id))


def _queue(row: Sequence[Any]) -> Queue:
    limit, period = row[-2:]
    return Queue(*row[:-2], None if limit is None else Rate(limit, period))  # type: ignore[call-arg]
