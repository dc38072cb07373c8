"""Reading along: every message of a queue once, in the order of ids, whether or not it is finished.

Nothing is claimed, so finished messages count too: they are in the archive. What could go wrong is
an id that was given away early and is committed late: who has read on past it by then never sees it.
So reading stops at a *mark*: an id that is there, and so is everything below it that will ever be.

SQLite has one writer at a time: there the greatest id that can be seen is a mark. On PostgreSQL it
becomes one when all transactions have ended that were writing messages when it was seen. Ids are
given away in order, so whoever has one below it was writing before; and who writes holds a lock on
the table from before its first id until its end, which everybody can see. Messages need no column for
this, ids mean the same after a copy to another server, and transactions that write no messages are
not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Select,
    Text,
    bindparam,
    cast,
    func,
    select,
    text,
    union_all,
)
from sqlalchemy.sql.expression import ColumnElement, FromClause

from pgqrs.errors import NotSupported
from pgqrs.models import archive, messages
from pgqrs.repositories.expressions import per_dialect, qualified_name
from pgqrs.repositories.queues import get as get_queue
from pgqrs.sqltypes import BigId


class Record(NamedTuple):
    """What of a message is the same as long as it, or its archive, is there. JSON is text."""

    id: int
    queue: str
    priority: int
    enqueued_at: datetime
    expires_at: datetime | None
    producer_worker_id: int | None
    dedup_key: str | None
    group_key: str | None
    codec: str | None
    headers: str | None
    payload: str


def record_columns(
    table: FromClause, id: ColumnElement[int], queue: ColumnElement[str]
) -> tuple[ColumnElement[Any], ...]:
    """The columns of a `Record`."""
    json = ("headers", "payload")
    return (
        id.label("id"),
        queue.label("queue"),
        *(table.c[name] for name in Record._fields[2:] if name not in json),
        *(cast(table.c[name], Text()).label(name) for name in json),
    )


def _between(
    table: FromClause, id: ColumnElement[int], *columns: ColumnElement[Any]
) -> Select[Any]:
    # The id of the queue, not its name: then both tables are read in the order of ids.
    return select(*columns).where(
        table.c.queue_id == bindparam("in_queue", type_=BigId),
        id > bindparam("after", type_=BigId),
        id <= bindparam("through", type_=BigId),
    )


_queue = bindparam("queue", type_=Text())
_OF_MESSAGE, _OF_ARCHIVED = messages.c.id, archive.c.original_message_id
# In one statement: what is finished meanwhile is seen once, here or there.
_records = union_all(
    _between(messages, _OF_MESSAGE, *record_columns(messages, _OF_MESSAGE, _queue)),
    _between(archive, _OF_ARCHIVED, *record_columns(archive, _OF_ARCHIVED, _queue)),
).subquery("records")
_ids = union_all(
    _between(messages, _OF_MESSAGE, _OF_MESSAGE.label("id")),
    _between(archive, _OF_ARCHIVED, _OF_ARCHIVED.label("id")),
).subquery("ids")
_first = select(_ids.c.id).order_by(_ids.c.id).limit(bindparam("limit")).subquery("first")
_LAST_OF_FIRST = select(func.max(_first.c.id))
_GREATEST = select(
    func.coalesce(select(func.max(_OF_MESSAGE)).scalar_subquery(), 0),
    func.coalesce(select(func.max(_OF_ARCHIVED)).scalar_subquery(), 0),
)
_WRITERS = text("""
    SELECT DISTINCT virtualtransaction
    FROM pg_locks
    WHERE locktype = 'relation'
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND relation = to_regclass(:messages)
      AND mode = 'RowExclusiveLock'
      AND granted
      AND pid IS DISTINCT FROM pg_backend_pid()
""")
_IS_REPLICA = select(func.pg_is_in_recovery())


def greatest_id(connection: Connection) -> int:
    """The greatest id of all messages that can be seen, finished or not."""
    live, ended = connection.execute(_GREATEST).one()
    return int(max(live, ended))


def _writers_postgres(connection: Connection) -> frozenset[str]:
    if connection.execute(_IS_REPLICA).scalar_one():
        raise NotSupported("reading along", "a replica, which cannot tell who is writing")
    bound = {"messages": qualified_name(connection, messages)}
    return frozenset(connection.execute(_WRITERS, bound).scalars())


def _no_writers(_connection: Connection) -> frozenset[str]:
    return frozenset()


writers = per_dialect(postgresql=_writers_postgres, sqlite=_no_writers)
"""The transactions that are writing messages now, and may have ids that cannot be seen yet."""


def last_of_first(
    connection: Connection, queue: str, *, after: int, through: int, limit: int
) -> int | None:
    """The id of the last of the first `limit` messages between these ids; None if there is none."""
    bound = {"in_queue": get_queue(connection, queue).id, "after": after, "through": through}
    return connection.execute(_LAST_OF_FIRST, bound | {"limit": limit}).scalar()


def select_records(
    connection: Connection,
    queue: str,
    *,
    after: int,
    through: int,
    columns: Sequence[str] = Record._fields,
) -> Select[Any]:
    """The statement for the messages between these ids, by id."""
    chosen = select(*(_records.c[name] for name in columns)).order_by(_records.c.id)
    queue_id = get_queue(connection, queue).id
    return chosen.params(queue=queue, in_queue=queue_id, after=after, through=through)


def records(connection: Connection, queue: str, *, after: int, through: int) -> list[Record]:
    """The messages between these ids, by id."""
    statement = select_records(connection, queue, after=after, through=through)
    return [Record(*row) for row in connection.execute(statement)]
