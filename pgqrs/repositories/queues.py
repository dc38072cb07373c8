"""Queues and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    bindparam,
    delete,
    func,
    select,
    update,
)

from pgqrs.errors import (
    LeaseTooLong,
    QueueExists,
    QueueNotEmpty,
    QueueNotFound,
    QueueScheduled,
)
from pgqrs.models import (
    archive,
    keys,
    messages,
    queues,
    schedules,
    slots,
    streams,
    waiting,
    workers,
)
from pgqrs.models import groups as group_rows
from pgqrs.models import limits as limit_rows
from pgqrs.repositories import groups, workflows
from pgqrs.repositories.expressions import at, is_one_of, moment, per_dialect
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
    queues.c.max_lease,
    queues.c.max_releases,
    queues.c.rate_limit,
    queues.c.rate_period,
)
_NEW: dict[str, Any] = {
    "queue_name": bindparam("new_name"),
    "lease": bindparam("new_lease"),
    "max_read_ct": bindparam("new_max_read_ct"),
    "retention": bindparam("new_retention"),
    "paused": False,
    "max_in_flight": bindparam("new_max_in_flight"),
    "max_in_flight_per_key": bindparam("new_max_in_flight_per_key"),
    "max_lease": bindparam("new_max_lease"),
    "max_releases": bindparam("new_max_releases"),
    "rate_limit": bindparam("new_rate_limit"),
    "rate_period": bindparam("new_rate_period"),
    "created_at": moment("now"),
}
_NO_LIMITS = {
    f"new_{name}": None
    for name in (
        *("retention", "max_in_flight", "max_in_flight_per_key", "max_lease", "max_releases"),
        *("rate_limit", "rate_period"),
    )
}


@cache
def _insert(dialect: str) -> Any:
    """A new row, or none if another transaction has created the queue meanwhile: an error would end the
    whole transaction, which may be the application's own.
    """
    new = import_module(f"sqlalchemy.dialects.{dialect}").insert(queues)
    return new.values(**_NEW).on_conflict_do_nothing().returning(queues.c.id)


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
    """A new queue, or with `if_not_exists` the one that is there, unchanged. `lease` and `max_read_ct`
    are required; a limit that is not given is none.
    """
    given = {f"new_{key}": value for key, value in settings.items()}
    values = {"new_name": name} | _NO_LIMITS | given
    found = connection.execute(_GET, {"queue": name}).first()
    is_new = False
    if found is None:
        new = _insert(connection.dialect.name)
        is_new = connection.execute(new, values | at(now=(now, 0.0))).first() is not None
    if not is_new and not if_not_exists:
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


def configure(connection: Connection, name: str, **settings: Any) -> Queue:
    """Change settings; they count from the next operation on."""
    if settings:
        connection.execute(update(queues).where(queues.c.queue_name == name).values(settings))
    queue = get(connection, name)
    if queue.max_lease is not None and queue.lease > queue.max_lease:
        raise LeaseTooLong(name, queue.lease, queue.max_lease)
    return queue


class Purged(NamedTuple):
    """How many messages were deleted, which were locked by others, and the last that was looked at;
    None if there was none to look at.
    """

    deleted: int
    locked: list[int]
    last: int | None


_GIVEN = is_one_of(messages.c.id, "ids")
_LAST = select(func.max(messages.c.id)).where(messages.c.queue_id == bindparam("queue_id"))
_SOME = (
    select(messages.c.id)
    .where(
        messages.c.queue_id == bindparam("queue_id"),
        messages.c.id > bindparam("after"),
        messages.c.id <= bindparam("through"),
    )
    .order_by(messages.c.id)
    .limit(bindparam("at_most"))
)
_LOCK_THEM = select(messages.c.id).where(_GIVEN).with_for_update(skip_locked=True)
_DELETE_THEM = delete(messages).where(_GIVEN)


def last_message(connection: Connection, name: str) -> int:
    """The id of the last message of a queue; 0 if it is empty."""
    return connection.execute(_LAST, {"queue_id": get(connection, name).id}).scalar() or 0


def purge(
    connection: Connection, name: str, *, after: int, through: int, limit: int, now: datetime | None
) -> Purged:
    """Delete up to `limit` messages with ids between these, held or not; whoever held one loses it.

    Messages that other transactions have locked are passed over: who waited for them here could keep
    those waiting that it waits for.
    """
    some = {"queue_id": get(connection, name).id, "after": after, "through": through}
    ids = connection.execute(_SOME, some | {"at_most": limit}).scalars().all()
    with groups.ending(connection, ids, now=now):
        free = connection.execute(_LOCK_THEM, {"ids": ids}).scalars().all()
        connection.execute(_DELETE_THEM, {"ids": free})
        workflows.end_lost(connection, free, error="its message was purged from the queue", now=now)
    locked = sorted(set(ids).difference(free))
    return Purged(len(free), locked, ids[-1] if ids else None)


_WAIT_FOR = select(messages.c.id).where(messages.c.id == bindparam("id")).with_for_update(read=True)


def wait_for(connection: Connection, message_id: int) -> None:
    """Return when no other transaction has this message locked. This one locks nothing else."""
    connection.execute(_WAIT_FOR, {"id": message_id}).close()


def _wait_shortly(connection: Connection) -> None:
    connection.execute(select(func.set_config("lock_timeout", "300ms", True))).close()


wait_shortly = per_dialect(postgresql=_wait_shortly, sqlite=lambda _: None)
"""Let this transaction give up, to be tried again, where it would wait for a lock for longer. That is
shorter than it takes PostgreSQL to look for a deadlock, and so to end one of those who wait.
"""
_SCHEDULES = (
    select(schedules.c.name)
    .where(schedules.c.queue_name == bindparam("queue"))
    .order_by(schedules.c.name)
)
_GROUPS = select(group_rows.c.group_key).where(group_rows.c.queue_id == bindparam("queue_id"))
_LOCK_ALL = (
    select(messages.c.id)
    .where(messages.c.queue_id == bindparam("queue_id"))
    .order_by(messages.c.id)
    .with_for_update()
)


def remove(connection: Connection, name: str, *, force: bool, now: datetime | None) -> None:
    """Delete an empty queue and its archive that no schedule uses; by force also its messages, and the
    runs that wait in it end as failed.

    The queue's row is locked first. Enqueueing and replaying lock it too, so no message can slip in
    behind the count.
    """
    queue_id = connection.execute(_LOCK, {"queue": name}).scalar()
    if queue_id is None:
        raise QueueNotFound(name)
    if not force and (using := connection.execute(_SCHEDULES, {"queue": name}).scalars().all()):
        raise QueueScheduled(name, using)
    remaining = connection.execute(_COUNT, {"queue_id": queue_id}).scalar_one()
    if remaining and not force:
        raise QueueNotEmpty(name, remaining)
    if remaining:
        # An application may have locked messages, and then want to enqueue into this queue.
        wait_shortly(connection)
        names = connection.execute(_GROUPS, {"queue_id": queue_id}).scalars().all()
        groups.lock(connection, queue_id, names)
        ids = connection.execute(_LOCK_ALL, {"queue_id": queue_id}).scalars().all()
        workflows.end_lost(connection, ids, error="its queue was deleted", now=now)
    # What claims lock comes first, so that none is in progress: they change slots.
    own = (limit_rows, messages, archive, workers, group_rows, keys, slots, waiting, streams)
    for table in own:
        connection.execute(delete(table).where(table.c.queue_id == queue_id))
    connection.execute(delete(queues).where(queues.c.id == queue_id))


def _queue(row: Sequence[Any]) -> Queue:
    limit, period = row[-2:]
    return Queue(*row[:-2], None if limit is None else Rate(limit, period))  # type: ignore[call-arg]
