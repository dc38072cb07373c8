"""What is in a database, for a store of several: which has a row, and to which queue rows belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BindParameter, Column, Connection, Table, bindparam, exists, select

from pgqrs.models import (
    archive,
    messages,
    queues,
    schedules,
    streams,
    workers,
    workflow_waits,
    workflows,
    writes,
)
from pgqrs.repositories.moving import Row

_ID: BindParameter[Any] = bindparam("value")


def _has(*columns: Column[Any]) -> Any:
    return [select(exists().where(column == _ID)) for column in columns]


_MESSAGE = _has(messages.c.id, archive.c.original_message_id)
_RUN = _has(workflows.c.id)
_WORKER = _has(workers.c.id)
_SCHEDULE = _has(schedules.c.name)
_STREAM = _has(streams.c.name)


def _is_there(connection: Connection, statements: Any, value: Any) -> bool:
    return any(connection.execute(asked, {"value": value}).scalar() for asked in statements)


def has_message(connection: Connection, id: int) -> bool:
    """True if there is such a message, or was before it was finished."""
    return _is_there(connection, _MESSAGE, id)


def has_run(connection: Connection, id: int) -> bool:
    """True if there is such a run."""
    return _is_there(connection, _RUN, id)


def has_worker(connection: Connection, id: int) -> bool:
    """True if there is such a worker."""
    return _is_there(connection, _WORKER, id)


def has_schedule(connection: Connection, name: str) -> bool:
    """True if there is such a schedule."""
    return _is_there(connection, _SCHEDULE, name)


def has_stream(connection: Connection, name: str) -> bool:
    """True if there is such a stream."""
    return _is_there(connection, _STREAM, name)


# To which queue rows belong

_BY_QUEUE = select(queues.c.id, queues.c.queue_name)
_OF_RUNS = select(workflows.c.id, queues.c.queue_name, workflows.c.name).outerjoin(
    queues, queues.c.id == workflows.c.queue_id
)
_OF_STREAMS = select(streams.c.id, queues.c.queue_name).join(
    queues, queues.c.id == streams.c.queue_id
)
_OF_WRITES = select(writes.c.write_id, queues.c.queue_name).join(
    queues, queues.c.id == writes.c.queue_id
)
Kin = tuple[str | None, ...]
"""The queues that a row has to be with: one, unless a run belongs to a run of another queue."""


def queues_of(connection: Connection, table: Table, rows: Sequence[Row]) -> list[Kin]:
    """The queues of these rows; none for those of which this database knows nothing.

    A run that is driven by hand has none: its workflow's name stands for it.
    """
    names = [column.name for column in table.columns]
    if "queue_name" in names:
        place = names.index("queue_name")
        return [(row[place],) for row in rows]
    for column in _REFERRING:
        if column in names and not (table.name == workflows.name and column != "id"):
            break
    else:
        raise AssertionError(f"{table.name} belongs to no queue")
    referred = ["id", "parent_id"] if table.name == workflows.name else [column]
    if table.name == workflow_waits.name:
        referred = ["awaited_id", "waiter_id"]
    asked = [[row[names.index(name)] for name in referred] for row in rows]
    found = _found(connection, _REFERRING[column], asked)
    return [tuple(found[id] for id in ids if id in found) for ids in asked]


def _found(connection: Connection, statement: Any, asked: list[list[Any]]) -> dict[Any, str]:
    wanted = {id for ids in asked for id in ids if id is not None}
    rows = connection.execute(statement.where(statement.selected_columns[0].in_(wanted)))
    return {id: name for id, *named in rows if (name := next(filter(None, named), None))}


_REFERRING: dict[str, Any] = {
    "queue_id": _BY_QUEUE,
    "workflow_id": _OF_RUNS,
    "awaited_id": _OF_RUNS,
    "stream_id": _OF_STREAMS,
    "write_id": _OF_WRITES,
    "id": _OF_RUNS,
}
"""What the columns refer to by which a row belongs to a queue, and how its name is found. `id` is that
of a run.
"""
