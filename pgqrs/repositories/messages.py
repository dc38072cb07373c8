"""Messages: in, and everything their holder may do with them short of finishing them.

Every change by a holder is fenced: it matches the message's id, the worker that claimed it and the
`read_ct` of that claim (see `FENCE`), so a holder that lost its lease changes nothing. What is
returned are the ids that were changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    Connection,
    Double,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    exists,
    false,
    func,
    insert,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.sql.expression import CTE, ColumnElement, FromClause

from pgqrs.errors import LeaseTooLong, QueueNotFound
from pgqrs.models import limits, messages, queues, waiting, workflows
from pgqrs.payloads import Batch
from pgqrs.repositories.announcements import notify_if
from pgqrs.repositories.expressions import (
    SECOND,
    Holds,
    at,
    held,
    held_by,
    is_one_of,
    moment,
    per_dialect,
    present,
    rows,
)
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.repositories.hot import Hot
from pgqrs.repositories.reading import bare, telling
from pgqrs.sqltypes import BigId, Flag, Json, UTCDateTime
from pgqrs.types import NOT_CLAIMED, Message, MessageId, make_message

T = TypeVar("T")
COLUMNS = (
    messages.c.id,
    messages.c.payload,
    messages.c.headers,
    messages.c.codec,
    messages.c.priority,
    messages.c.vt,
    messages.c.enqueued_at,
    messages.c.expires_at,
    messages.c.read_ct,
    messages.c.released_ct,
    messages.c.dequeued_at,
    messages.c.producer_worker_id,
    messages.c.consumer_worker_id,
    messages.c.dedup_key,
    messages.c.group_key,
)
"""In the order of the fields of `Message`, which starts with the name of the queue."""

CHUNK_BYTES = 8 * 1024 * 1024
"""The most text sent in one statement of a batch; JSONB itself ends at 256 MB."""

HELD = held()


def fence(held: FromClause) -> tuple[ColumnElement[bool], ...]:
    """What proves that the messages in `held` are held."""
    return (
        messages.c.id == held.c.id,
        messages.c.consumer_worker_id == bindparam("held_by", type_=BigId),
        or_(held.c.read_ct.is_(None), messages.c.read_ct == held.c.read_ct),
    )


FENCE = fence(HELD)
FENCE_ONE: tuple[ColumnElement[bool], ...] = (
    messages.c.id == bindparam("held_id", type_=BigId),
    messages.c.consumer_worker_id == bindparam("held_by", type_=BigId),
    messages.c.read_ct
    == func.coalesce(bindparam("held_token", type_=messages.c.read_ct.type), messages.c.read_ct),
)
"""The same for a single message, which is quicker."""
FENCE_RUN: tuple[ColumnElement[bool], ...] = (
    *FENCE_ONE[:2],
    messages.c.read_ct == bindparam("held_token", type_=messages.c.read_ct.type),
)
"""The same for the message of a run, whose token is always known."""


def held_one(holds: Holds) -> dict[str, Any]:
    """The parameters of `FENCE_ONE`."""
    ((id, token),) = holds.tokens.items()
    return {"held_id": id, "held_by": holds.worker_id, "held_token": token}


# Locking the queue's row keeps it from being deleted until this commits.
QUEUE = (
    select(
        queues.c.id,
        select(waiting.c.waiting_until > moment("now"))
        .where(waiting.c.queue_id == queues.c.id)
        .scalar_subquery()
        .label("waited_for"),
    )
    .where(queues.c.queue_name == bindparam("queue"))
    .with_for_update(read=True, key_share=True, of=queues)
)
SHARED: dict[str, ColumnElement[Any]] = {
    "headers": cast(bindparam("headers", type_=Text()), Json()),
    "codec": bindparam("codec", type_=Text()),
    "priority": bindparam("priority", type_=messages.c.priority.type),
    "ready": bindparam("ready", type_=Flag()),
    "vt": moment("vt"),
    "enqueued_at": moment("now"),
    "expires_at": moment("expires"),
    "read_ct": bindparam("zero", 0, type_=messages.c.read_ct.type),
    "released_ct": bindparam("zero", 0, type_=messages.c.read_ct.type),
    "producer_worker_id": bindparam("producer", type_=BigId),
}
"""What all messages of an enqueue have in common."""


def _insert_into_queue(
    payload: ColumnElement[Any],
    source: FromClause | None = None,
    *,
    asking: bool = False,
    returning: bool = True,
) -> Any:
    """`asking` also returns whether a consumer waits for the queue, and tells it if there is a channel;
    only PostgreSQL has to know.
    """
    # PostgreSQL would work out times anew for each row of a batch; here it does so once.
    times = {name: SHARED[name] for name in ("vt", "enqueued_at", "expires_at")} if asking else {}
    queue = QUEUE.add_columns(*(time.label(name) for name, time in times.items())).cte("queue")
    values = {"queue_id": queue.c.id, "payload": payload} | SHARED
    values |= {name: queue.c[name] for name in times}
    chosen: Select[Any] = select(*values.values()).select_from(queue)
    if source is not None:
        # Both databases read a list in its order, and one row beside it does not change that.
        chosen = chosen.join_from(queue, source, queue.c.id.is_not(None))
    inserted = insert(messages).from_select(list(values), chosen)
    if not returning:
        return inserted
    if not asking:
        return inserted.returning(messages.c.id)
    has_channel = bindparam("channel", type_=Text()).is_not(None)
    return inserted.returning(
        messages.c.id,
        select(queue.c.waited_for).scalar_subquery(),
        select(notify_if(and_(queue.c.waited_for, has_channel))).scalar_subquery(),
    )


_PAYLOAD = cast(bindparam("payload", type_=Text()), Json())
_PAYLOADS = rows("payloads")
_ONE = Hot(_insert_into_queue(_PAYLOAD))
_ONE_ASKING = Hot(_insert_into_queue(_PAYLOAD, asking=True))
_MANY = Hot(_insert_into_queue(_PAYLOADS.c.value, _PAYLOADS, returning=False))
_LAST = Hot(select(func.last_insert_rowid(), func.changes()))
_MANY_ASKING = Hot(_insert_into_queue(_PAYLOADS.c.value, _PAYLOADS, asking=True))


class Enqueued(NamedTuple):
    """The ids of messages, and whether a consumer elsewhere has yet to be told of them."""

    ids: list[MessageId]
    waited_for: bool


def _enqueue_postgres(connection: Connection, batch: Batch, bound: dict[str, Any]) -> Enqueued:
    found: list[Any] = []
    if batch.size == 1 and batch.texts:
        found = _ONE_ASKING.rows(connection, bound | {"payload": batch.texts[0]})
    else:
        for payloads in _arrays(batch):
            found += _MANY_ASKING.rows(connection, bound | {"payloads": payloads})
    ids = list(map(MessageId, sorted([row[0] for row in found])))
    return Enqueued(ids, bool(found) and bool(found[0][1]) and bound["channel"] is None)


def _arrays(batch: Batch) -> Iterator[str]:
    """A batch as JSON arrays, each small enough for one statement."""
    if batch.whole is not None:
        yield batch.whole
        return
    for piece in pieces(batch.texts, size=len):
        yield f"[{','.join(piece)}]"


def _enqueue_sqlite(connection: Connection, batch: Batch, bound: dict[str, Any]) -> Enqueued:
    if batch.size == 1 and batch.texts:
        found = _ONE.rows(connection, bound | {"payload": batch.texts[0]})
        return Enqueued([MessageId(row[0]) for row in found], False)
    # Else as strings: SQLite would turn a bare number into its own, and lose digits.
    payloads = batch.whole or json.dumps(batch.texts, ensure_ascii=False)
    _MANY.rows(connection, bound | {"payloads": payloads})
    ((last, count),) = _LAST.rows(connection, {})
    # One statement of the only writer: the ids follow each other.
    ids = map(MessageId, range(last - count + 1, last + 1)) if count else ()
    return Enqueued(list(ids), False)


_enqueue = per_dialect(postgresql=_enqueue_postgres, sqlite=_enqueue_sqlite)


def enqueue(
    connection: Connection,
    queue: str,
    batch: Batch,
    *,
    now: datetime | None,
    channel: str | None = None,
    **options: Any,
) -> Enqueued:
    """Add messages in order; all of them or none. `options` are those of `shared`. On the `channel`
    consumers that wait in other processes are told.
    """
    bound = shared(queue, now=now, **options) | {"channel": channel}
    enqueued: Enqueued = _enqueue(connection, batch, bound)
    if len(enqueued.ids) != batch.size:
        raise QueueNotFound(queue)
    return enqueued


def shared(
    queue: str,
    *,
    headers: str | None,
    codec: str | None = None,
    priority: int,
    delay: float,
    eta: datetime | None,
    ttl: float | None,
    expires_at: datetime | None,
    producer: int | None,
    now: datetime | None,
) -> dict[str, Any]:
    """The parameters of `SHARED`."""
    vt = (now, delay) if eta is None else (eta, 0.0)
    expires = (now, ttl) if expires_at is None else (expires_at, 0.0)
    return {
        "queue": queue,
        "headers": headers,
        "codec": codec,
        "priority": priority,
        "ready": eta is None and delay == 0,
        "producer": producer,
    } | at(now=(now, 0.0), vt=vt, expires=expires)


def fits_one_statement(batch: Batch) -> bool:
    """Whether a batch needs no transaction around it."""
    return batch.whole is not None or batch.size == 1 or sum(map(len, batch.texts)) <= CHUNK_BYTES


def pieces(items: Sequence[T], *, size: Callable[[T], int]) -> Iterator[list[T]]:
    """In order, each small enough for one statement."""
    piece: list[T] = []
    room = CHUNK_BYTES
    for item in items:
        if size(item) > room and piece:
            yield piece
            piece, room = [], CHUNK_BYTES
        piece.append(item)
        room -= size(item)
    if piece:
        yield piece


def _has_limits(queue_id: ColumnElement[Any]) -> ColumnElement[bool]:
    """True if claims of a queue take turns (see `limits`)."""
    return exists().where(limits.c.queue_id == queue_id)


def _may_extend(message: FromClause, now: ColumnElement[datetime]) -> ColumnElement[bool]:
    """Where there are limits, a claim that lapsed is over: others may have its place."""
    return or_(and_(~message.c.ready, message.c.vt > now), ~_has_limits(message.c.queue_id))


_BACK: dict[str, Any] = {
    "ready": bindparam("now_ready", type_=Flag()),
    "released_ct": messages.c.released_ct + bindparam("released"),
    "consumer_worker_id": None,
    "blocked": UNBLOCKED,  # one that lapsed may have been parked since
}
_HELD_AND_FREE = (*FENCE, messages.c.blocked == UNBLOCKED)


# PostgreSQL: an UPDATE would work out times before it waits for a row. So rows are locked first.


def _lock(*conditions: ColumnElement[bool], skip_locked: bool) -> tuple[CTE, CTE]:
    """Held messages, locked, and the time once all of them are."""
    locked = (
        select(messages.c.id, messages.c.ready, messages.c.vt, messages.c.queue_id)
        .join_from(messages, HELD, and_(*conditions))
        .order_by(messages.c.id)
        .with_for_update(of=messages, key_share=True, skip_locked=skip_locked)
        .cte("locked")
    )
    clock = select(present("now").label("present"), func.count()).select_from(locked).cte("clock")
    return locked, clock


def _change(
    values: dict[str, Any],
    conditions: Sequence[ColumnElement[bool]],
    *,
    extends: bool,
    skip_locked: bool = False,
) -> Hot:
    """The statement that makes held messages wait so long from now, or until a time that is given."""
    locked, clock = _lock(*conditions, skip_locked=skip_locked)
    now = select(clock.c.present).scalar_subquery()
    chosen = select(locked.c.id)
    if extends:
        chosen = chosen.where(_may_extend(locked, now))
    until = func.coalesce(
        bindparam("until", type_=UTCDateTime()), now + bindparam("wait", type_=Double()) * SECOND
    )
    return Hot(
        update(messages)
        .where(messages.c.id == func.any(func.array(chosen.scalar_subquery())))
        .values(values | {"vt": until})
        .returning(messages.c.id)
    )


# SQLite


def _change_at_once(values: dict[str, Any], *conditions: ColumnElement[bool]) -> Hot:
    return Hot(
        update(messages)
        .where(*conditions)
        .values(values | {"vt": moment("until")})
        .returning(messages.c.id)
    )


# Both


class _Change(NamedTuple):
    """A statement for each database."""

    postgresql: Hot
    sqlite: Hot


def is_released_too_often(max_releases: ColumnElement[Any]) -> ColumnElement[bool]:
    """True if a message was given back as often as its queue allows.

    Not that of a run: a run gives its message back whenever it sleeps, and comes to its end.
    """
    return and_(
        func.coalesce(messages.c.released_ct >= max_releases, false()),
        ~exists().where(workflows.c.message_id == messages.c.id),
    )


def _of_its_queue(setting: ColumnElement[Any]) -> ColumnElement[Any]:
    return select(setting).where(queues.c.id == messages.c.queue_id).scalar_subquery()


_NOT_READY = {"ready": bindparam("not_ready", False, type_=Flag())}
_IS_ALLOWED = func.coalesce(
    _of_its_queue(queues.c.max_lease) >= bindparam("asked", type_=Double()), true()
)
_MAY_RELEASE = ~is_released_too_often(_of_its_queue(queues.c.max_releases))
_EXTEND = _Change(
    _change(_NOT_READY, (*_HELD_AND_FREE, _IS_ALLOWED), extends=True),
    _change_at_once(_NOT_READY, *_HELD_AND_FREE, _IS_ALLOWED, _may_extend(messages, moment("now"))),
)
_EXTEND_UNLOCKED = _EXTEND._replace(
    postgresql=_change(_NOT_READY, (*_HELD_AND_FREE, _IS_ALLOWED), extends=True, skip_locked=True)
)
_GIVE_BACK = _Change(_change(_BACK, FENCE, extends=False), _change_at_once(_BACK, *FENCE))
_RELEASE = _Change(
    _change(_BACK, (*FENCE, _MAY_RELEASE), extends=False),
    _change_at_once(_BACK, *FENCE, _MAY_RELEASE),
)


def _change_postgres(
    connection: Connection,
    change: _Change,
    bound: dict[str, Any],
    *,
    wait: float,
    eta: datetime | None,
    now: datetime | None,
) -> list[Any]:
    bound |= {"now_at": now, "wait": wait, "until": eta}
    return change.postgresql.rows(connection, bound)


def _change_sqlite(
    connection: Connection,
    change: _Change,
    bound: dict[str, Any],
    *,
    wait: float,
    eta: datetime | None,
    now: datetime,
) -> list[Any]:
    bound |= at(now=(now, 0.0), until=(now, wait) if eta is None else (eta, 0.0))
    return change.sqlite.rows(connection, bound)


_change_held = per_dialect(postgresql=_change_postgres, sqlite=_change_sqlite)


def extend(
    connection: Connection,
    holds: Holds,
    *,
    lease: float,
    now: datetime | None,
    skip_locked: bool = False,
) -> set[int]:
    """Let the leases end so long from now; with `skip_locked` not of those that somebody has locked."""
    bound = held_by(holds) | {"asked": lease}
    change = _EXTEND_UNLOCKED if skip_locked else _EXTEND
    changed = _change_held(connection, change, bound, wait=lease, eta=None, now=now)
    return {id for (id,) in changed}


_LONGEST = (
    select(queues.c.queue_name, queues.c.max_lease)
    .select_from(messages.join(HELD, and_(*FENCE)).join(queues, messages.c.queue_id == queues.c.id))
    .where(queues.c.max_lease < bindparam("asked", type_=Double()))
    .limit(1)
)


def check_lease(connection: Connection, holds: Holds, *, lease: float) -> None:
    """Raise `LeaseTooLong` if held messages were not extended because their queue does not allow it."""
    found = connection.execute(_LONGEST, held_by(holds) | {"asked": lease}).first()
    if found is not None:
        raise LeaseTooLong(found.queue_name, lease, found.max_lease)


def give_back(
    connection: Connection,
    holds: Holds,
    *,
    delay: float,
    eta: datetime | None = None,
    counted: bool,
    now: datetime | None,
) -> set[int]:
    """End the leases and deliver again after a delay, or at `eta`; `counted` as a failed attempt,
    or not.
    """
    bound = {"now_ready": eta is None and delay == 0, "released": 0 if counted else 1}
    bound |= held_by(holds)
    changed = _change_held(connection, _GIVE_BACK, bound, wait=delay, eta=eta, now=now)
    return {id for (id,) in changed}


def release(
    connection: Connection,
    holds: Holds,
    *,
    delay: float,
    eta: datetime | None,
    now: datetime | None,
) -> set[int]:
    """Give held messages back untried, unless that was done too often: `archive.end_released` then
    ends them.
    """
    bound = {"now_ready": eta is None and delay == 0, "released": 1}
    bound |= held_by(holds)
    changed = _change_held(connection, _RELEASE, bound, wait=delay, eta=eta, now=now)
    return {id for (id,) in changed}


_HELD_BY_WORKER = (
    select(messages.c.id, messages.c.read_ct, queues.c.queue_name)
    .join_from(messages, queues, messages.c.queue_id == queues.c.id)
    .where(
        messages.c.consumer_worker_id == bindparam("worker", type_=BigId),
        ~messages.c.ready,
        messages.c.blocked == UNBLOCKED,
        messages.c.vt > moment("now"),
        messages.c.id > bindparam("after"),
    )
    .order_by(messages.c.id)
    .limit(bindparam("at_most"))
)


def held_by_worker(
    connection: Connection, worker_id: int, *, after: int, limit: int, now: datetime | None
) -> list[HeldMessage]:
    """What a worker holds now, by id, a page at a time."""
    bound = {"worker": worker_id, "after": after, "at_most": limit} | at(now=(now, 0.0))
    return [HeldMessage(*row) for row in connection.execute(_HELD_BY_WORKER, bound)]


class HeldMessage(NamedTuple):
    """A message that somebody holds."""

    id: int
    read_ct: int
    queue: str


_GET = (
    select(queues.c.queue_name, *COLUMNS)
    .join_from(messages, queues, messages.c.queue_id == queues.c.id)
    .where(messages.c.id == bindparam("id"))
)
_PEEK = (
    select(queues.c.queue_name, *COLUMNS)
    .join_from(queues, messages, messages.c.queue_id == queues.c.id)
    .where(queues.c.queue_name == bindparam("queue"), messages.c.id > bindparam("after"))
    .order_by(messages.c.id)
    .limit(bindparam("limit"))
)


_GET_BARE, _PEEK_BARE = (
    statement.with_only_columns(queues.c.queue_name, *bare(COLUMNS)) for statement in (_GET, _PEEK)
)


def get(connection: Connection, id: int, *, bare: bool = False) -> Message | None:
    """One message, whoever holds it; `bare` without what is JSON."""
    with telling():
        row = connection.execute(_GET_BARE if bare else _GET, {"id": id}).first()
    return None if row is None else _message(row)


_EXISTING = select(messages.c.id).where(is_one_of(messages.c.id, "ids"))


def existing(connection: Connection, ids: Sequence[int]) -> set[int]:
    """Those of these messages that are not finished."""
    return set(connection.execute(_EXISTING, {"ids": ids}).scalars())


def peek(
    connection: Connection, queue: str, *, limit: int, after: int, bare: bool = False
) -> list[Message]:
    """Messages by id, without claiming them; `bare` without what is JSON."""
    bound = {"queue": queue, "limit": limit, "after": after}
    with telling():
        return [_message(row) for row in connection.execute(_PEEK_BARE if bare else _PEEK, bound)]


def _message(row: Sequence[Any]) -> Message:
    return make_message(*row, NOT_CLAIMED)


LATELY, SOON = 2.0, 0.02
"""Seconds."""
_THIS_QUEUE = select(queues.c.id).where(queues.c.queue_name == bindparam("queue")).scalar_subquery()
_NEXT = (
    select(func.min(messages.c.vt, type_=messages.c.vt.type), moment("now"))
    .join_from(queues, messages, messages.c.queue_id == queues.c.id)
    .where(
        queues.c.queue_name == bindparam("queue"),
        ~messages.c.ready,
        messages.c.blocked == UNBLOCKED,
        messages.c.vt > moment("lately"),
    )
)
_SOME_READY = select(exists().where(messages.c.queue_id == _THIS_QUEUE, messages.c.ready))


def has_ready(connection: Connection, queue: str) -> bool:
    """True if a claim might find something: a message is ready."""
    return bool(connection.execute(_SOME_READY, {"queue": queue}).scalar_one())


def next_in(connection: Connection, queue: str, *, now: datetime | None) -> float | None:
    """Seconds until the next delayed or leased message comes back; None if there is none.

    One that came back a moment ago counts too: who asks has looked before it did.
    """
    bound = {"queue": queue} | at(now=(now, 0.0), lately=(now, -LATELY))
    vt, asked = connection.execute(_NEXT, bound).one()
    return None if vt is None else max(SOON, float((vt - asked).total_seconds()))
