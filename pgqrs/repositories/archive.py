"""Finished messages: listing them, sending them round again, forgetting the old ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, case, delete, insert, select, update

from pgqrs.errors import MessageNotFound
from pgqrs.models import archive, messages, queues
from pgqrs.repositories import dequeue, groups
from pgqrs.repositories.expressions import Holds, at, held_by, moment
from pgqrs.repositories.groups import BY_GROUP, UNBLOCKED
from pgqrs.repositories.messages import FENCE, HELD, give_back
from pgqrs.sqltypes import BigId
from pgqrs.types import ArchivedMessage, ArchiveReason

COLUMNS = (
    archive.c.id,
    archive.c.original_message_id,
    archive.c.archive_reason,
    archive.c.payload,
    archive.c.headers,
    archive.c.codec,
    archive.c.priority,
    archive.c.enqueued_at,
    archive.c.dequeued_at,
    archive.c.archived_at,
    archive.c.read_ct,
    archive.c.released_ct,
    archive.c.producer_worker_id,
    archive.c.consumer_worker_id,
    archive.c.dedup_key,
    archive.c.group_key,
    archive.c.result,
    archive.c.error,
    archive.c.replayed_as,
)
"""In the order of the fields of `ArchivedMessage`, which starts with the name of the queue."""

_WITH_QUEUE = select(queues.c.queue_name, *COLUMNS).join_from(
    archive, queues, archive.c.queue_id == queues.c.id
)
_GET = _WITH_QUEUE.where(archive.c.original_message_id == bindparam("id"))
_ENDED_BY_HOLDER = select(archive.c.original_message_id).join_from(
    archive,
    HELD,
    and_(
        archive.c.original_message_id == HELD.c.id,
        archive.c.consumer_worker_id == bindparam("held_by", type_=BigId),
        archive.c.read_ct == HELD.c.read_ct,
        archive.c.archive_reason == ArchiveReason.COMPLETED,
    ),
)
_COPIED = [
    column.name
    for column in messages.c
    if column.name in archive.c
    and column.name
    not in (
        *("id", "read_ct", "released_ct", "enqueued_at", "dequeued_at", "consumer_worker_id"),
        "expires_at",  # it may be over, and who replays wants to see it delivered
    )
]


def ack(
    connection: Connection,
    holds: Holds,
    *,
    now: datetime | None,
    results: Mapping[int, str] | None = None,
) -> set[int]:
    """Archive held messages as completed, with their results; returns the ids that are.

    Safe to repeat: a message that this very claim completed before counts as completed.
    """
    done = dequeue.finish(
        connection, holds, reason=ArchiveReason.COMPLETED, error=None, now=now, results=results
    )
    if len(done) < len(holds.tokens):
        missing = _some(holds, holds.tokens.keys() - done)
        done |= set(connection.execute(_ENDED_BY_HOLDER, held_by(missing)).scalars())
    return done


def _some(holds: Holds, ids: Iterable[int]) -> Holds:
    return holds._replace(tokens={id: holds.tokens[id] for id in ids})


_FAILING = (
    select(messages.c.id, dequeue.is_last_attempt(queues.c.max_read_ct))
    .select_from(messages.join(HELD, and_(*FENCE)).join(queues, messages.c.queue_id == queues.c.id))
    .with_for_update(of=messages)
)


def fail(
    connection: Connection,
    holds: Holds,
    *,
    delays: Mapping[int, float | None],
    error: str | None,
    now: datetime | None,
) -> dict[int, bool]:
    """Deliver held messages again, each after its delay, or archive it as failed: if it has none,
    or had its last attempt.

    Returns for each message that was really held whether it will be delivered again.
    """
    failing = connection.execute(_FAILING, held_by(holds))
    again = {id: delays[id] is not None and not last for id, last in failing}
    retried = [id for id, is_retried in again.items() if is_retried]
    for delay in {delays[id] for id in retried}:
        alike = _some(holds, (id for id in retried if delays[id] == delay))
        give_back(connection, alike, delay=delay or 0.0, counted=True, now=now)
    ended = _some(holds, (id for id, is_retried in again.items() if not is_retried))
    if ended.tokens:
        with groups.ending(connection, list(ended.tokens), now=now):
            dequeue.finish(connection, ended, reason=ArchiveReason.FAILED, error=error, now=now)
    return again


def get(connection: Connection, message_id: int) -> ArchivedMessage | None:
    """How this message ended; None if it has not."""
    row = connection.execute(_GET, {"id": message_id}).first()
    return None if row is None else _archived(row)


_ENDED = _WITH_QUEUE.where(archive.c.original_message_id.in_(bindparam("ids", expanding=True)))


def ended(connection: Connection, message_ids: Sequence[int]) -> dict[int, ArchivedMessage]:
    """How these messages ended, those that have."""
    found = map(_archived, connection.execute(_ENDED, {"ids": message_ids}))
    return {archived.original_message_id: archived for archived in found}


_LOCK = select(messages.c.id).where(messages.c.id == bindparam("id")).with_for_update()


def cancel(connection: Connection, message_id: int, *, error: str, now: datetime | None) -> bool:
    """End a message, whoever holds it. Returns whether there was one."""
    found = connection.execute(_LOCK, {"id": message_id}).scalar()
    if found is not None:
        dequeue.bury(connection, [found], reason=ArchiveReason.MANUAL, error=error, now=now)
    return found is not None


def find(
    connection: Connection,
    queue: str,
    *,
    reasons: Sequence[ArchiveReason],
    replayed: bool,
    limit: int,
    after: int,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[ArchivedMessage]:
    """Archived messages in the order they ended, a page at a time."""
    statement = (
        _WITH_QUEUE.where(
            queues.c.queue_name == queue,
            archive.c.archive_reason.in_(reasons),
            archive.c.id > after,
        )
        .order_by(archive.c.id)
        .limit(limit)
    )
    if not replayed:
        statement = statement.where(archive.c.replayed_as.is_(None))
    if since is not None:
        statement = statement.where(archive.c.archived_at >= since)
    if until is not None:
        statement = statement.where(archive.c.archived_at < until)
    return [_archived(row) for row in connection.execute(statement)]


def _archived(row: Sequence[Any]) -> ArchivedMessage:
    return ArchivedMessage(*row)


_REPLAY = (
    insert(messages)
    .from_select(
        [
            *_COPIED,
            "blocked",
            "ready",
            "vt",
            "enqueued_at",
            "read_ct",
            "released_ct",
        ],
        select(
            *(archive.c[name] for name in _COPIED),
            case((archive.c.group_key.is_(None), UNBLOCKED), else_=BY_GROUP),
            archive.c.group_key.is_(None),
            moment("now"),
            moment("now"),
            bindparam("none_yet", 0, type_=archive.c.read_ct.type),
            bindparam("none_yet", 0, type_=archive.c.read_ct.type),
        )
        .where(archive.c.id.in_(bindparam("ids", expanding=True)))
        .order_by(archive.c.id),
    )
    .returning(messages.c.id)
)
_GROUPS = (
    select(archive.c.queue_id, archive.c.group_key)
    .distinct()
    .where(archive.c.id.in_(bindparam("ids", expanding=True)), archive.c.group_key.is_not(None))
)
_MARK_REPLAYED = (
    update(archive)
    .where(archive.c.id == bindparam("archived"))
    .values(replayed_as=bindparam("new_id"))
)


class Replayed(NamedTuple):
    """The ids of the new messages, in the order that was asked for, and the queues they are in."""

    ids: list[int]
    queues: set[str]


def replay_messages(
    connection: Connection, message_ids: Sequence[int], *, now: datetime | None
) -> Replayed:
    """Enqueue anew what these messages were."""
    archived = [_ended(connection, id) for id in message_ids]
    created = _replay(connection, [found.id for found in archived], now=now)
    return Replayed([created[found.id] for found in archived], {found.queue for found in archived})


def _ended(connection: Connection, message_id: int) -> ArchivedMessage:
    found = get(connection, message_id)
    if found is None:
        raise MessageNotFound(message_id)
    return found


_NOT_REPLAYED = (
    select(archive.c.id)
    .where(archive.c.id.in_(bindparam("ids", expanding=True)), archive.c.replayed_as.is_(None))
    .with_for_update()
)


def replay_once(connection: Connection, ids: Sequence[int], *, now: datetime | None) -> int:
    """Enqueue anew those of these, by their ids in the archive, that nobody has. Returns how many."""
    chosen = connection.execute(_NOT_REPLAYED, {"ids": ids}).scalars().all()
    return len(_replay(connection, chosen, now=now))


def _replay(connection: Connection, ids: Iterable[int], *, now: datetime | None) -> dict[int, int]:
    """Archive id → id of the new message. The archive keeps its rows, each with what it became."""
    chosen = sorted(set(ids))
    if not chosen:
        return {}
    with groups.adding(connection, connection.execute(_GROUPS, {"ids": chosen}), now=now):
        created = connection.execute(_REPLAY, {"ids": chosen} | at(now=(now, 0.0))).scalars().all()
    replayed = dict(zip(chosen, sorted(created), strict=True))
    connection.execute(
        _MARK_REPLAYED, [{"archived": old, "new_id": new} for old, new in replayed.items()]
    )
    return replayed


def purge(
    connection: Connection,
    queue: str,
    *,
    reasons: Sequence[ArchiveReason],
    older_than: float,
    limit: int,
    now: datetime | None,
) -> int:
    """Forget up to `limit` messages that ended longer ago than this. Returns how many."""
    old = (
        select(archive.c.id)
        .join_from(archive, queues, archive.c.queue_id == queues.c.id)
        .where(
            queues.c.queue_name == queue,
            archive.c.archive_reason.in_(reasons),
            archive.c.archived_at <= moment("cutoff"),
        )
        .limit(limit)
    )
    statement = delete(archive).where(archive.c.id.in_(old))
    return connection.execute(statement, at(cutoff=(now, -older_than))).rowcount


_FORGET = delete(archive).where(archive.c.id.in_(bindparam("ids", expanding=True)))


def forget(connection: Connection, ids: Sequence[int]) -> int:
    """Forget these, by their ids in the archive. Returns how many were there."""
    return connection.execute(_FORGET, {"ids": ids}).rowcount
