"""Messages written in bulk, by many at once, and exactly once.

A *write* has an id, a queue and parts. Every attempt at a part is told from all others by a number.

*Staged*: an attempt puts its messages aside, and in the same transaction a row that says so. When all
parts are there, who began the write *publishes* one attempt of each: one transaction adds the messages
and finishes the write. Before it nothing is to be seen, and a finished write is never published again,
whoever tries: the row of the write is locked first.

*Batches of a stream* are staged writes with a number. One row more, whose id is that of the query, keeps
the highest number that is published, in `message_ct`. It goes up in the transaction that publishes, so
no batch is published twice, however late a driver comes that another one has replaced; the rows of
the batches themselves are not needed any more after that.

*Part-key*: an attempt adds its messages to the queue itself, in one transaction with a row that only one
attempt at this part can add. Whoever comes later must bring the same messages, which a digest tells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    update,
)

from pgqrs.errors import InvalidPayload, QueueNotFound, WriteMismatch
from pgqrs.models import messages, staged, write_parts, writes
from pgqrs.repositories import groups
from pgqrs.repositories.expressions import at, is_one_of, moment, per_dialect, texts
from pgqrs.repositories.groups import BY_GROUP, UNBLOCKED
from pgqrs.repositories.messages import QUEUE
from pgqrs.sqltypes import BigId, Flag, UTCDateTime
from pgqrs.types import WriteMode

UNSTAGED = 0
"""The number of all attempts whose messages are in the queue at once."""
NAMELESS = "auto-"
"""What the ids begin with that nobody has chosen, and so nobody will use again."""
ABANDONED = 7 * 86400.0
"""Seconds after which nobody is taken to go on with a write that is not finished."""
COPY_HEADER, COPY_TRAILER = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
AT_ONCE = 2000
"""Groups that are looked after in one statement."""


class Write(NamedTuple):
    """A write that was begun."""

    write_id: str
    queue_id: int
    mode: WriteMode
    parts: int | None
    message_ct: int | None
    finished_at: datetime | None


class Batch(NamedTuple):
    """A batch of a query that writes a stream."""

    query: str
    number: int

    @property
    def write_id(self) -> str:
        """The id of its write."""
        return f"{self.query}-{self.number}"


class Part(NamedTuple):
    """What an attempt at a part has stored."""

    part: int
    attempt: int
    message_ct: int
    digest: str = ""


class Published(NamedTuple):
    """How many messages a write has, and whether somebody elsewhere waits to be told of them."""

    message_ct: int
    waited_for: bool


# Beginning

_this_write = writes.c.write_id == bindparam("this_write")
_FIND = select(
    writes.c.write_id,
    writes.c.queue_id,
    writes.c.mode,
    writes.c.parts,
    writes.c.message_ct,
    writes.c.finished_at,
).where(_this_write)
_LOCK = _FIND.with_for_update()
# Does not keep others from storing, but waits for who publishes.
_STILL_OPEN = _FIND.with_for_update(read=True, key_share=True)
_NOW = select(moment("now"))


@cache
def _begin(dialect: str) -> Any:
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    return (
        insert(writes)
        .values(
            write_id=bindparam("this_write"),
            queue_id=bindparam("in_queue", type_=BigId),
            mode=bindparam("mode", type_=writes.c.mode.type),
            parts=bindparam("parts", type_=writes.c.parts.type),
            created_at=moment("now"),
        )
        .on_conflict_do_nothing()
    )


def begin(
    connection: Connection,
    write_id: str,
    queue: str,
    *,
    mode: WriteMode,
    parts: int | None,
    now: datetime | None,
    batch: Batch | None = None,
) -> Write:
    """Begin a write, or find the one that was begun before, if it is the same."""
    bound = {"this_write": write_id, "queue": queue, "mode": mode, "parts": parts}
    bound |= at(now=(now, 0.0))
    found = connection.execute(QUEUE, bound).first()
    if found is None:
        raise QueueNotFound(queue)
    connection.execute(_begin(connection.dialect.name), bound | {"in_queue": found[0]})
    write = _get(connection, write_id)
    for name, ours, theirs in (
        ("into another queue", found[0], write.queue_id),
        (f"in the mode {write.mode}", mode, write.mode),
        (f"with {write.parts} parts", parts, write.parts),
    ):
        if ours is not None and ours != theirs:
            raise WriteMismatch(write_id, f"was begun {name}")
    if batch is not None and _is_published(batch, _highest(connection, batch)):
        connection.execute(_FORGET_BATCH, {"write_ids": [write_id]})
        return write._replace(finished_at=time_of(connection, now))
    return write


# The highest batch of a query

_of_query = writes.c.write_id == bindparam("query")
_HIGHEST = select(writes.c.message_ct).where(_of_query)
_LOCK_HIGHEST = _HIGHEST.with_for_update()
_RAISE = (
    update(writes)
    .where(_of_query)
    .values(message_ct=bindparam("number", type_=BigId), finished_at=moment("now"))
)
_FORGET_BATCH = delete(writes).where(is_one_of(writes.c.write_id, "write_ids"))


def _highest(connection: Connection, batch: Batch, statement: Any = _HIGHEST) -> int | None:
    found: int | None = connection.execute(statement, {"query": batch.query}).scalar()
    return found


def _is_published(batch: Batch, highest: int | None) -> bool:
    """True if this is the last batch that was published. Raises `WriteMismatch` if it came before."""
    if highest is not None and batch.number < highest:
        raise WriteMismatch(
            batch.write_id,
            f"is older than batch {highest} of the same query, which is complete: another driver has "
            "gone on from this checkpoint, or the checkpoint was put back to an earlier state",
        )
    return batch.number == highest


def _turn(connection: Connection, write_id: str, batch: Batch, *, now: datetime | None) -> bool:
    """Lock the row of the query, which is added if need be. False if the batch is published already."""
    write = _get(connection, write_id)
    bound: dict[str, Any] = {
        "this_write": batch.query,
        "in_queue": write.queue_id,
        "mode": write.mode,
    }
    bound |= {"parts": None} | at(now=(now, 0.0))
    connection.execute(_begin(connection.dialect.name), bound)
    return not _is_published(batch, _highest(connection, batch, _LOCK_HIGHEST))


def _end_batch(connection: Connection, batch: Batch, *, now: datetime | None) -> None:
    connection.execute(_RAISE, {"query": batch.query, "number": batch.number} | at(now=(now, 0.0)))
    before = batch._replace(number=batch.number - 1)  # versions before this one left it
    connection.execute(_FORGET_BATCH, {"write_ids": [batch.write_id, before.write_id]})


def _get(connection: Connection, write_id: str, statement: Any = _FIND) -> Write:
    row = connection.execute(statement, {"this_write": write_id}).first()
    if row is None:
        raise WriteMismatch(write_id, "is not there any more")
    return Write(*row)


def message_count(connection: Connection, write_id: str) -> int:
    """How many messages a finished write has."""
    return _get(connection, write_id).message_ct or 0


# Parts

_PART = select(
    write_parts.c.part, write_parts.c.attempt, write_parts.c.message_ct, write_parts.c.digest
).where(
    write_parts.c.write_id == bindparam("this_write"),
    write_parts.c.part == bindparam("this_part"),
    write_parts.c.attempt == bindparam("this_attempt"),
)
_RECORD = insert(write_parts).values(
    write_id=bindparam("this_write"),
    part=bindparam("this_part"),
    attempt=bindparam("this_attempt"),
    message_ct=bindparam("ct"),
    digest=bindparam("its_digest"),
    stored_at=moment("now"),
)


def find_part(
    connection: Connection, write_id: str, part: int, *, attempt: int = UNSTAGED
) -> Part | None:
    """What this attempt has stored, if it has."""
    bound = {"this_write": write_id, "this_part": part, "this_attempt": attempt}
    row = connection.execute(_PART, bound).first()
    return None if row is None else Part(*row)


def record(connection: Connection, write_id: str, part: Part, *, now: datetime | None) -> bool:
    """Say what an attempt has stored in this transaction. False if it comes too late: then the
    transaction must not be committed.
    """
    if _get(connection, write_id, _STILL_OPEN).finished_at is not None:
        return False
    bound = {
        "this_write": write_id,
        "this_part": part.part,
        "this_attempt": part.attempt,
        "ct": part.message_ct,
        "its_digest": part.digest,
    }
    connection.execute(_RECORD, bound | at(now=(now, 0.0)))
    return True


def drop_part(connection: Connection, write_id: str, part: Part) -> None:
    """Forget that this attempt has begun to store a part, to say what it has stored in the end."""
    bound = {"this_write": write_id, "attempts": json.dumps([str(part.attempt)])}
    connection.execute(_DROP_THESE_ATTEMPTS, bound)


# Storing rows


def _qualified(connection: Connection, table: Table) -> str:
    quote = connection.dialect.identifier_preparer.quote
    schema = (connection.get_execution_options().get("schema_translate_map") or {}).get(None)
    return quote(table.name) if schema is None else f"{quote(schema)}.{quote(table.name)}"


def copy(
    connection: Connection, table: Table, columns: Sequence[str], rows: Iterable[bytes | memoryview]
) -> None:
    """Stream rows in the binary format into these columns. Only where the store supports it."""
    import psycopg

    names = ", ".join(columns)
    into = f"COPY {_qualified(connection, table)} ({names}) FROM STDIN (FORMAT binary)"
    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor() as cursor, cursor.copy(into) as stream:
            stream.write(COPY_HEADER)
            for piece in rows:
                stream.write(piece)
            stream.write(COPY_TRAILER)
    except psycopg.DataError as exc:
        said = (exc.diag.message_primary, exc.diag.message_detail, exc.diag.context)
        problem = "; ".join(text for text in said if text)
        raise InvalidPayload("payload", problem or str(exc)) from exc


def put(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Stage rows where nothing can be streamed: values by the name of their column, JSON as text."""
    if rows:
        connection.execute(insert(staged), rows)


# Publishing

_attempts = texts("attempts")
_chosen = select(cast(_attempts.c.value, BigId)).scalar_subquery()
_default_priority = bindparam("priority", type_=messages.c.priority.type)


def _values(rows: Any) -> dict[str, Any]:
    """Messages made of what is staged."""
    return {
        "queue_id": bindparam("in_queue", type_=BigId),
        "payload": rows.payload,
        "headers": rows.headers,
        "codec": rows.codec,
        "dedup_key": rows.dedup_key,
        "group_key": rows.group_key,
        "priority": func.coalesce(rows.priority, _default_priority),
        "ready": and_(
            bindparam("at_once", type_=Flag()), rows.eta.is_(None), rows.group_key.is_(None)
        ),
        "vt": func.coalesce(rows.eta, moment("vt")),
        "enqueued_at": moment("now"),
        "expires_at": func.coalesce(rows.expires_at, moment("expires")),
        "read_ct": literal_column("0"),
        "released_ct": literal_column("0"),
        "blocked": case((rows.group_key.is_(None), UNBLOCKED), else_=BY_GROUP),
    }


_IN_ORDER = (
    select(*staged.c)
    .join_from(_attempts, staged, staged.c.attempt == cast(_attempts.c.value, BigId))
    .order_by(_attempts.c.position, staged.c.position)
)
_of_write = write_parts.c.write_id == bindparam("this_write")


def _insert(rows: Any, chosen: Select[Any]) -> Any:
    values = _values(rows)
    found = chosen.with_only_columns(*values.values())
    return (
        insert(messages).from_select(list(values), found).execution_options(preserve_rowcount=True)
    )


def _insert_unfolded() -> Any:
    """Where a row is many messages. Sorting rows before they are unfolded sorts the messages."""
    many = _IN_ORDER.subquery("many")
    names = [column.name for column in staged.c if column.name not in ("attempt", "position")]
    kinds = {"eta": UTCDateTime(), **{column.name: column.type for column in messages.c}}
    unfolded = (
        func.unnest(*(many.c[name] for name in names))
        .table_valued(*(column(name, kinds[name]) for name in names), name="unfolded")
        .render_derived()
    )
    return _insert(unfolded.c, select(unfolded).select_from(many.join(unfolded, true())))


_INSERT = {"postgresql": _insert_unfolded(), "sqlite": _insert(staged.c, _IN_ORDER)}
_key = {
    "postgresql": func.unnest(staged.c.group_key, type_=Text()),
    "sqlite": staged.c.group_key,
}
_GROUPS = {
    dialect: select(key.label("name"))
    .distinct()
    .where(staged.c.attempt.in_(_chosen), staged.c.group_key.is_not(None))
    .order_by("name")
    for dialect, key in _key.items()
}
_COUNT = select(
    func.count(write_parts.c.part.distinct()),
    func.count(),
    cast(func.coalesce(func.sum(write_parts.c.message_ct), 0), BigId),
).where(_of_write, write_parts.c.attempt.in_(_chosen))
_DROP_STAGED = delete(staged).where(
    staged.c.attempt.in_(select(write_parts.c.attempt).where(_of_write).scalar_subquery())
)
_DROP_ATTEMPTS = delete(write_parts).where(_of_write)
_FINISH = (
    update(writes)
    .where(_this_write)
    .values(
        finished_at=moment("now"),
        parts=bindparam("part_ct", type_=writes.c.parts.type),
        message_ct=bindparam("ct", type_=BigId),
    )
)


def _plan_large_postgres(connection: Connection) -> None:
    """For one transaction over a whole table, unlike all others of ours."""
    connection.exec_driver_sql("SELECT set_config('enable_seqscan', 'on', true)")


_plan_large: Callable[..., None] = per_dialect(
    postgresql=_plan_large_postgres, sqlite=lambda _connection: None
)


class Settings(NamedTuple):
    """What all messages of a write have in common, unless a row says otherwise."""

    priority: int = 0
    delay: float = 0.0
    ttl: float | None = None


def publish(
    connection: Connection,
    write_id: str,
    queue: str,
    attempts: Sequence[int],
    *,
    settings: Settings,
    now: datetime | None,
    batch: Batch | None = None,
) -> Published:
    """Add the messages of these attempts, one at each part and in this order, and finish the write; do
    nothing if it is finished already.
    """
    # The query before the batch: who publishes the next batch locks both in this order.
    if batch is not None and not _turn(connection, write_id, batch, now=now):
        return Published(0, False)
    write = _get(connection, write_id, _LOCK)
    if write.finished_at is not None:
        return Published(write.message_ct or 0, False)
    waited_for = is_waited_for(connection, write, queue, now=now)
    _plan_large(connection)
    bound = {"this_write": write_id, "attempts": json.dumps(list(map(str, attempts)))}
    parts, rows, expected = connection.execute(_COUNT, bound).one()
    if not parts == rows == len(attempts):
        raise WriteMismatch(write_id, f"of {len(attempts)} parts {parts} are stored")
    _add(connection, write.queue_id, bound, expected=expected, settings=settings, now=now)
    connection.execute(_DROP_STAGED, bound)
    connection.execute(_DROP_ATTEMPTS, bound)
    if batch is None:
        _finish(connection, write_id, parts=parts, message_ct=expected, now=now)
    else:
        _end_batch(connection, batch, now=now)
    return Published(expected, waited_for)


def is_waited_for(
    connection: Connection, write: Write, queue: str, *, now: datetime | None
) -> bool:
    """Whether somebody waits for messages. Locks the queue, which must be there to take them."""
    found = connection.execute(QUEUE, {"queue": queue} | at(now=(now, 0.0))).first()
    if found is None or found[0] != write.queue_id:
        raise QueueNotFound(queue)
    return bool(found[1])


def _add(
    connection: Connection,
    queue_id: int,
    bound: dict[str, Any],
    *,
    expected: int,
    settings: Settings,
    now: datetime | None,
) -> None:
    """Move what is staged into the queue."""
    dialect = connection.dialect.name
    names = sorted(name for name in connection.execute(_GROUPS[dialect], bound).scalars() if name)
    some = [names[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)]
    for piece in some:
        groups.lock(connection, queue_id, piece)
    # Worked out once, and not for each row.
    values = bound | times(settings, now=time_of(connection, now)) | {"in_queue": queue_id}
    added = connection.execute(_INSERT[dialect], values).rowcount
    if added != expected:
        raise WriteMismatch(
            bound["this_write"], f"of {expected} staged messages {added} are left; write them again"
        )
    for piece in some:
        groups.let_first_go(connection, queue_id, piece, now=now)


def time_of(connection: Connection, now: datetime | None) -> datetime:
    """The time, of the database if nobody else tells it."""
    told: datetime = connection.execute(_NOW, at(now=(now, 0.0))).scalar_one()
    return told


def times(settings: Settings, *, now: datetime) -> dict[str, Any]:
    """The parameters that the settings stand for."""
    return {"priority": settings.priority, "at_once": settings.delay == 0} | at(
        now=(now, 0.0), vt=(now, settings.delay), expires=(now, settings.ttl)
    )


def _finish(
    connection: Connection, write_id: str, *, parts: int, message_ct: int, now: datetime | None
) -> None:
    bound = {"this_write": write_id, "part_ct": parts, "ct": message_ct}
    connection.execute(_FINISH, bound | at(now=(now, 0.0)))


# Without staging


def add_part(
    connection: Connection,
    write: Write,
    queue: str,
    part: Part,
    *,
    staged_as: int,
    settings: Settings,
    now: datetime | None,
) -> Published | None:
    """Add the messages of a part that this attempt has staged; None if the write is finished."""
    waited_for = is_waited_for(connection, write, queue, now=now)
    if not record(connection, write.write_id, part, now=now):
        return None
    bound = {"this_write": write.write_id, "attempts": json.dumps([str(staged_as)])}
    expected = part.message_ct
    _add(connection, write.queue_id, bound, expected=expected, settings=settings, now=now)
    discard(connection, write.write_id, [staged_as])
    return Published(expected, waited_for)


_ALL_PARTS = select(
    func.count(), func.max(write_parts.c.part), func.sum(write_parts.c.message_ct)
).where(_of_write, write_parts.c.attempt == UNSTAGED)


def finish_parts(connection: Connection, write_id: str, *, parts: int, now: datetime | None) -> int:
    """Finish a write whose parts are all in the queue. Returns how many messages it has."""
    write = _get(connection, write_id, _LOCK)
    if write.finished_at is not None:
        return write.message_ct or 0
    count, last, total = connection.execute(_ALL_PARTS, {"this_write": write_id}).one()
    if parts != write.parts or count != parts or last != parts - 1:
        raise WriteMismatch(
            write_id, f"has {write.parts} parts, {count} are stored, and {parts} were written"
        )
    _finish(connection, write_id, parts=parts, message_ct=int(total or 0), now=now)
    return int(total or 0)


# Cleaning up

_DROP_STAGED_ATTEMPTS = delete(staged).where(staged.c.attempt.in_(_chosen))
_DROP_THESE_ATTEMPTS = delete(write_parts).where(_of_write, write_parts.c.attempt.in_(_chosen))


def discard(connection: Connection, write_id: str, attempts: Sequence[int]) -> None:
    """Forget what these attempts have staged."""
    chosen = [str(attempt) for attempt in attempts if attempt != UNSTAGED]
    bound = {"this_write": write_id, "attempts": json.dumps(chosen)}
    connection.execute(_DROP_STAGED_ATTEMPTS, bound)
    connection.execute(_DROP_THESE_ATTEMPTS, bound)


_abandoned = and_(
    writes.c.created_at < moment("cutoff"),
    or_(
        and_(writes.c.finished_at.is_(None), writes.c.mode == WriteMode.STAGED),
        and_(writes.c.finished_at.is_not(None), writes.c.write_id.startswith(NAMELESS)),
    ),
)
_SWEEP = delete(writes).where(_abandoned)
_ORPHANED_PARTS = delete(write_parts).where(
    ~exists().where(writes.c.write_id == write_parts.c.write_id)
)
_ORPHANED_ROWS = delete(staged).where(~exists().where(write_parts.c.attempt == staged.c.attempt))


def sweep(connection: Connection, *, now: datetime | None) -> int:
    """Forget staged writes that nobody went on with, and finished ones that nobody will ask for.
    Returns how many.
    """
    swept = connection.execute(_SWEEP, at(cutoff=(now, -ABANDONED))).rowcount
    if swept:
        connection.execute(_ORPHANED_PARTS)
        connection.execute(_ORPHANED_ROWS)
    return swept
