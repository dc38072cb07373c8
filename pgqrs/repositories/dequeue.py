"""Claiming messages, and taking finished ones out: where the SQL really differs by database.

A claim hands out ready messages by priority, then id. Messages whose `vt` has passed come back
first: a delayed one, or one whose holder's lease lapsed, joins the ready ones. Not all may be
handed out, though: one whose lease lapsed on its last allowed attempt is dead, and one that is past
its expiry has expired. A claim passes over those and says so; then `sweep` takes them to the
archive.

Both are bounded (`AT_ONCE`), so that a million messages that come due or expire together cost no
claim more than that.

PostgreSQL claims in one statement, which commits by itself: one round trip. Messages that came back
but were not handed out are marked ready in passing, so each returns once. SQLite has one writer at
a time, and does the same in steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Double,
    Insert,
    Interval,
    Select,
    Text,
    and_,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    type_coerce,
    union_all,
    update,
)
from sqlalchemy.sql.expression import CTE, ColumnElement, FromClause

from pgqrs.models import archive, messages, queues, workers
from pgqrs.repositories import groups, workflows
from pgqrs.repositories.expressions import (
    Holds,
    at,
    held,
    held_by,
    held_with,
    held_with_results,
    moment,
    per_dialect,
    rows,
)
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.repositories.hot import Hot
from pgqrs.repositories.messages import COLUMNS, FENCE, FENCE_ONE, HELD, fence, held_one
from pgqrs.sqltypes import BigId, Json, Undecodable
from pgqrs.types import ArchiveReason, Message, WorkerStatus, make_message

AT_ONCE = 200
LAPSED = "the lease lapsed on the last allowed attempt: its holder died, or took too long"
UNDECODABLE = "the stored payload or headers are not JSON"


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim found: the messages, and whether the queue and the worker's row are still there."""

    messages: list[Message]
    queue_exists: bool
    worker_status: WorkerStatus | None
    leftovers: bool = False
    """Whether it passed over messages that `sweep` should take away."""
    limited: bool = False
    """Whether the queue has limits. Then nothing was claimed, unless by `limits.claim`."""
    room_in: float | None = None
    """Seconds until its rate allows the next message; None if it does now."""


# Parts that both databases share

# Not the column itself: `case` writes out what it is given, and an identity pulls in a dialect.
_ID = type_coerce(queues.c.id, BigId)
QUEUE = (
    select(
        queues.c.lease,
        queues.c.max_read_ct,
        type_coerce(workers.c.status, Text()).label("status"),
        case((and_(~queues.c.paused, workers.c.status == "ready"), _ID)).label("open_id"),
    )
    .add_columns(
        or_(
            queues.c.max_in_flight.is_not(None),
            queues.c.max_in_flight_per_key.is_not(None),
            queues.c.rate_limit.is_not(None),
        ).label("limited")
    )
    .select_from(queues.outerjoin(workers, workers.c.id == bindparam("worker", type_=BigId)))
    .where(queues.c.queue_name == bindparam("queue"))
)
"""The queue and the worker; `open_id` is the queue's id if this worker may claim from it now."""


WAITING = (~messages.c.ready, messages.c.blocked == UNBLOCKED)
"""Delayed or leased, and not blocked by others."""


def _has_passed(when: ColumnElement[Any], *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether the first time of a queue has passed.

    Asked by the first in the order of an index. Were it asked by EXISTS, PostgreSQL would guess
    that some row will do, and read the table to find that none does.
    """
    first = (
        select(when)
        .where(messages.c.queue_id == queues.c.id, *conditions)
        .order_by(when)
        .limit(literal_column("1"))
        .correlate(queues)
        .scalar_subquery()
    )
    return func.coalesce(first <= moment("now"), false())


TROUBLES = (
    _has_passed(messages.c.vt, *WAITING).label("some_due"),
    _has_passed(messages.c.expires_at, messages.c.expires_at.is_not(None)).label("some_expired"),
)
"""Whether the queue holds messages that are not simply ready. Nearly always it does not."""

ORDER = (messages.c.priority.desc(), messages.c.id)
CLAIM: dict[str, Any] = {
    "ready": false(),
    "read_ct": messages.c.read_ct + 1,
    "dequeued_at": moment("now"),
    "consumer_worker_id": bindparam("worker", type_=BigId),
}


def _due(queue_id: ColumnElement[Any]) -> tuple[ColumnElement[bool], ...]:
    return (messages.c.queue_id == queue_id, *WAITING, messages.c.vt <= moment("now"))


def is_last_attempt(max_read_ct: ColumnElement[int]) -> ColumnElement[bool]:
    """Whether a claimed message may not be claimed again after this."""
    return messages.c.read_ct - messages.c.released_ct >= max_read_ct


EXPIRED = func.coalesce(messages.c.expires_at <= moment("now"), false())


def _is_gone(max_read_ct: ColumnElement[int]) -> ColumnElement[bool]:
    """Whether a message that came back may not be handed out: dead, or expired."""
    lapsed = messages.c.consumer_worker_id.is_not(None)
    return or_(EXPIRED, and_(lapsed, is_last_attempt(max_read_ct)))


def _expired_and_free(queue_id: ColumnElement[Any]) -> tuple[ColumnElement[bool], ...]:
    """Past their expiry, and nobody is at work on them."""
    return (
        messages.c.queue_id == queue_id,
        messages.c.expires_at <= moment("now"),
        or_(
            messages.c.ready,
            messages.c.consumer_worker_id.is_(None),
            messages.c.vt <= moment("now"),
        ),
    )


_KEPT = [column.name for column in messages.c if column.name in archive.c and column.name != "id"]


def _archive(
    source: FromClause,
    chosen_from: Select[Any] | None = None,
    *,
    result: ColumnElement[Any] | None = None,
) -> Insert:
    """The insert that turns rows of messages into rows of the archive."""
    columns: dict[str, ColumnElement[Any]] = {
        "original_message_id": source.c.id,
        **{name: source.c[name] for name in _KEPT},
        "archive_reason": bindparam("reason", type_=archive.c.archive_reason.type),
        "archived_at": moment("now"),
        "error": bindparam("error", type_=archive.c.error.type),
    }
    if result is not None:
        columns["result"] = result
    chosen = (
        select(*columns.values())
        if chosen_from is None
        else chosen_from.with_only_columns(*columns.values())
    )
    return insert(archive).from_select(list(columns), chosen)


_open_id = bindparam("open_id", type_=BigId)
_DUE = (
    select(messages.c.id, _is_gone(bindparam("max_read_ct")).label("gone"))
    .where(*_due(_open_id))
    .order_by(messages.c.vt)
    .limit(bindparam("at_once"))
    .with_for_update(skip_locked=True)
)
_GIVEN = messages.c.id.in_(bindparam("ids", expanding=True))
_RETURN = update(messages).where(_GIVEN).values(ready=true())


def return_due(connection: Connection, bound: dict[str, Any]) -> bool:
    """Make ready what came back; returns whether some of it may not be."""
    due = connection.execute(_DUE, bound | {"at_once": AT_ONCE}).all()
    connection.execute(_RETURN, {"ids": [id for id, gone in due if not gone]})
    return any(gone for _, gone in due)


# PostgreSQL


def _is_one_of(ids: Select[Any]) -> ColumnElement[bool]:
    """As an array: then the planner looks ids up one by one, whatever it thinks of their number."""
    return messages.c.id == func.any(func.array(ids.scalar_subquery()))


@cache
def _postgres_claim_ready(at_most: int) -> Hot:
    """Claims ready messages, if the queue has no others to think of.

    `at_most`, no less than the limit, is part of the text: it tells the planner how few rows are
    wanted. With a parameter alone the server plans every claim anew, which costs more than the claim.
    """
    queue = QUEUE.add_columns(*TROUBLES).cte("queue")
    calm_id = select(queue.c.open_id).where(
        ~queue.c.some_due, ~queue.c.some_expired, ~queue.c.limited
    )
    first = (
        select(messages.c.id)
        .where(messages.c.queue_id == calm_id.scalar_subquery(), messages.c.ready)
        .order_by(*ORDER)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .subquery("first")
    )
    claimed = _postgres_hold(queue, select(first.c.id).limit(literal_column(str(at_most))))
    columns = (
        queue.c.status,
        queue.c.open_id,
        queue.c.limited,
        queue.c.some_due,
        queue.c.some_expired,
    )
    return Hot(select(*columns, claimed).select_from(queue.outerjoin(claimed, true())))


def _postgres_hold(queue: CTE, picked: Select[Any]) -> CTE:
    """The update that makes a worker the holder of the messages picked."""
    lease: ColumnElement[float] = func.coalesce(
        bindparam("lease", type_=Double()), select(queue.c.lease).scalar_subquery()
    )
    return (
        update(messages)
        .where(_is_one_of(picked))
        .values(
            vt=moment("now") + lease * literal_column("interval '1 second'", Interval()), **CLAIM
        )
        .returning(*COLUMNS)
        .cte("claimed")
    )


def _postgres_claim() -> Select[Any]:
    queue = QUEUE.cte("queue")
    open_id = select(queue.c.open_id).scalar_subquery()
    ready = (
        select(messages.c.id, messages.c.priority, EXPIRED.label("gone"))
        .where(messages.c.queue_id == open_id, messages.c.ready)
        .order_by(*ORDER)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .cte("ready")
    )
    max_read_ct = select(queue.c.max_read_ct).scalar_subquery()
    due = (
        select(messages.c.id, messages.c.priority, _is_gone(max_read_ct).label("gone"))
        .where(*_due(open_id))
        .order_by(messages.c.vt)
        .limit(bindparam("at_once"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )
    candidates = union_all(
        select(ready.c.id, ready.c.priority).where(~ready.c.gone),
        select(due.c.id, due.c.priority).where(~due.c.gone),
    ).subquery("candidates")
    picked = (
        select(candidates.c.id)
        .order_by(candidates.c.priority.desc(), candidates.c.id)
        .limit(bindparam("limit"))
        .cte("picked")
    )
    unpicked = select(due.c.id).where(~due.c.gone, due.c.id.not_in(select(picked.c.id)))
    returned = update(messages).where(_is_one_of(unpicked)).values(ready=true()).cte("returned")
    claimed = _postgres_hold(queue, select(picked.c.id))
    leftovers = or_(
        exists().where(due.c.gone),
        exists().where(ready.c.gone),
        exists().where(*_expired_and_free(open_id)),
    )
    return (
        select(queue.c.status, leftovers, claimed)
        .select_from(queue.outerjoin(claimed, true()))
        .add_cte(returned)
    )


_POSTGRES_CLAIM = _postgres_claim()
_HELD_IDS = held("held_ids")
_HELD_WITH_RESULTS = held_with_results()
_FENCE_WITH_RESULTS = fence(_HELD_WITH_RESULTS)
_RESULT_OF_ONE = cast(bindparam("result", type_=Text()), Json())
_FENCE_BY_INDEX = (*FENCE, _is_one_of(select(_HELD_IDS.c.id)))
"""With the ids as an array too, so that they are looked up however few rows the table has."""
_POSTGRES_DELETE = Hot(delete(messages).where(*_FENCE_BY_INDEX).returning(messages.c.id))


def _postgres_finish(
    *conditions: ColumnElement[bool], result: ColumnElement[Any] | None = None
) -> Hot:
    found = (messages,) if result is None else (messages, result.label("result"))
    finished = delete(messages).where(*conditions).returning(*found).cte("finished")
    kept = None if result is None else finished.c.result
    return Hot(_archive(finished, result=kept).returning(archive.c.original_message_id))


_POSTGRES_FINISH = _postgres_finish(*_FENCE_BY_INDEX)
_POSTGRES_FINISH_WITH_RESULTS = _postgres_finish(
    *_FENCE_WITH_RESULTS,
    _is_one_of(select(held_with_results("held_ids").c.id)),
    result=_HELD_WITH_RESULTS.c.result,
)
_POSTGRES_FINISH_ONE = _postgres_finish(*FENCE_ONE, result=_RESULT_OF_ONE)


def _claim_postgres(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime | None,
) -> Claimed:
    bound = {"queue": queue, "worker": worker, "limit": limit, "lease": lease} | at(now=(now, 0.0))
    found = _postgres_claim_ready(1 << (limit - 1).bit_length()).rows(connection, bound)
    if not found:
        return Claimed([], queue_exists=False, worker_status=None)
    status, open_id, limited, some_due, some_expired, first = found[0][:6]
    if open_id is not None and limited:
        return Claimed([], True, as_status(status), limited=True)
    if open_id is not None and (some_due or some_expired):
        return _claim_all_postgres(connection, queue, bound)
    claimed = [] if first is None else in_order([make_message(queue, *row[5:]) for row in found])
    return Claimed(claimed, True, as_status(status))


def _claim_all_postgres(connection: Connection, queue: str, bound: dict[str, Any]) -> Claimed:
    """Claims also what came back, and finds what may not be handed out."""
    found = connection.execute(_POSTGRES_CLAIM, bound | {"at_once": AT_ONCE}).all()
    status, leftovers, first = found[0][:3]
    claimed = [] if first is None else in_order([make_message(queue, *row[2:]) for row in found])
    return Claimed(claimed, True, as_status(status), leftovers)


def _finish_postgres(
    connection: Connection, holds: Holds, results: Mapping[int, str] | None, bound: dict[str, Any]
) -> set[int]:
    if len(holds.tokens) == 1:
        done = _POSTGRES_FINISH_ONE.rows(connection, bound | _only(holds, results))
    elif results is None:
        done = _POSTGRES_FINISH.rows(connection, bound | held_by(holds))
    else:
        bound = bound | held_with(holds, results)
        done = _POSTGRES_FINISH_WITH_RESULTS.rows(connection, bound)
    return {row[0] for row in done}


def _only(holds: Holds, results: Mapping[int, str] | None) -> dict[str, Any]:
    """The parameters that end a single claim."""
    (id,) = holds.tokens
    return held_one(holds) | {"result": None if results is None else results.get(id)}


# SQLite

_SQLITE_QUEUE = Hot(QUEUE.add_columns(*TROUBLES))
_SQLITE_FIRST = Hot(
    select(
        messages.c.id,
        messages.c.payload,
        messages.c.headers,
        messages.c.codec,
        messages.c.priority,
        messages.c.enqueued_at,
        messages.c.expires_at,
        messages.c.read_ct,
        messages.c.released_ct,
        messages.c.producer_worker_id,
        messages.c.dedup_key,
        messages.c.group_key,
    )
    .where(messages.c.queue_id == _open_id, messages.c.ready)
    .order_by(*ORDER)
    .limit(bindparam("limit"))
)
_AMONG_IDS = messages.c.id.in_(select(rows("ids").c.value).scalar_subquery())
_SQLITE_HOLD = Hot(update(messages).where(_AMONG_IDS).values(vt=moment("lease"), **CLAIM))
_fenced = select(messages).join_from(messages, HELD, and_(*FENCE))
_SQLITE_DELETE = Hot(
    delete(messages)
    .where(messages.c.id.in_(_fenced.with_only_columns(messages.c.id).scalar_subquery()))
    .returning(messages.c.id)
)
_SQLITE_ARCHIVE = Hot(_archive(messages, _fenced).returning(archive.c.original_message_id))
_SQLITE_ARCHIVE_WITH_RESULTS = Hot(
    _archive(
        messages,
        select(messages).join_from(messages, _HELD_WITH_RESULTS, and_(*_FENCE_WITH_RESULTS)),
        result=_HELD_WITH_RESULTS.c.result,
    ).returning(archive.c.original_message_id)
)
_SQLITE_TAKE_OUT = Hot(delete(messages).where(_AMONG_IDS))


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
    found = _SQLITE_QUEUE.rows(connection, bound)
    if not found:
        return Claimed([], queue_exists=False, worker_status=None)
    queue_lease, max_read_ct, status, open_id, limited, some_due, some_expired = found[0]
    if open_id is None or limited:
        return Claimed([], True, as_status(status), limited=bool(limited and open_id))
    bound |= {"open_id": open_id, "limit": limit, "max_read_ct": max_read_ct}
    leftovers = bool(some_expired)
    if some_due:
        leftovers |= return_due(connection, bound)
    now = now.astimezone(UTC)
    vt = now + timedelta(seconds=queue_lease if lease is None else lease)
    # Quicker than RETURNING: most of what a claim changes is known here.
    first = _SQLITE_FIRST.rows(connection, bound)
    claimed = [
        make_message(
            queue,
            id,
            payload,
            headers,
            codec,
            priority,
            vt,
            since,
            until,
            read_ct + 1,
            released_ct,
            now,
            producer,
            worker,
            key,
            group,
        )
        for (
            id,
            payload,
            headers,
            codec,
            priority,
            since,
            until,
            read_ct,
            released_ct,
            producer,
            key,
            group,
        ) in first
        if until is None or until > now
    ]
    if claimed:
        ids = json.dumps([message.id for message in claimed])
        _SQLITE_HOLD.rows(connection, bound | at(lease=(vt, 0.0)) | {"ids": ids})
    return Claimed(decodable(connection, claimed, now), True, as_status(status), leftovers)


def decodable(connection: Connection, claimed: list[Message], now: datetime) -> list[Message]:
    """Text that is not JSON can only come from outside; it must not block the queue it is in."""
    broken = [
        message.id
        for message in claimed
        if isinstance(message.payload, Undecodable) or isinstance(message.headers, Undecodable)
    ]
    if not broken:
        return claimed
    bury(connection, broken, reason=ArchiveReason.FAILED, error=UNDECODABLE, now=now)
    return [message for message in claimed if message.id not in broken]


_fenced_one = select(messages).where(*FENCE_ONE)
_SQLITE_ARCHIVE_ONE = Hot(_archive(messages, _fenced_one, result=_RESULT_OF_ONE))
_SQLITE_DELETE_ONE = Hot(delete(messages).where(*FENCE_ONE).returning(messages.c.id))


def _finish_sqlite(
    connection: Connection, holds: Holds, results: Mapping[int, str] | None, bound: dict[str, Any]
) -> set[int]:
    if len(holds.tokens) == 1:
        bound = bound | _only(holds, results)
        _SQLITE_ARCHIVE_ONE.rows(connection, bound)
        return {row[0] for row in _SQLITE_DELETE_ONE.rows(connection, bound)}
    if results is None:
        archived = _SQLITE_ARCHIVE.rows(connection, bound | held_by(holds))
    else:
        bound = bound | held_with(holds, results)
        archived = _SQLITE_ARCHIVE_WITH_RESULTS.rows(connection, bound)
    done = {row[0] for row in archived}
    # What the fence let through is ours in this transaction: no need to ask again.
    _SQLITE_TAKE_OUT.rows(connection, {"ids": json.dumps(list(done))})
    return done


# Both

_finish = per_dialect(postgresql=_finish_postgres, sqlite=_finish_sqlite)
_delete = per_dialect(postgresql=_POSTGRES_DELETE.rows, sqlite=_SQLITE_DELETE.rows)

claim = per_dialect(postgresql=_claim_postgres, sqlite=_claim_sqlite)
"""Claim up to `limit` messages of a queue for a worker, for `lease` seconds or the queue's own
lease.
"""


def finish(
    connection: Connection,
    holds: Holds,
    *,
    reason: ArchiveReason,
    error: str | None,
    now: datetime | None,
    results: Mapping[int, str] | None = None,
) -> set[int]:
    """Move held messages to the archive. Returns the ids of those that were really held.

    `results` are JSON texts by the id of their message.
    """
    bound = {"reason": reason, "error": error} | at(now=(now, 0.0))
    done = _finish(connection, holds, results, bound)
    if reason is ArchiveReason.FAILED:
        workflows.end_lost(connection, list(done), error=error, now=now)
    return done


def remove(connection: Connection, holds: Holds) -> set[int]:
    """Delete held messages without a trace. Returns the ids of those that were really held."""
    return {id for (id,) in _delete(connection, held_by(holds))}


_BURY = (_archive(messages, select(messages).where(_GIVEN)), delete(messages).where(_GIVEN))
_THIS_QUEUE = select(queues.c.id).where(queues.c.queue_name == bindparam("queue")).scalar_subquery()
_EXPIRED_FIRST = (
    select(messages.c.id)
    .where(*_expired_and_free(_THIS_QUEUE))
    .order_by(messages.c.expires_at)
    .limit(bindparam("at_once"))
    .with_for_update(skip_locked=True)
)
_LAPSED_FOR_GOOD = (
    select(messages.c.id)
    .where(
        *_due(_THIS_QUEUE),
        messages.c.consumer_worker_id.is_not(None),
        is_last_attempt(
            select(queues.c.max_read_ct)
            .where(queues.c.queue_name == bindparam("queue"))
            .scalar_subquery()
        ),
    )
    .order_by(messages.c.vt)
    .limit(bindparam("at_once"))
    .with_for_update(skip_locked=True)
)


def sweep(connection: Connection, queue: str, *, now: datetime | None) -> int:
    """Take up to `AT_ONCE` expired and as many dead messages to the archive. Returns how many."""
    bound = {"queue": queue, "at_once": AT_ONCE} | at(now=(now, 0.0))
    expired = connection.execute(_EXPIRED_FIRST, bound).scalars().all()
    bury(connection, expired, reason=ArchiveReason.EXPIRED, error=None, now=now)
    dead = connection.execute(_LAPSED_FOR_GOOD, bound).scalars().all()
    bury(connection, dead, reason=ArchiveReason.FAILED, error=LAPSED, now=now)
    return len(expired) + len(dead)


def bury(
    connection: Connection,
    ids: Sequence[int],
    *,
    reason: ArchiveReason,
    error: str | None,
    now: datetime | None,
) -> None:
    """Move messages to the archive, whoever held them. Their rows are locked, or never shared."""
    if ids:
        bound = {"ids": ids, "reason": reason, "error": error} | at(now=(now, 0.0))
        with groups.ending(connection, ids, now=now):
            for statement in _BURY:
                connection.execute(statement, bound)
        workflows.end_lost(connection, ids, error=error or reason, now=now)


def as_status(word: str | None) -> WorkerStatus | None:
    return None if word is None else WorkerStatus(word)


def in_order(found: list[Message]) -> list[Message]:
    # RETURNING promises no order.
    found.sort(key=lambda message: (-message.priority, message.id))
    return found
