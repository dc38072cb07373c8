"""Claiming messages, and taking finished ones out: where the SQL really differs by database.

A claim hands out ready messages by priority, then id. Messages whose `vt` has passed come back
first: a delayed one, or one whose holder's lease lapsed, joins the ready ones. Not all may be
handed out, though: one whose lease lapsed on its last allowed attempt is dead, and one that is past
its expiry has expired. A claim passes over those and says so; then `sweep` takes them to the
archive.

Rows may also come from outside of this library. Each is judged by itself: one that cannot be decoded,
or whose counts are impossible, goes to the archive with the reason (`set_aside`), and the others are
handed out. And a claim ends at a number of bytes, so that large messages do not fill the memory; the
first is always handed out.

Sweeps and what comes back are bounded (`AT_ONCE`, `DUE_AT_ONCE`), so that a million messages that come
due or expire together cost no claim more than that.

PostgreSQL claims in one statement, which commits by itself: one round trip. Messages that came back
but were not handed out are marked ready in passing, so each returns once. SQLite has one writer at
a time, and does the same in steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Double,
    Insert,
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

from pgqrs.models import archive, limits, messages, queues, workers
from pgqrs.repositories import groups, workflows
from pgqrs.repositories.announcements import notify_of_result
from pgqrs.repositories.expressions import (
    SECOND,
    Holds,
    at,
    held,
    held_by,
    held_with,
    held_with_results,
    is_one_of,
    moment,
    per_dialect,
    present,
    rows,
)
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.repositories.hot import Budget, Hot
from pgqrs.repositories.messages import COLUMNS, FENCE, FENCE_ONE, HELD, fence, held_one
from pgqrs.sqltypes import BigId, Json, Undecodable
from pgqrs.types import ArchiveReason, Message, WorkerStatus, make_message

AT_ONCE = 200
"""Messages that a sweep takes away."""
DUE_AT_ONCE = 1000
"""Messages that come back in one claim."""
LAPSED = "the lease lapsed on the last allowed attempt: its holder died, or took too long"
UNDECODABLE = "the stored payload or headers are not JSON"
MISCOUNTED = "the stored counts of claims and releases are impossible"
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of payload that one claim takes, unless it says otherwise."""
LARGE = 2000
"""Bytes from which on a payload may be stored outside of its row."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim found: the messages, and whether the queue and the worker's row are still there."""

    messages: list[Message]
    queue_exists: bool
    worker_status: WorkerStatus | None
    leftovers: bool = False
    """Whether it passed over messages that `sweep` should take away."""
    limited: bool = False
    """True if the queue has limits. `claim` then returns no messages; use `limits.claim`."""
    is_closed: bool = False
    """True if this worker may not claim now: the queue is paused, or the lease is longer than it
    allows.
    """
    room_in: float | None = None
    """Seconds until its rate allows the next message; None if it does now."""
    cut_short: bool = False
    """True if there may be more at once: it was too much for one claim, or some was set aside."""
    spoiled: Sequence[Message] = ()
    """Claimed, but not to be handed out: for `set_aside`."""
    size: int = 0
    """Bytes of payload, if the claim was cut short for its number."""


# Parts that both databases share

# Not the column itself: `case` writes out what it is given, and an identity pulls in a dialect.
_ID = type_coerce(queues.c.id, BigId)
LEASE: ColumnElement[float] = bindparam("lease", None, type_=Double())
"""The lease that was asked for; None for that of the queue."""
_LEASE_IS_ALLOWED = func.coalesce(queues.c.max_lease >= LEASE, true())
QUEUE = (
    select(
        queues.c.lease,
        queues.c.max_read_ct,
        type_coerce(workers.c.status, Text()).label("status"),
        case((and_(~queues.c.paused, workers.c.status == "ready", _LEASE_IS_ALLOWED), _ID)).label(
            "open_id"
        ),
    )
    .add_columns(
        or_(
            queues.c.max_in_flight.is_not(None),
            queues.c.max_in_flight_per_key.is_not(None),
            queues.c.rate_limit.is_not(None),
            # It had limits until lately, and some messages are still parked.
            exists().where(limits.c.queue_id == queues.c.id).correlate(queues),
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
_GIVEN = is_one_of(messages.c.id, "ids")
_RETURN = update(messages).where(_GIVEN).values(ready=true())


def return_due(connection: Connection, bound: dict[str, Any]) -> bool:
    """Make ready what came back; returns whether some of it may not be."""
    due = connection.execute(_DUE, bound | {"at_once": DUE_AT_ONCE}).all()
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
    queue = QUEUE.add_columns(*TROUBLES, present("now").label("present")).cte("queue")
    calm_id = select(queue.c.open_id).where(
        ~queue.c.some_due, ~queue.c.some_expired, ~queue.c.limited
    )
    first = (
        select(messages.c.id, *([messages.c.payload] if at_most > 1 else []))
        .where(messages.c.queue_id == calm_id.scalar_subquery(), messages.c.ready)
        .order_by(*ORDER)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .subquery("first")
    )
    few = select(first).limit(literal_column(str(at_most)))
    picked = few if at_most == 1 else _within_budget(few.subquery("few"))
    claimed = _postgres_hold(queue, picked)
    columns = (
        queue.c.status,
        queue.c.open_id,
        queue.c.limited,
        queue.c.some_due,
        queue.c.some_expired,
    )
    return Hot(select(*columns, claimed).select_from(queue.outerjoin(claimed, true())))


def _size(payload: ColumnElement[Any]) -> ColumnElement[int]:
    """About the bytes of a payload. Only one that is compressed or large is read for that."""
    stored = func.pg_column_size(payload)
    plain = func.pg_column_compression(payload).is_(None)
    whole = func.octet_length(cast(payload, Text()))
    return case((and_(stored < literal_column(str(LARGE)), plain), stored), else_=whole)


def _within_budget(first: FromClause) -> Select[Any]:
    """The ids of the first rows that have no more than so many bytes together, or just one."""
    sized = select(first.c.id, _size(first.c.payload).label("size")).subquery("sized")
    total = func.sum(sized.c.size).over(rows=(None, 0)) - sized.c.size
    counted = select(sized.c.id, total.label("before")).subquery("counted")
    return select(counted.c.id).where(counted.c.before < bindparam("max_bytes", type_=BigId))


def _postgres_hold(queue: CTE, picked: Select[Any]) -> CTE:
    """The update that makes a worker the holder of the messages picked.

    The time is read once, when the statement runs: it may have waited for a lock on the table.
    """
    lease: ColumnElement[float] = func.coalesce(LEASE, select(queue.c.lease).scalar_subquery())
    return (
        update(messages)
        .where(_is_one_of(picked))
        .values(
            CLAIM
            | {
                "dequeued_at": select(queue.c.present).scalar_subquery(),
                "vt": select(queue.c.present).scalar_subquery() + lease * SECOND,
            }
        )
        .returning(*COLUMNS)
        .cte("claimed")
    )


def _postgres_claim() -> Select[Any]:
    queue = QUEUE.add_columns(present("now").label("present")).cte("queue")
    open_id = select(queue.c.open_id).scalar_subquery()
    ready = (
        select(messages.c.id, messages.c.priority, messages.c.payload, EXPIRED.label("gone"))
        .where(messages.c.queue_id == open_id, messages.c.ready)
        .order_by(*ORDER)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .cte("ready")
    )
    max_read_ct = select(queue.c.max_read_ct).scalar_subquery()
    due = (
        select(
            messages.c.id,
            messages.c.priority,
            messages.c.payload,
            _is_gone(max_read_ct).label("gone"),
        )
        .where(*_due(open_id))
        .order_by(messages.c.vt)
        .limit(bindparam("at_once"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )
    candidates = union_all(
        select(ready.c.id, ready.c.priority, ready.c.payload).where(~ready.c.gone),
        select(due.c.id, due.c.priority, due.c.payload).where(~due.c.gone),
    ).subquery("candidates")
    first = (
        select(candidates.c.id, candidates.c.payload)
        .order_by(candidates.c.priority.desc(), candidates.c.id)
        .limit(bindparam("limit"))
        .subquery("first")
    )
    picked = _within_budget(first).cte("picked")
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


class _PostgresFinish:
    """A statement that ends messages, and the same telling those who wait for results."""

    def __init__(
        self, *conditions: ColumnElement[bool], result: ColumnElement[Any] | None = None
    ) -> None:
        found = (messages,) if result is None else (messages, result.label("result"))
        finished = delete(messages).where(*conditions).returning(*found).cte("finished")
        kept = None if result is None else finished.c.result
        ended = _archive(finished, result=kept)
        self._plain = Hot(ended.returning(archive.c.original_message_id))
        told = notify_of_result(archive.c.queue_id)
        self._telling = Hot(ended.returning(archive.c.original_message_id, told))

    def run(self, connection: Connection, bound: dict[str, Any]) -> set[int]:
        chosen = self._plain if bound["channel"] is None else self._telling
        return {row[0] for row in chosen.rows(connection, bound)}


_free = messages.alias("free")


def _unlocked(condition: ColumnElement[bool]) -> Select[Any]:
    """Locks the messages that no other transaction has locked. Returns their ids."""
    return select(_free.c.id).where(condition).with_for_update(skip_locked=True)


def _unlocked_among(ids: Select[Any]) -> ColumnElement[bool]:
    return _is_one_of(_unlocked(_free.c.id == func.any(func.array(ids.scalar_subquery()))))


class _PostgresFinishes:
    """The statements that end one message, many, and many with results."""

    def __init__(
        self, among: Callable[[Select[Any]], ColumnElement[bool]], *one: ColumnElement[bool]
    ) -> None:
        """`among` chooses by ids those that are to be ended; `one` are its conditions for one."""
        self.one = _PostgresFinish(*FENCE_ONE, *one, result=_RESULT_OF_ONE)
        self.many = _PostgresFinish(*FENCE, among(select(_HELD_IDS.c.id)))
        self.many_with_results = _PostgresFinish(
            *_FENCE_WITH_RESULTS,
            among(select(held_with_results("held_ids").c.id)),
            result=_HELD_WITH_RESULTS.c.result,
        )


_POSTGRES_FINISH = _PostgresFinishes(_is_one_of)
_POSTGRES_FINISH_UNLOCKED = _PostgresFinishes(
    _unlocked_among, _is_one_of(_unlocked(_free.c.id == bindparam("held_id", type_=BigId)))
)


def _claim_postgres(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime | None,
    max_bytes: int = MAX_BYTES,
) -> Claimed:
    bound: dict[str, Any] = {"queue": queue, "worker": worker, "limit": limit, "lease": lease}
    bound |= {"max_bytes": max_bytes} | at(now=(now, 0.0))
    found = _postgres_claim_ready(1 << (limit - 1).bit_length()).rows(connection, bound)
    if not found:
        return Claimed([], queue_exists=False, worker_status=None)
    status, open_id, limited, some_due, some_expired, first = found[0][:6]
    if limited:
        return Claimed([], True, as_status(status), limited=True)
    if open_id is None:
        return Claimed([], True, as_status(status), is_closed=True)
    if some_due or some_expired:
        return _claim_all_postgres(connection, queue, bound)
    claimed = [] if first is None else in_order([make_message(queue, *row[5:]) for row in found])
    return sorted_out(claimed, status)


def _claim_all_postgres(connection: Connection, queue: str, bound: dict[str, Any]) -> Claimed:
    """Claims also what came back, and finds what may not be handed out."""
    found = connection.execute(_POSTGRES_CLAIM, bound | {"at_once": DUE_AT_ONCE}).all()
    status, leftovers, first = found[0][:3]
    claimed = [] if first is None else in_order([make_message(queue, *row[2:]) for row in found])
    return sorted_out(claimed, status, leftovers)


def sorted_out(claimed: list[Message], status: str, leftovers: bool = False) -> Claimed:
    """What a claim that has committed found: to set aside what is spoiled takes another transaction."""
    spoiled = spoiled_among(claimed)
    if spoiled:
        claimed = _without(claimed, spoiled)
    return Claimed(
        claimed, True, as_status(status), leftovers, cut_short=bool(spoiled), spoiled=spoiled
    )


def _finish_postgres(
    connection: Connection,
    holds: Holds,
    results: Mapping[int, str] | None,
    bound: dict[str, Any],
    *,
    skip_locked: bool,
) -> set[int]:
    finish = _POSTGRES_FINISH_UNLOCKED if skip_locked else _POSTGRES_FINISH
    if len(holds.tokens) == 1:
        return finish.one.run(connection, bound | _only(holds, results))
    if results is None:
        return finish.many.run(connection, bound | held_by(holds))
    return finish.many_with_results.run(connection, bound | held_with(holds, results))


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
    max_bytes: int = MAX_BYTES,
) -> Claimed:
    bound = at(now=(now, 0.0)) | {"queue": queue, "worker": worker, "lease": lease}
    found = _SQLITE_QUEUE.rows(connection, bound)
    if not found:
        return Claimed([], queue_exists=False, worker_status=None)
    queue_lease, max_read_ct, status, open_id, limited, some_due, some_expired = found[0]
    if open_id is None or limited:
        return Claimed(
            [], True, as_status(status), limited=bool(limited), is_closed=open_id is None
        )
    bound |= {"open_id": open_id, "limit": limit, "max_read_ct": max_read_ct}
    leftovers = bool(some_expired)
    if some_due:
        leftovers |= return_due(connection, bound)
    now = now.astimezone(UTC)
    vt = now + timedelta(seconds=queue_lease if lease is None else lease)
    # Quicker than RETURNING: most of what a claim changes is known here.
    first = _SQLITE_FIRST.rows(connection, bound, budget=Budget(max_bytes, column=1))
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
    sound = decodable(connection, claimed, now)
    return Claimed(sound, True, as_status(status), leftovers, cut_short=len(sound) < len(claimed))


def decodable(connection: Connection, claimed: list[Message], now: datetime) -> list[Message]:
    """Those that can be handed out. The others are set aside, in the transaction that claimed them."""
    spoiled = spoiled_among(claimed)
    if not spoiled:
        return claimed
    set_aside(connection, spoiled, now=now)
    return _without(claimed, spoiled)


def spoiled_among(claimed: Sequence[Message]) -> list[Message]:
    """Returns the claimed messages that no holder could use: they were written past this library.

    One loop without a call for each message, since every claim passes here.
    """
    return [
        message
        for message in claimed
        if type(message.payload) is Undecodable
        or not 0 <= message.released_ct < message.read_ct
        or (message.headers is not None and type(message.headers) is not dict)
    ]


def _without(claimed: Sequence[Message], spoiled: Sequence[Message]) -> list[Message]:
    ids = {message.id for message in spoiled}
    return [message for message in claimed if message.id not in ids]


def set_aside(connection: Connection, spoiled: Sequence[Message], *, now: datetime | None) -> None:
    """Take messages that were claimed, and cannot be handed out, to the archive with the reason."""
    for error in (UNDECODABLE, MISCOUNTED):
        ids = [message.id for message in spoiled if _trouble(message) == error]
        bury(connection, ids, reason=ArchiveReason.FAILED, error=error, now=now)


def _trouble(message: Message) -> str:
    counted = 0 <= message.released_ct < message.read_ct
    return UNDECODABLE if counted else MISCOUNTED


_fenced_one = select(messages).where(*FENCE_ONE)
_SQLITE_ARCHIVE_ONE = Hot(_archive(messages, _fenced_one, result=_RESULT_OF_ONE))
_SQLITE_DELETE_ONE = Hot(delete(messages).where(*FENCE_ONE).returning(messages.c.id))


def _finish_sqlite(
    connection: Connection,
    holds: Holds,
    results: Mapping[int, str] | None,
    bound: dict[str, Any],
    *,
    skip_locked: bool,
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
    channel: str | None = None,
    skip_locked: bool = False,
) -> set[int]:
    """Move held messages to the archive. Returns the ids of those that were really held; with
    `skip_locked`, without those whose row another transaction has locked (PostgreSQL).

    `results` are JSON texts by the id of their message. On the `channel` processes that wait for results
    are told, where that is needed (PostgreSQL).
    """
    bound = {"reason": reason, "error": error, "channel": channel} | at(now=(now, 0.0))
    done = _finish(connection, holds, results, bound, skip_locked=skip_locked)
    if reason is ArchiveReason.FAILED:
        workflows.end_lost(connection, list(done), error=error, now=now)
    return done


def remove(connection: Connection, holds: Holds) -> set[int]:
    """Delete held messages without a trace. Returns the ids of those that were really held."""
    return {id for (id,) in _delete(connection, held_by(holds))}


_BURY = (_archive(messages, select(messages).where(_GIVEN)), delete(messages).where(_GIVEN))
_THIS_QUEUE = select(queues.c.id).where(queues.c.queue_name == bindparam("queue")).scalar_subquery()
_EXPIRED_FIRST = (
    select(messages.c.id, messages.c.queue_id, messages.c.group_key)
    .where(*_expired_and_free(_THIS_QUEUE))
    .order_by(messages.c.expires_at)
    .limit(bindparam("at_once"))
)
_LAPSED_FOR_GOOD = (
    select(messages.c.id, messages.c.queue_id, messages.c.group_key)
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
)


_LEAVE_OUT = (
    update(messages)
    .where(
        messages.c.id.in_(
            select(messages.c.id)
            .where(_GIVEN, messages.c.ready, EXPIRED)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
    )
    .values(ready=false())
)


class Swept(NamedTuple):
    """How many messages a sweep took away, and how many others are out of the way of claims now."""

    ended: int
    left_out: int


def sweep(connection: Connection, queue: str, *, now: datetime | None) -> Swept:
    """Take up to `AT_ONCE` expired and as many dead messages to the archive.

    The message of a run that has finished steps since it was claimed first is not dead: its attempts are
    counted anew. It counts as taken away, since it can be claimed now.

    An expired message whose group another transaction has locked stays, and is not ready any more:
    claims would look at it first, and find nothing else for as long as the group is locked.
    """
    bound = {"queue": queue, "at_once": AT_ONCE} | at(now=(now, 0.0))
    ends: tuple[tuple[Select[Any], ArchiveReason, str | None], ...] = (
        (_EXPIRED_FIRST, ArchiveReason.EXPIRED, None),
        (_LAPSED_FOR_GOOD, ArchiveReason.FAILED, LAPSED),
    )
    found = [connection.execute(chosen, bound).all() for chosen, _, _ in ends]
    with groups.trying(connection, [row for rows in found for row in rows], now=now) as free:
        total, stuck = 0, [row.id for row in found[0] if row.id not in free]
        left_out = connection.execute(_LEAVE_OUT, bound | {"ids": stuck}).rowcount if stuck else 0
        for (chosen, reason, error), rows in zip(ends, found, strict=True):
            wanted = bound | {"ids": [row.id for row in rows if row.id in free]}
            # Asked once more, now that they are locked: they may have been claimed or ended since.
            locked = chosen.where(_GIVEN).with_for_update(skip_locked=True)
            ids = connection.execute(locked, wanted).scalars().all() if wanted["ids"] else []
            total += len(ids)
            if ids and reason is ArchiveReason.FAILED:
                forgiven = workflows.forgive(connection, ids)
                ids = [id for id in ids if id not in forgiven]
            if ids:
                take_away(connection, ids, reason=reason, error=error, now=now)
    return Swept(total, left_out)


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
        with groups.ending(connection, ids, now=now):
            take_away(connection, ids, reason=reason, error=error, now=now)


def take_away(
    connection: Connection,
    ids: Sequence[int],
    *,
    reason: ArchiveReason,
    error: str | None,
    now: datetime | None,
) -> None:
    """The same, inside `groups.ending` or where no message has a group."""
    bound = {"ids": ids, "reason": reason, "error": error} | at(now=(now, 0.0))
    for statement in _BURY:
        connection.execute(statement, bound)
    workflows.end_lost(connection, ids, error=error or reason, now=now)


def as_status(word: str | None) -> WorkerStatus | None:
    return None if word is None else WorkerStatus(word)


def in_order(found: list[Message]) -> list[Message]:
    # RETURNING promises no order.
    found.sort(key=lambda message: (-message.priority, message.id))
    return found
