"""Finished messages: listing them, sending them round again, forgetting the old ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    Connection,
    and_,
    bindparam,
    case,
    cast,
    delete,
    insert,
    or_,
    select,
    update,
)

from pgqrs.errors import MessageNotFound
from pgqrs.models import archive, messages, queues
from pgqrs.repositories import dequeue, groups, workflows
from pgqrs.repositories.expressions import Holds, at, held_by, is_one_of, moment, numbered
from pgqrs.repositories.groups import BY_GROUP, UNBLOCKED
from pgqrs.repositories.messages import FENCE, HELD, existing, give_back, is_released_too_often
from pgqrs.repositories.messages import release as release_held
from pgqrs.repositories.reading import bare, telling
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
_WITH_QUEUE_BARE = _WITH_QUEUE.with_only_columns(queues.c.queue_name, *bare(COLUMNS))
_GET, _GET_BARE = (
    statement.where(archive.c.original_message_id == bindparam("id"))
    for statement in (_WITH_QUEUE, _WITH_QUEUE_BARE)
)
_ENDED_BY_HOLDER = select(archive.c.original_message_id).join_from(
    archive,
    HELD,
    and_(
        archive.c.original_message_id == HELD.c.id,
        archive.c.consumer_worker_id == bindparam("held_by", type_=BigId),
        or_(HELD.c.read_ct.is_(None), archive.c.read_ct == HELD.c.read_ct),
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


RELEASED_TOO_OFTEN = "given back without being tried {} times, and max_releases allows no more"


def ack(
    connection: Connection,
    holds: Holds,
    *,
    now: datetime | None,
    results: Mapping[int, str] | None = None,
    channel: str | None = None,
    skip_locked: bool = False,
) -> set[int]:
    """Archive held messages as completed, with their results; returns the ids that are.

    Safe to repeat: a message that this very claim completed before counts as completed. For `channel`
    and `skip_locked` see `dequeue.finish`.
    """
    done = dequeue.finish(
        connection,
        holds,
        reason=ArchiveReason.COMPLETED,
        error=None,
        now=now,
        results=results,
        channel=channel,
        skip_locked=skip_locked,
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
    .order_by(messages.c.id)
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

    Returns for each message that was really held whether it will be delivered again. To be called
    inside `groups.ending` if some of them may have a group.
    """
    failing = {id: bool(last) for id, last in connection.execute(_FAILING, held_by(holds))}
    doomed = [id for id, last in failing.items() if last and delays[id] is not None]
    forgiven = workflows.forgive(connection, doomed) if doomed else set[int]()
    again = {
        id: delays[id] is not None and (not last or id in forgiven) for id, last in failing.items()
    }
    retried = [id for id, is_retried in again.items() if is_retried]
    for delay in {delays[id] for id in retried}:
        alike = _some(holds, (id for id in retried if delays[id] == delay))
        give_back(connection, alike, delay=delay or 0.0, counted=True, now=now)
    ended = _some(holds, (id for id, is_retried in again.items() if not is_retried))
    if ended.tokens:
        dequeue.finish(connection, ended, reason=ArchiveReason.FAILED, error=error, now=now)
    return again


_RELEASED_TOO_OFTEN = (
    select(messages.c.id, queues.c.max_releases)
    .select_from(messages.join(HELD, and_(*FENCE)).join(queues, messages.c.queue_id == queues.c.id))
    .where(is_released_too_often(queues.c.max_releases))
    .order_by(messages.c.id)
    .with_for_update(of=messages)
)


def end_released(connection: Connection, holds: Holds, *, now: datetime | None) -> set[int]:
    """Archive as failed those held messages that were given back as often as their queue allows.
    Returns their ids.
    """
    with groups.ending(connection, list(holds.tokens), now=now):
        limits: dict[int, list[int]] = {}
        for id, limit in connection.execute(_RELEASED_TOO_OFTEN, held_by(holds)):
            limits.setdefault(limit, []).append(id)
        return {
            id
            for limit, ids in limits.items()
            for id in dequeue.finish(
                connection,
                _some(holds, ids),
                reason=ArchiveReason.FAILED,
                error=RELEASED_TOO_OFTEN.format(limit),
                now=now,
            )
        }


def release(
    connection: Connection,
    holds: Holds,
    *,
    delay: float,
    eta: datetime | None,
    now: datetime | None,
) -> set[int]:
    """Give held messages back untried, or end those that were given back too often. Returns the ids of
    both.
    """
    done = release_held(connection, holds, delay=delay, eta=eta, now=now)
    if len(done) < len(holds.tokens):
        done |= end_released(connection, _some(holds, holds.tokens.keys() - done), now=now)
    return done


def get(connection: Connection, message_id: int, *, bare: bool = False) -> ArchivedMessage | None:
    """How this message ended; None if it has not. `bare` without what is JSON."""
    with telling():
        row = connection.execute(_GET_BARE if bare else _GET, {"id": message_id}).first()
    return None if row is None else _archived(row)


def outcome(connection: Connection, message_id: int) -> ArchivedMessage | None:
    """How this message ended; None if it has not. Raises `MessageNotFound` if it is unknown.

    The message is looked for first: it moves to the archive, and never back.
    """
    return None if existing(connection, [message_id]) else _ended(connection, message_id)


def _ended(connection: Connection, message_id: int) -> ArchivedMessage:
    found = get(connection, message_id)
    if found is None:
        raise MessageNotFound(message_id)
    return found


_ENDED = _WITH_QUEUE.where(is_one_of(archive.c.original_message_id, "ids"))


def ended(connection: Connection, message_ids: Sequence[int]) -> dict[int, ArchivedMessage]:
    """How these messages ended, those that have."""
    with telling():
        found = [_archived(row) for row in connection.execute(_ENDED, {"ids": message_ids})]
    return {archived.original_message_id: archived for archived in found}


_LOCK_ONE = select(messages.c.id).where(messages.c.id == bindparam("id")).with_for_update()


def cancel(connection: Connection, message_id: int, *, error: str, now: datetime | None) -> bool:
    """End a message, whoever holds it. Returns whether there was one."""
    with groups.ending(connection, [message_id], now=now):
        found = connection.execute(_LOCK_ONE, {"id": message_id}).scalar()
        if found is not None:
            dequeue.take_away(
                connection, [found], reason=ArchiveReason.MANUAL, error=error, now=now
            )
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
    bare: bool = False,
) -> list[ArchivedMessage]:
    """Archived messages in the order they ended, a page at a time; `bare` without what is JSON."""
    statement = (
        (_WITH_QUEUE_BARE if bare else _WITH_QUEUE)
        .where(
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
    with telling():
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
        .where(is_one_of(archive.c.id, "ids"))
        .order_by(archive.c.id),
    )
    .returning(messages.c.id)
)
_GROUPS = (
    select(archive.c.queue_id, archive.c.group_key)
    .distinct()
    .where(is_one_of(archive.c.id, "ids"), archive.c.group_key.is_not(None))
)
_replayed = numbered("replayed")
_MARK_REPLAYED = (
    update(archive)
    .where(archive.c.id == cast(_replayed.c.name, BigId))
    .values(replayed_as=_replayed.c.number)
)


class Replayed(NamedTuple):
    """The ids of the new messages, in the order that was asked for, and the queues they are in."""

    ids: list[int]
    queues: set[str]


def replay_messages(
    connection: Connection, message_ids: Sequence[int], *, now: datetime | None
) -> Replayed:
    """Enqueue anew what these messages were."""
    known = {row.original_message_id: row for row in _lock(connection, _BY_MESSAGE, message_ids)}
    for id in message_ids:
        if id not in known:
            raise MessageNotFound(id)
    created = _replay(connection, [row.id for row in known.values()], now=now)
    return Replayed(
        [created[known[id].id] for id in message_ids], {row.queue_name for row in known.values()}
    )


_BY_ID, _BY_MESSAGE = archive.c.id, archive.c.original_message_id


def _lock(connection: Connection, by: Column[Any], ids: Sequence[int]) -> Sequence[Any]:
    """Those of these that are still in the archive. They stay there until the transaction ends, and so
    do their queues: nobody purges or deletes them under who replays them.
    """
    chosen = is_one_of(by, "ids")
    of_queues = select(archive.c.queue_id).distinct().where(chosen)
    queue_ids = connection.execute(of_queues, {"ids": ids}).scalars().all()
    connection.execute(_LOCK_QUEUES, {"queue_ids": queue_ids}).close()
    found = (
        select(
            archive.c.id,
            archive.c.original_message_id,
            archive.c.replayed_as,
            queues.c.queue_name,
        )
        .join_from(archive, queues, archive.c.queue_id == queues.c.id)
        .where(chosen)
        .order_by(archive.c.id)
        .with_for_update(of=archive)
    )
    return connection.execute(found, {"ids": ids}).all()


_LOCK_QUEUES = (
    select(queues.c.id)
    .where(is_one_of(queues.c.id, "queue_ids"))
    .order_by(queues.c.id)
    .with_for_update(read=True, key_share=True)
)


def replay_once(connection: Connection, ids: Sequence[int], *, now: datetime | None) -> int:
    """Enqueue anew those of these, by their ids in the archive, that nobody has. Returns how many."""
    chosen = [row.id for row in _lock(connection, _BY_ID, ids) if row.replayed_as is None]
    return len(_replay(connection, chosen, now=now))


def _replay(connection: Connection, ids: Iterable[int], *, now: datetime | None) -> dict[int, int]:
    """Archive id → id of the new message. The archive keeps its rows, which are locked, each with what
    it became.
    """
    chosen = sorted(set(ids))
    if not chosen:
        return {}
    with groups.adding(connection, connection.execute(_GROUPS, {"ids": chosen}), now=now):
        created = connection.execute(_REPLAY, {"ids": chosen} | at(now=(now, 0.0))).scalars().all()
    replayed = dict(zip(chosen, sorted(created), strict=True))
    connection.execute(_MARK_REPLAYED, {"replayed": list(replayed.items())})
    return replayed


def purge(
    connection: Connection,
    queue: str,
    *,
    reasons: Sequence[ArchiveReason],
    older_than: float,
    limit: int,
    now: datetime | None,
) -> Purged:
    """Forget up to `limit` messages that ended longer ago than this."""
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
    found = connection.execute(old, at(cutoff=(now, -older_than))).scalars().all()
    # Locked by id: who replays some of them does the same, and each waits for the other in turn.
    kept = connection.execute(_LOCK_OLD, {"ids": found}).scalars().all()
    return Purged(len(found), forget(connection, kept))


class Purged(NamedTuple):
    """How many messages were found to be old enough, and how many of those were still there to be
    forgotten.
    """

    found: int
    forgotten: int


_LOCK_OLD = (
    select(archive.c.id)
    .where(is_one_of(archive.c.id, "ids"))
    .order_by(archive.c.id)
    .with_for_update()
)
_FORGET = delete(archive).where(is_one_of(archive.c.id, "ids"))


def forget(connection: Connection, ids: Sequence[int]) -> int:
    """Forget these, by their ids in the archive. Returns how many were there."""
    return connection.execute(_FORGET, {"ids": ids}).rowcount
