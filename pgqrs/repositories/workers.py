"""Workers: who is there, what they were told, and when they were last heard of."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from pgqrs.errors import InvalidArgument, WorkerNotFound
from pgqrs.models import queues, streams, workers
from pgqrs.repositories import archive, groups, messages
from pgqrs.repositories import queues as queues_of
from pgqrs.repositories.expressions import Holds, at, moment
from pgqrs.types import WorkerInfo, WorkerStatus

_REGISTER = (
    insert(workers)
    .values(
        queue_id=bindparam("new_queue_id"),
        hostname=bindparam("new_hostname"),
        port=bindparam("new_port"),
        pid=bindparam("new_pid"),
        status=WorkerStatus.READY,
        last_heartbeat=moment("now"),
        created_at=moment("now"),
    )
    .returning(workers.c.id)
)
_THIS = workers.c.id == bindparam("worker")
_HEARTBEAT = (
    update(workers).where(_THIS).values(last_heartbeat=moment("now")).returning(workers.c.status)
)
_STATUS = update(workers).where(_THIS).values(status=bindparam("new_status"))
_SELECT = select(
    workers.c.id,
    queues.c.queue_name,
    workers.c.hostname,
    workers.c.port,
    workers.c.pid,
    workers.c.status,
    workers.c.last_heartbeat,
    workers.c.created_at,
    moment("now"),
).join_from(workers, queues, workers.c.queue_id == queues.c.id, isouter=True)
_LIST = _SELECT.order_by(workers.c.id)


def register(
    connection: Connection,
    *,
    queue_id: int | None,
    hostname: str,
    port: int,
    pid: int | None,
    now: datetime | None,
) -> int:
    """A row for a new worker. Returns its id."""
    values = {
        "new_queue_id": queue_id,
        "new_hostname": hostname,
        "new_port": port,
        "new_pid": pid,
    }
    return int(connection.execute(_REGISTER, values | at(now=(now, 0.0))).scalar_one())


def heartbeat(connection: Connection, id: int, *, now: datetime | None) -> WorkerStatus | None:
    """A sign of life. Returns what the worker was told to be; None if its row is gone."""
    return connection.execute(_HEARTBEAT, {"worker": id} | at(now=(now, 0.0))).scalar()


def set_status(connection: Connection, id: int, status: WorkerStatus) -> bool:
    """Tell a worker to be ready, suspended or stopped. Returns whether it exists."""
    return connection.execute(_STATUS, {"worker": id, "new_status": status}).rowcount == 1


def remove(connection: Connection, id: int) -> None:
    """A worker that leaves takes its row with it."""
    connection.execute(delete(workers).where(_THIS), {"worker": id})


def find(connection: Connection, *, now: datetime | None) -> list[WorkerInfo]:
    """All workers, the oldest first."""
    return [_worker(row) for row in connection.execute(_LIST, at(now=(now, 0.0)))]


_EXISTS = select(workers.c.id).where(_THIS)
_STREAM = select(streams.c.name).where(streams.c.worker_id == bindparam("worker"))


class Released(NamedTuple):
    """How many messages were given back, the last of them, and the queues they are in."""

    messages: int
    last: int | None
    queues: set[str]


def release(
    connection: Connection, id: int, *, after: int, limit: int, now: datetime | None
) -> Released:
    """Give back up to `limit` messages with a greater id that a worker holds, untried."""
    stream = connection.execute(_STREAM, {"worker": id}).scalar()
    if stream is not None:
        raise InvalidArgument(
            "id", f"worker {id} is that of stream {stream!r}; give back with release_stream()"
        )
    held = messages.held_by_worker(connection, id, after=after, limit=limit, now=now)
    if not held:
        if not after and connection.execute(_EXISTS, {"worker": id}).first() is None:
            raise WorkerNotFound(id)
        return Released(0, None, set())
    holds = Holds(id, {message.id: message.read_ct for message in held})
    # An application may have locked one of them, and then want one of their groups.
    queues_of.wait_shortly(connection)
    with groups.ending(connection, list(holds.tokens), now=now):
        released = archive.release(connection, holds, delay=0.0, eta=None, now=now)
    return Released(len(released), held[-1].id, {message.queue for message in held})


def _worker(row: Sequence[Any]) -> WorkerInfo:
    last_heartbeat, asked = row[6], row[8]
    facts = [*row[:8], max(0.0, (asked - last_heartbeat).total_seconds())]
    return WorkerInfo(*facts)


def purge(connection: Connection, *, silent_for: float, now: datetime | None) -> int:
    """Delete the rows of workers not heard of for so long. Returns how many.

    What they held comes back when its lease lapses, whether or not their row is there.
    """
    statement = delete(workers).where(workers.c.last_heartbeat < moment("cutoff"))
    return connection.execute(statement, at(cutoff=(now, -silent_for))).rowcount
