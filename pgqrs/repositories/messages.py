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

from sqlalchemy import Connection, Select, Text, bindparam, cast, func, insert, or_, select, update
from sqlalchemy.sql.expression import ColumnElement, FromClause

from pgqrs.errors import QueueNotFound
from pgqrs.models import messages, queues
from pgqrs.payloads import Batch
from pgqrs.repositories.expressions import Holds, at, held, held_by, moment, per_dialect, rows
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.repositories.hot import Hot
from pgqrs.sqltypes import BigId, Flag, Json
from pgqrs.types import Message, MessageId

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


def held_one(holds: Holds) -> dict[str, Any]:
    """The parameters of `FENCE_ONE`."""
    ((id, token),) = holds.tokens.items()
    return {"held_id": id, "held_by": holds.worker_id, "held_token": token}


# Locking the queue's row keeps it from being deleted until this commits.
QUEUE = (
    select(queues.c.id, (queues.c.waiting_until > moment("now")).label("waited_for"))
    .where(queues.c.queue_name == bindparam("queue"))
    .with_for_update(read=True, key_share=True)
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
    """`asking` also returns whether somebody waits for the queue, which only PostgreSQL has to know."""
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
    return inserted.returning(messages.c.id, select(queue.c.waited_for).scalar_subquery())


_PAYLOAD = cast(bindparam("payload", type_=Text()), Json())
_PAYLOADS = rows("payloads")
_ONE = Hot(_insert_into_queue(_PAYLOAD))
_ONE_ASKING = Hot(_insert_into_queue(_PAYLOAD, asking=True))
_MANY = Hot(_insert_into_queue(_PAYLOADS.c.value, _PAYLOADS, returning=False))
_LAST = Hot(select(func.last_insert_rowid(), func.changes()))
_MANY_ASKING = Hot(_insert_into_queue(_PAYLOADS.c.value, _PAYLOADS, asking=True))


class Enqueued(NamedTuple):
    """The ids of messages, and whether somebody elsewhere waits to be told of new ones."""

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
    return Enqueued(ids, bool(found) and bool(found[0][1]))


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
    connection: Connection, queue: str, batch: Batch, *, now: datetime | None, **options: Any
) -> Enqueued:
    """Add messages in order; all of them or none. `options` are those of `shared`."""
    enqueued: Enqueued = _enqueue(connection, batch, shared(queue, now=now, **options))
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


_EXTEND = Hot(
    update(messages)
    .where(*FENCE)
    .values(vt=moment("lease"), ready=bindparam("not_ready", False, type_=Flag()))
    .returning(messages.c.id)
)
_GIVE_BACK = Hot(
    update(messages)
    .where(*FENCE)
    .values(
        vt=moment("back"),
        ready=bindparam("now_ready", type_=Flag()),
        released_ct=messages.c.released_ct + bindparam("released"),
        consumer_worker_id=None,
    )
    .returning(messages.c.id)
)


def extend(connection: Connection, holds: Holds, *, lease: float, now: datetime | None) -> set[int]:
    """Let the leases end so long from now."""
    bound = held_by(holds) | at(lease=(now, lease))
    return {id for (id,) in _EXTEND.rows(connection, bound)}


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
    bound |= held_by(holds) | at(back=(now, delay) if eta is None else (eta, 0.0))
    return {id for (id,) in _GIVE_BACK.rows(connection, bound)}


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


def get(connection: Connection, id: int) -> Message | None:
    """One message, whoever holds it."""
    row = connection.execute(_GET, {"id": id}).first()
    return None if row is None else _message(row)


_EXISTING = select(messages.c.id).where(messages.c.id.in_(bindparam("ids", expanding=True)))


def existing(connection: Connection, ids: Sequence[int]) -> set[int]:
    """Those of these messages that are not finished."""
    return set(connection.execute(_EXISTING, {"ids": ids}).scalars())


def peek(connection: Connection, queue: str, *, limit: int, after: int) -> list[Message]:
    """Messages by id, without claiming them."""
    bound = {"queue": queue, "limit": limit, "after": after}
    return [_message(row) for row in connection.execute(_PEEK, bound)]


def _message(row: Sequence[Any]) -> Message:
    return Message(*row)


LATELY, SOON = 2.0, 0.02
"""Seconds."""
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


def next_in(connection: Connection, queue: str, *, now: datetime | None) -> float | None:
    """Seconds until the next delayed or leased message comes back; None if there is none.

    One that came back a moment ago counts too: who asks has looked before it did.
    """
    bound = {"queue": queue} | at(now=(now, 0.0), lately=(now, -LATELY))
    vt, asked = connection.execute(_NEXT, bound).one()
    return None if vt is None else max(SOON, float((vt - asked).total_seconds()))
