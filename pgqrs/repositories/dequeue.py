"""Claiming messages, and taking finished ones out: the two operations whose SQL really differs by
database.

A claim hands out ready messages by priority, then id. Before that, messages whose `vt` has passed
come back:

- a delayed one, or one whose holder's lease lapsed, joins the ready ones;
- one whose lease lapsed on its last allowed attempt is dead: it goes to the archive as failed.

Both are bounded (`RETURNING_AT_ONCE`), so that a million messages that come due together cost no
claim more than that.

PostgreSQL does all of it in one statement, which commits by itself: one round trip. Messages that
came back but were not handed out are marked ready in passing, so each returns once. SQLite has one
writer at a time, and does the same in steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    Double,
    Insert,
    Interval,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    literal_column,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.sql.expression import ColumnElement, FromClause

from pgqrs.models import archive, messages, queues, workers
from pgqrs.repositories.expressions import Claim, at, claims, moment, per_dialect
from pgqrs.repositories.messages import COLUMNS, FENCE, HELD
from pgqrs.sqltypes import BigId, Undecodable
from pgqrs.types import ArchiveReason, Message, WorkerStatus

RETURNING_AT_ONCE = 1000
LAPSED = "the lease lapsed on the last allowed attempt: its holder died, or took too long"
UNDECODABLE = "the stored payload or headers are not JSON"


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim found: the messages, and whether the queue and the worker's row are still there."""

    messages: list[Message]
    queue_exists: bool
    worker_status: WorkerStatus | None


# Parts that both databases share

_QUEUE = (
    select(
        queues.c.lease,
        queues.c.max_read_ct,
        workers.c.status,
        case((and_(~queues.c.paused, workers.c.status == "ready"), queues.c.id)).label("open_id"),
    )
    .select_from(queues.outerjoin(workers, workers.c.id == bindparam("worker", type_=BigId)))
    .where(queues.c.queue_name == bindparam("queue"))
)
"""The queue and the worker; `open_id` is the queue's id if this worker may claim from it now."""

_ORDER = (messages.c.priority.desc(), messages.c.id)
_CLAIM: dict[str, Any] = {
    "ready": false(),
    "read_ct": messages.c.read_ct + 1,
    "dequeued_at": moment("now"),
    "consumer_worker_id": bindparam("worker", type_=BigId),
}


def _due(queue_id: ColumnElement[Any]) -> tuple[ColumnElement[bool], ...]:
    return (messages.c.queue_id == queue_id, ~messages.c.ready, messages.c.vt <= moment("now"))


def is_last_attempt(max_read_ct: ColumnElement[int]) -> ColumnElement[bool]:
    """Whether a claimed message may not be claimed again after this."""
    return messages.c.read_ct - messages.c.released_ct >= max_read_ct


def _is_dead(max_read_ct: ColumnElement[int]) -> ColumnElement[bool]:
    return and_(messages.c.consumer_worker_id.is_not(None), is_last_attempt(max_read_ct))


_KEPT = [column.name for column in messages.c if column.name in archive.c and column.name != "id"]


def _archive(source: FromClause, rows: Select[Any] | None = None) -> Insert:
    """The insert that turns rows of messages into rows of the archive."""
    columns: dict[str, ColumnElement[Any]] = {
        "original_message_id": source.c.id,
        **{name: source.c[name] for name in _KEPT},
        "archive_reason": bindparam("reason", type_=archive.c.archive_reason.type),
        "archived_at": moment("now"),
        "error": bindparam("error", type_=archive.c.error.type),
    }
    chosen = (
        select(*columns.values()) if rows is None else rows.with_only_columns(*columns.values())
    )
    return insert(archive).from_select(list(columns), chosen)


# PostgreSQL


def _is_one_of(ids: Select[Any]) -> ColumnElement[bool]:
    """As an array, so that the planner looks the ids up one by one whatever it thinks of their number."""
    return messages.c.id == func.any(func.array(ids.scalar_subquery()))


def _postgres_claim() -> Select[Any]:
    queue = _QUEUE.cte("queue")
    open_id = select(queue.c.open_id).scalar_subquery()
    ready = (
        select(messages.c.id, messages.c.priority)
        .where(messages.c.queue_id == open_id, messages.c.ready)
        .order_by(*_ORDER)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .cte("ready")
    )
    due = (
        select(
            messages.c.id,
            messages.c.priority,
            _is_dead(select(queue.c.max_read_ct).scalar_subquery()).label("dead"),
        )
        .where(*_due(open_id))
        .order_by(messages.c.vt)
        .limit(bindparam("at_once"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )
    candidates = union_all(
        select(ready.c.id, ready.c.priority), select(due.c.id, due.c.priority).where(~due.c.dead)
    ).subquery("candidates")
    picked = (
        select(candidates.c.id)
        .order_by(candidates.c.priority.desc(), candidates.c.id)
        .limit(bindparam("limit"))
        .cte("picked")
    )
    buried = (
        delete(messages).where(_is_one_of(select(due.c.id).where(due.c.dead))).returning(messages)
    )
    returned = (
        update(messages)
        .where(
            _is_one_of(select(due.c.id).where(~due.c.dead, due.c.id.not_in(select(picked.c.id))))
        )
        .values(ready=true())
    )
    lease: ColumnElement[float] = func.coalesce(
        bindparam("lease", type_=Double()), select(queue.c.lease).scalar_subquery()
    )
    claimed = (
        update(messages)
        .where(_is_one_of(select(picked.c.id)))
        .values(
            vt=moment("now") + lease * literal_column("interval '1 second'", Interval()), **_CLAIM
        )
        .returning(*COLUMNS)
        .cte("claimed")
    )
    return (
        select(queue.c.status, claimed)
        .select_from(queue.outerjoin(claimed, true()))
        .add_cte(_archive(buried.cte("dead")).cte("buried"), returned.cte("returned"))
    )


_POSTGRES_CLAIM = _postgres_claim()
_POSTGRES_DELETE = delete(messages).where(*FENCE).returning(messages.c.id)
_POSTGRES_FINISH = _archive(
    delete(messages).where(*FENCE).returning(messages).cte("finished")
).returning(archive.c.original_message_id)


def _claim_postgres(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime | None,
) -> Claimed:
    bound = {
        "queue": queue,
        "worker": worker,
        "limit": limit,
        "lease": lease,
        "at_once": RETURNING_AT_ONCE,
        "reason": ArchiveReason.FAILED,
        "error": LAPSED,
    } | at(now=(now, 0.0))
    rows = connection.execute(_POSTGRES_CLAIM, bound).all()
    if not rows:
        return Claimed([], queue_exists=False, worker_status=None)
    status = rows[0][0]
    if rows[0][1] is None:
        return Claimed([], queue_exists=True, worker_status=status)
    return Claimed(_in_order(Message(queue, *row[1:]) for row in rows), True, status)


def _finish_postgres(connection: Connection, bound: dict[str, Any]) -> set[int]:
    return set(connection.execute(_POSTGRES_FINISH, bound).scalars())


# SQLite

_open_id = bindparam("open_id", type_=BigId)
_SQLITE_QUEUE = _QUEUE.add_columns(
    exists().where(*_due(queues.c.id)).correlate(queues).label("some_due")
)
_SQLITE_DUE = (
    select(messages.c.id, _is_dead(bindparam("max_read_ct")).label("dead"))
    .where(*_due(_open_id))
    .order_by(messages.c.vt)
    .limit(bindparam("at_once"))
)
_GIVEN = messages.c.id.in_(bindparam("ids", expanding=True))
_SQLITE_RETURN = update(messages).where(_GIVEN).values(ready=true())
_SQLITE_BURY = (_archive(messages, select(messages).where(_GIVEN)), delete(messages).where(_GIVEN))
_SQLITE_CLAIM = (
    update(messages)
    .where(
        messages.c.id.in_(
            select(messages.c.id)
            .where(messages.c.queue_id == _open_id, messages.c.ready)
            .order_by(*_ORDER)
            .limit(bindparam("limit"))
            .scalar_subquery()
        )
    )
    .values(vt=moment("lease"), **_CLAIM)
    .returning(*COLUMNS)
)
_fenced = select(messages).join_from(messages, HELD, and_(*FENCE))
_SQLITE_DELETE = (
    delete(messages)
    .where(messages.c.id.in_(_fenced.with_only_columns(messages.c.id).scalar_subquery()))
    .returning(messages.c.id)
)
_SQLITE_ARCHIVE = _archive(messages, _fenced)


def _claim_sqlite(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime,
) -> Claimed:
    bound = at(now=(now, 0.0)) | {"queue": queue, "worker": worker}
    found = connection.execute(_SQLITE_QUEUE, bound).first()
    if found is None:
        return Claimed([], queue_exists=False, worker_status=None)
    if found.open_id is None:
        return Claimed([], queue_exists=True, worker_status=found.status)
    bound |= {"open_id": found.open_id, "limit": limit, "max_read_ct": found.max_read_ct}
    if found.some_due:
        _return_due_sqlite(connection, bound)
    bound |= at(lease=(now, found.lease if lease is None else lease))
    rows = connection.execute(_SQLITE_CLAIM, bound).all()
    claimed = _in_order(Message(queue, *row) for row in rows)
    return Claimed(_without_undecodable(connection, claimed, bound), True, found.status)


def _return_due_sqlite(connection: Connection, bound: dict[str, Any]) -> None:
    due = connection.execute(_SQLITE_DUE, bound | {"at_once": RETURNING_AT_ONCE}).all()
    connection.execute(_SQLITE_RETURN, {"ids": [id for id, dead in due if not dead]})
    _bury_sqlite(connection, [id for id, dead in due if dead], bound, error=LAPSED)


def _bury_sqlite(
    connection: Connection, ids: list[int], bound: dict[str, Any], *, error: str
) -> None:
    if ids:
        bound = bound | {"ids": ids, "reason": ArchiveReason.FAILED, "error": error}
        for statement in _SQLITE_BURY:
            connection.execute(statement, bound)


def _without_undecodable(
    connection: Connection, claimed: list[Message], bound: dict[str, Any]
) -> list[Message]:
    """Text that is not JSON can only come from outside; it must not block the queue it is in."""
    broken = [
        message.id
        for message in claimed
        if isinstance(message.payload, Undecodable) or isinstance(message.headers, Undecodable)
    ]
    if not broken:
        return claimed
    _bury_sqlite(connection, broken, bound, error=UNDECODABLE)
    return [message for message in claimed if message.id not in broken]


def _finish_sqlite(connection: Connection, bound: dict[str, Any]) -> set[int]:
    connection.execute(_SQLITE_ARCHIVE, bound)
    return set(connection.execute(_SQLITE_DELETE, bound).scalars())


# Both

_finish = per_dialect(postgresql=_finish_postgres, sqlite=_finish_sqlite)
_delete = per_dialect(
    postgresql=lambda connection, bound: connection.execute(_POSTGRES_DELETE, bound),
    sqlite=lambda connection, bound: connection.execute(_SQLITE_DELETE, bound),
)

claim = per_dialect(postgresql=_claim_postgres, sqlite=_claim_sqlite)
"""Claim up to `limit` messages of a queue for a worker, for `lease` seconds or the queue's own
lease.
"""


def finish(
    connection: Connection,
    holds: Iterable[Claim],
    *,
    reason: ArchiveReason,
    error: str | None,
    now: datetime | None,
) -> set[int]:
    """Move held messages to the archive. Returns the ids of those that were really held."""
    bound = {"held": claims(holds), "reason": reason, "error": error} | at(now=(now, 0.0))
    return _finish(connection, bound)


def remove(connection: Connection, holds: Iterable[Claim]) -> set[int]:
    """Delete held messages without a trace. Returns the ids of those that were really held."""
    return set(_delete(connection, {"held": claims(holds)}).scalars())


def _in_order(found: Iterable[Message]) -> list[Message]:
    # RETURNING promises no order.
    return sorted(found, key=lambda message: (-message.priority, message.id))
