"""Streams: who takes messages batch by batch, and keeps elsewhere how far it has come.

A batch is claimed for good: its messages come back when somebody says so, never by time. Its row
says which they are, so that whoever asks for the batch again, after a crash, is given the same. The
row is there until the batch is acknowledged.

Numbers of batches go up, also past those that were acknowledged or given back; a stream that starts
over from an older number is not given one of them twice.

Whoever works with a stream locks its row, so that all take turns. That is a lock which every database
has, and which no pooler can leave behind. Taking a stream over raises its epoch: who had it before is
told so at its next step, and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from pgqrs.errors import (
    InvalidArgument,
    QueueNotFound,
    StreamNotFound,
    StreamTaken,
    WorkerNotFound,
    WorkerStopped,
)
from pgqrs.models import messages, queues, stream_batches, streams
from pgqrs.repositories import archive, backlog, dequeue, groups, limits, workers
from pgqrs.repositories import messages as message_rows
from pgqrs.repositories import queues as queue_rows
from pgqrs.repositories.dequeue import Claimed
from pgqrs.repositories.expressions import Holds, at, held_by, moment
from pgqrs.repositories.messages import FENCE, HELD
from pgqrs.repositories.tails import Record, record_columns
from pgqrs.sqltypes import Json
from pgqrs.types import MAX_SECONDS, StreamInfo, WorkerStatus

AT_ONCE = 5000
"""Messages claimed, given back or acknowledged in one statement."""
SWEEPS = 10
FOR_GOOD = float(MAX_SECONDS)
ANY = 2**63 - 1

_LOCK = (
    select(streams, queues.c.queue_name)
    .join_from(streams, queues, streams.c.queue_id == queues.c.id)
    .where(streams.c.name == bindparam("stream"))
    .with_for_update(of=streams)
)
_CREATE = insert(streams).values(
    name=bindparam("stream"),
    queue_id=bindparam("in_queue"),
    epoch=1,
    worker_id=bindparam("holder"),
    last_batch=0,
    created_at=moment("now"),
)
_THIS = streams.c.id == bindparam("stream_id")
_FENCE_OFF = update(streams).where(_THIS).values(epoch=streams.c.epoch + 1)
_TAKE_OVER = _FENCE_OFF.values(worker_id=bindparam("holder"))
_COUNT_UP = update(streams).where(_THIS).values(last_batch=bindparam("number"))
_REMOVE = delete(streams).where(_THIS)
_ITS_BATCHES = stream_batches.c.stream_id == bindparam("stream_id")
_BATCHES = (
    select(stream_batches.c.batch, stream_batches.c.worker_id, stream_batches.c.held)
    .where(
        _ITS_BATCHES,
        stream_batches.c.batch > bindparam("after"),
        stream_batches.c.batch <= bindparam("through"),
    )
    .order_by(stream_batches.c.batch)
)
_FORGET = delete(stream_batches).where(_ITS_BATCHES, stream_batches.c.batch <= bindparam("through"))
_PENDING = select(func.min(stream_batches.c.batch)).where(
    _ITS_BATCHES, stream_batches.c.batch > bindparam("after")
)
_ADD_ROW = insert(stream_batches).values(
    stream_id=bindparam("stream_id"),
    batch=bindparam("number"),
    worker_id=bindparam("holder"),
    size=bindparam("count"),
    held=cast(bindparam("tokens", type_=Text()), Json()),
    claimed_at=moment("now"),
)


class Owned(NamedTuple):
    """A stream as it was when somebody took it over."""

    name: str
    epoch: int


class Batch(NamedTuple):
    """A batch that is claimed, and the proof of it."""

    number: int
    holds: Holds
    is_new: bool = False


def take_over(
    connection: Connection, name: str, queue: str, *, worker: int, now: datetime | None
) -> Owned:
    """Be the one who works with this stream, which is created if need be."""
    found = connection.execute(_LOCK, {"stream": name}).first()
    if found is None:
        queue_id = queue_rows.get(connection, queue).id
        bound = {"stream": name, "in_queue": queue_id, "holder": worker}
        connection.execute(_CREATE, bound | at(now=(now, 0.0)))
        return Owned(name, 1)
    if found.queue_name != queue:
        raise InvalidArgument("stream", f"{name!r} is a stream of queue {found.queue_name!r}")
    connection.execute(_TAKE_OVER, {"stream_id": found.id, "holder": worker})
    if found.worker_id != worker:
        workers.remove(connection, found.worker_id)
    return Owned(name, found.epoch + 1)


def _lock(connection: Connection, owned: Owned) -> Any:
    found = _find(connection, owned.name)
    if found.epoch != owned.epoch:
        raise StreamTaken(owned.name)
    return found


def _find(connection: Connection, name: str) -> Any:
    found = connection.execute(_LOCK, {"stream": name}).first()
    if found is None:
        raise StreamNotFound(name)
    return found


def _batches(connection: Connection, stream_id: int, *, after: int, through: int) -> list[Batch]:
    bound = {"stream_id": stream_id, "after": after, "through": through}
    return [
        Batch(number, Holds(worker_id, {int(id): token for id, token in held.items()}))
        for number, worker_id, held in connection.execute(_BATCHES, bound)
    ]


def _pieces(holds: Holds) -> Iterator[Holds]:
    remaining = iter(holds.tokens.items())
    while some := dict(islice(remaining, AT_ONCE)):
        yield holds._replace(tokens=some)


_ID = select(streams.c.id).where(streams.c.name == bindparam("stream"))
_CLAIMED = select(stream_batches.c.batch).where(stream_batches.c.stream_id.in_(_ID)).limit(1)
_first_ready = (
    select(messages.c.id)
    .where(messages.c.queue_id == queues.c.id, messages.c.ready)
    .order_by(*dequeue.ORDER)
    .limit(literal_column("1"))
    .correlate(queues)
    .scalar_subquery()
)
_SOME_TO_CLAIM = select(or_(_first_ready.is_not(None), *dequeue.TROUBLES)).where(
    queues.c.queue_name == bindparam("queue")
)


def is_quiet(connection: Connection, name: str, queue: str, *, now: datetime | None) -> bool:
    """Whether there is nothing to acknowledge and nothing to claim: asked before locking anything."""
    if connection.execute(_CLAIMED, {"stream": name}).first() is not None:
        return False
    found = connection.execute(_SOME_TO_CLAIM, {"queue": queue} | at(now=(now, 0.0))).first()
    if found is None:
        raise QueueNotFound(queue)
    return not found[0]


def acknowledge(
    connection: Connection, name: str, *, through: int, now: datetime | None
) -> tuple[str, int]:
    """Acknowledge all batches up to this one. Returns the queue, and how many messages that were.

    Who does not own the stream may do so too: what is complete stays complete.
    """
    stream = _find(connection, name)
    return stream.queue_name, _acknowledge(connection, stream.id, through=through, now=now)


def end(connection: Connection, name: str, *, now: datetime | None) -> tuple[str, int]:
    """Acknowledge all that a stream has claimed, and forget the stream. Returns the queue, and how many
    messages that were.
    """
    stream = _find(connection, name)
    total = _acknowledge(connection, stream.id, through=ANY, now=now)
    connection.execute(_REMOVE, {"stream_id": stream.id})
    workers.remove(connection, stream.worker_id)
    return stream.queue_name, total


def _acknowledge(
    connection: Connection, stream_id: int, *, through: int, now: datetime | None
) -> int:
    total = 0
    batches = list(_batches(connection, stream_id, after=-1, through=through))
    ended = [id for batch in batches for id in batch.holds.tokens]
    with groups.ending(connection, ended, now=now):
        for batch in batches:
            for holds in _pieces(batch.holds):
                total += len(archive.ack(connection, holds, now=now))
    connection.execute(_FORGET, {"stream_id": stream_id, "through": through})
    return total


def next_batch(
    connection: Connection,
    owned: Owned,
    *,
    after: int,
    worker: int,
    limit: int,
    now: datetime | None,
    through: int = ANY,
) -> Batch | None:
    """Acknowledge what is complete, up to the batch `after`. Returns the first one after it: the one
    that is claimed already, or a new one, unless there is nothing to claim up to the id `through`.
    """
    stream = _lock(connection, owned)
    _acknowledge(connection, stream.id, through=after, now=now)
    bound = {"stream_id": stream.id, "after": after}
    pending = connection.execute(_PENDING, bound).scalar()
    if pending is not None:
        (batch,) = _batches(connection, stream.id, after=pending - 1, through=pending)
        return batch
    queue = stream.queue_name
    claimed = _claim(connection, queue, worker=worker, limit=limit, now=now, through=through)
    return _add(connection, stream, claimed, after=after, worker=worker, now=now)


def add_batch(
    connection: Connection,
    owned: Owned,
    *,
    worker: int,
    limit: int,
    now: datetime | None,
    through: int = ANY,
) -> Batch | None:
    """Claim one more batch, and acknowledge nothing. None if there is nothing to claim up to the id
    `through`.
    """
    stream = _lock(connection, owned)
    queue = stream.queue_name
    claimed = _claim(connection, queue, worker=worker, limit=limit, now=now, through=through)
    return _add(connection, stream, claimed, after=0, worker=worker, now=now)


def add_followers(
    connection: Connection,
    owned: Owned,
    *,
    worker: int,
    limit: int,
    now: datetime | None,
    through: int = ANY,
) -> Batch | None:
    """Claim one more batch, of what only messages of this very stream keep back: those behind them in
    their groups.
    """
    stream = _lock(connection, owned)
    held = _batches(connection, stream.id, after=-1, through=ANY)
    claimed = backlog.claim_followers(
        connection,
        stream.queue_id,
        [id for batch in held for id in batch.holds.tokens],
        worker=worker,
        limit=limit,
        lease=FOR_GOOD,
        now=now,
        through=through,
    )
    return _add(connection, stream, claimed, after=0, worker=worker, now=now)


def _add(
    connection: Connection,
    stream: Any,
    claimed: dict[int, int | None],
    *,
    after: int,
    worker: int,
    now: datetime | None,
) -> Batch | None:
    if not claimed:
        return None
    number = max(stream.last_batch, after) + 1
    connection.execute(
        _ADD_ROW,
        {
            "stream_id": stream.id,
            "number": number,
            "holder": worker,
            "count": len(claimed),
            "tokens": json.dumps(claimed),
        }
        | at(now=(now, 0.0)),
    )
    connection.execute(_COUNT_UP, {"stream_id": stream.id, "number": number})
    return Batch(number, Holds(worker, claimed), is_new=True)


def _claim(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    now: datetime | None,
    through: int,
) -> dict[int, int | None]:
    """Up to `limit` messages, for as long as can be said. What may not be handed out is cleared away."""
    claimed: dict[int, int | None] = {}
    sweeps = 0
    while len(claimed) < limit:
        at_most = min(limit - len(claimed), AT_ONCE)
        found = _claim_some(
            connection, queue, worker=worker, limit=at_most, now=now, through=through
        )
        claimed |= {message.id: message.read_ct for message in found.messages}
        if found.leftovers and sweeps < SWEEPS:
            sweeps += 1
            if any(dequeue.sweep(connection, queue, now=now)):
                continue
        if not found.messages and not found.cut_short:
            break
    return claimed


def _claim_some(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    now: datetime | None,
    through: int,
) -> Claimed:
    options: dict[str, Any] = {"worker": worker, "limit": limit, "lease": FOR_GOOD, "now": now}
    claim = dequeue.claim if through == ANY else partial(backlog.claim, through=through)
    found: Claimed = claim(connection, queue, **options)
    if found.limited:
        found = limits.claim(connection, queue, **options)
        if found.queue_exists and not found.limited:
            found = claim(connection, queue, **options)
    if not found.queue_exists:
        raise QueueNotFound(queue)
    if found.spoiled:
        dequeue.set_aside(connection, found.spoiled, now=now)
    if found.worker_status is None:
        raise WorkerNotFound(worker)
    if found.worker_status is WorkerStatus.STOPPED:
        raise WorkerStopped(worker)
    return found


def batches(connection: Connection, name: str, *, after: int, through: int) -> list[Batch]:
    """The batches with these numbers that are claimed."""
    stream_id = connection.execute(_ID, {"stream": name}).scalar()
    if stream_id is None:
        return []
    return _batches(connection, stream_id, after=after, through=through)


_records = (
    select(*record_columns(messages, messages.c.id, queues.c.queue_name))
    .select_from(messages.join(HELD, and_(*FENCE)).join(queues, messages.c.queue_id == queues.c.id))
    .subquery("records")
)


def select_records(holds: Holds, columns: Sequence[str] = Record._fields) -> Select[Any]:
    """The statement for the messages of a batch, or some of them, by id."""
    chosen = select(*(_records.c[name] for name in columns)).order_by(_records.c.id)
    return chosen.params(held_by(holds))


def records(connection: Connection, holds: Holds) -> list[Record]:
    """The messages of a batch, or some of them, by id."""
    return [Record(*row) for row in connection.execute(select_records(holds))]


def release(connection: Connection, name: str, *, now: datetime | None) -> tuple[str, int]:
    """Give back all that a stream has claimed, and fence off who works with it. Returns its queue,
    and how many messages that were.
    """
    stream = _find(connection, name)
    total = 0
    batches = _batches(connection, stream.id, after=-1, through=ANY)
    with groups.giving_back(connection, [id for b in batches for id in b.holds.tokens], now=now):
        for batch in batches:
            for holds in _pieces(batch.holds):
                total += len(
                    message_rows.give_back(connection, holds, delay=0.0, counted=False, now=now)
                )
    connection.execute(_FORGET, {"stream_id": stream.id, "through": ANY})
    connection.execute(_FENCE_OFF, {"stream_id": stream.id})
    return stream.queue_name, total


_LIST = (
    select(
        streams.c.name,
        queues.c.queue_name,
        streams.c.last_batch,
        func.count(stream_batches.c.batch),
        func.coalesce(func.sum(stream_batches.c.size), 0),
        func.min(stream_batches.c.claimed_at, type_=stream_batches.c.claimed_at.type),
        streams.c.created_at,
    )
    .select_from(
        streams.join(queues, streams.c.queue_id == queues.c.id).outerjoin(
            stream_batches, stream_batches.c.stream_id == streams.c.id
        )
    )
    .group_by(streams.c.id, queues.c.queue_name)
    .order_by(streams.c.name)
)


def find(connection: Connection) -> list[StreamInfo]:
    """All streams by name."""
    return [_stream(*row) for row in connection.execute(_LIST)]


def _stream(*row: Any) -> StreamInfo:
    name, queue, last_batch, batches, size, since, created_at = row
    return StreamInfo(name, queue, last_batch, batches, int(size), since, created_at)
