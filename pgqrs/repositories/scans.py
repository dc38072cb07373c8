"""Whole tables, read in ranges of ids by many at once, each over a connection of its own.

A *view* of a table has the table's columns, but for a queue's id its name. A `Scan` says which of its
columns and rows are wanted. It ends as SQL text with its values in it: whoever runs it may use another
driver, or another host. Queues are few, and rows are many: a statement selects their ids, and whoever
runs it is told their names beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    Select,
    SmallInteger,
    Text,
    and_,
    cast,
    func,
    literal_column,
    not_,
    or_,
    select,
)
from sqlalchemy import text as text_
from sqlalchemy.sql.expression import ColumnElement, FromClause

from pgqrs.errors import QueueNotFound
from pgqrs.models import archive, messages, queues, workflow_steps, workflows
from pgqrs.repositories.expressions import per_dialect
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.sqltypes import Flag, Json, Seconds, UTCDateTime


class Kind(StrEnum):
    """What a column of a view holds."""

    LONG = "long"
    INT = "int"
    FLAG = "flag"
    TIME = "time"
    SECONDS = "seconds"
    TEXT = "text"
    JSON = "json"
    QUEUE = "queue"
    """The id of a queue, which stands for its name."""


class View(NamedTuple):
    """A table as it is shown: its columns by name, where they come from, and its time."""

    columns: Mapping[str, ColumnElement[Any]]
    source: FromClause
    id: Column[Any]
    queue_id: Column[Any]
    time: Column[Any]
    """What `since` and `until` are about."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A column compared with a value."""

    column: str
    operator: str
    value: Any = None
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Scan:
    """Which columns and rows of a view are wanted."""

    view: str
    columns: tuple[str, ...]
    queue: str | None = None
    queue_id: int | None = None
    """The id of `queue`, once it was looked up (`found`): indexes know queues by it."""
    since: datetime | None = None
    until: datetime | None = None
    conditions: tuple[Condition, ...] = ()


def _shown(*tables: Any) -> dict[str, ColumnElement[Any]]:
    columns: dict[str, ColumnElement[Any]] = {}
    for column in (column for table in tables for column in table.columns):
        if column.name == "queue_id":
            columns["queue"] = queues.c.queue_name
        else:
            columns[column.name] = column
    return columns


def _in_queue(table: Any) -> FromClause:
    # A queue may be gone while its archive is still there.
    return table.outerjoin(queues, table.c.queue_id == queues.c.id)  # type: ignore[no-any-return]


_run_of_step = workflow_steps.join(workflows, workflow_steps.c.workflow_id == workflows.c.id)

VIEWS = {
    "messages": View(
        _shown(messages),
        _in_queue(messages),
        messages.c.id,
        messages.c.queue_id,
        messages.c.enqueued_at,
    ),
    "archive": View(
        _shown(archive), _in_queue(archive), archive.c.id, archive.c.queue_id, archive.c.archived_at
    ),
    "workflows": View(
        _shown(workflows),
        _in_queue(workflows),
        workflows.c.id,
        workflows.c.queue_id,
        workflows.c.created_at,
    ),
    "steps": View(
        _shown(workflow_steps) | {"workflow": workflows.c.name, "queue": queues.c.queue_name},
        _run_of_step.outerjoin(queues, workflows.c.queue_id == queues.c.id),
        workflow_steps.c.id,
        workflows.c.queue_id,
        workflow_steps.c.started_at,
    ),
}

KINDS: tuple[tuple[Any, Kind], ...] = (
    (Json, Kind.JSON),
    (UTCDateTime, Kind.TIME),
    (Flag, Kind.FLAG),
    (type(Seconds), Kind.SECONDS),
    (SmallInteger, Kind.INT),
    (BigInteger, Kind.LONG),
    (Integer, Kind.INT),
)


def kinds(view: str) -> dict[str, Kind]:
    """The columns of a view, and what they hold."""
    return {name: _kind(column) for name, column in VIEWS[view].columns.items()}


def _kind(column: ColumnElement[Any]) -> Kind:
    if column is queues.c.queue_name:
        return Kind.QUEUE
    return next((kind for type_, kind in KINDS if isinstance(column.type, type_)), Kind.TEXT)


OPERATORS: dict[str, Callable[[ColumnElement[Any], Any], ColumnElement[bool]]] = {
    "=": lambda column, value: column == value,
    "<": lambda column, value: column < value,
    "<=": lambda column, value: column <= value,
    ">": lambda column, value: column > value,
    ">=": lambda column, value: column >= value,
    "in": lambda column, value: column.in_(value),
    "null": lambda column, _: column.is_(None),
}


DENSE = 0.8
"""Rows for each id from which on ids count as rows."""
MOST_VALUES = 1000
"""Of one condition: each is a parameter of the statement, and a database takes only so many."""


def can_compare(view: str, condition: Condition) -> bool:
    """Whether the database decides this as anybody else would. Not by order of text, which each has
    in its own way, nor by the text of JSON.
    """
    kind = kinds(view).get(condition.column)
    if kind is None or condition.operator not in OPERATORS:
        return False
    if condition.operator == "null":
        return True
    if condition.operator == "in" and len(condition.value) > MOST_VALUES:
        return False
    is_text = kind in (Kind.TEXT, Kind.QUEUE)
    return kind is not Kind.JSON and (not is_text or condition.operator in ("=", "in"))


def _where(statement: Select[Any], scan: Scan) -> Select[Any]:
    view = VIEWS[scan.view]
    if scan.queue is not None:
        statement = statement.where(*_of_queue(view, scan))
    if scan.since is not None:
        statement = statement.where(view.time >= scan.since)
    if scan.until is not None:
        statement = statement.where(view.time < scan.until)
    for condition in scan.conditions:
        found = OPERATORS[condition.operator](view.columns[condition.column], condition.value)
        statement = statement.where(not_(found) if condition.negated else found)
    return statement


class Bounds(NamedTuple):
    """The ids that a scan is about, both included."""

    first: int
    last: int


# Each message of a queue is in one of the indexes of its table, all of which are of some messages only.
_IN_SOME_INDEX = or_(
    messages.c.ready,
    and_(~messages.c.ready, messages.c.blocked == UNBLOCKED),
    messages.c.blocked == literal_column("2"),
    messages.c.group_key.is_not(None),
)


def _of_queue(view: View, scan: Scan) -> Iterator[ColumnElement[bool]]:
    if scan.queue_id is None:
        yield queues.c.queue_name == scan.queue
        return
    yield view.queue_id == scan.queue_id
    if view.queue_id is messages.c.queue_id:
        yield _IN_SOME_INDEX


def found(connection: Connection, scan: Scan) -> Scan:
    """The same scan with the id of its queue, if it is about one."""
    if scan.queue is None:
        return scan
    known = select(queues.c.id).where(queues.c.queue_name == scan.queue)
    id = connection.execute(known).scalar()
    if id is None:
        raise QueueNotFound(scan.queue)
    return replace(scan, queue_id=id)


def ends(connection: Connection, scan: Scan) -> Bounds | None:
    """The first and the last id of the whole table, which its index tells; None if it is empty."""
    id = VIEWS[scan.view].id
    first, last = connection.execute(select(func.min(id), func.max(id))).one()
    return None if first is None else Bounds(first, last)


class Piece(NamedTuple):
    """Wanted rows with neighbouring ids: the first and the last id, and how many rows."""

    first: int
    last: int
    rows: int


def pieces(connection: Connection, scan: Scan, within: Bounds, *, number: int) -> list[Piece]:
    """How many of the wanted rows are where: in up to so many ranges of ids of the same width."""
    view = VIEWS[scan.view]
    width = -(-(within.last - within.first + 1) // number)
    # Not a parameter: PostgreSQL would not know that both expressions are the same.
    slot = (view.id - literal_column(str(within.first))).op("/")(literal_column(str(width)))
    columns = (func.min(view.id), func.max(view.id), func.count())
    counted: Any = select(*columns).select_from(view.source)
    counted = _where(counted, scan).where(view.id >= within.first, view.id <= within.last)
    return [Piece(*row) for row in connection.execute(counted.group_by(slot).order_by(slot))]


def is_dense(connection: Connection, scan: Scan, within: Bounds) -> bool:
    """True if all rows are wanted and have nearly all ids, so that ranges of the same width have about
    the same number of rows.
    """
    view = VIEWS[scan.view]
    everything: Select[Any] = select(view.id)
    if _where(everything, scan) is not everything:
        return False
    rows: float = _about(connection, view.id.table)
    return rows >= DENSE * (within.last - within.first + 1)


_ABOUT = text_("SELECT reltuples FROM pg_catalog.pg_class WHERE oid = to_regclass(:name)")


def _about_postgres(connection: Connection, table: Any) -> float:
    schema = (connection.get_execution_options().get("schema_translate_map") or {}).get(None)
    name = ".".join(f'"{part}"' for part in (schema, table.name) if part)
    known: float | None = connection.execute(_ABOUT, {"name": name}).scalar()
    return known or 0.0


def _count_sqlite(connection: Connection, table: Any) -> float:
    return float(connection.execute(select(func.count()).select_from(table)).scalar_one())


_about = per_dialect(postgresql=_about_postgres, sqlite=_count_sqlite)
"""How many rows a table has: PostgreSQL knows it without counting, and SQLite counts quickly."""


def statement(scan: Scan, within: Bounds) -> Select[Any]:
    """The wanted rows with these ids, each column in the form that `Kind` says: JSON as text."""
    view = VIEWS[scan.view]
    chosen = [_plain(view, name).label(name) for name in scan.columns]
    # Databases leave the join out if nothing is asked of it.
    found = select(*chosen).select_from(view.source)
    return _where(found, scan).where(view.id >= within.first, view.id <= within.last)


def _plain(view: View, name: str) -> ColumnElement[Any]:
    column = view.columns[name]
    kind = _kind(column)
    if kind is Kind.QUEUE:
        return view.queue_id
    if kind is Kind.JSON:
        return cast(column, Text())
    return cast(column, Integer()) if kind is Kind.INT else column


def queue_names(connection: Connection) -> dict[int, str]:
    """The names of all queues by their ids."""
    found = connection.execute(select(queues.c.id, queues.c.queue_name))
    return {row.id: row.queue_name for row in found}


USUAL: dict[str, int | None] = {
    **{
        name: None
        for view in VIEWS.values()
        for name, column in view.columns.items()
        if column.nullable
    },
    **dict.fromkeys(("priority", "read_ct", "released_ct", "blocked"), 0),
}
"""What most rows have in a column, of whatever view: nothing where it may be empty."""
UNUSUAL = "unusual"


def packed(text: str, columns: Sequence[str]) -> str:
    """The same rows from PostgreSQL. All columns that have a usual value are one, which comes last: a
    record in the binary format, or NULL where all of them have it.
    """
    names = [name for name in columns if name in USUAL]
    if not names:
        return text
    others = [name for name in columns if name not in USUAL]
    usual = " AND ".join(
        f"{name} IS NULL" if USUAL[name] is None else f"{name} = {USUAL[name]}" for name in names
    )
    record = f"CASE WHEN {usual} THEN NULL ELSE record_send(ROW({', '.join(names)})) END"
    return f"SELECT {', '.join([*others, record])} AS {UNUSUAL} FROM ({text}) AS plain"


def text(statement: Select[Any], dialect: Any, *, schema: str | None = None) -> str:
    """A statement as it is sent, with its values in it."""
    named = type(dialect)(paramstyle="named")  # else % would be doubled
    translated: dict[str, Any] = {} if schema is None else {"schema_translate_map": {None: schema}}
    compiled = statement.compile(
        dialect=named,
        compile_kwargs={"literal_binds": True},
        render_schema_translate=schema is not None,
        **translated,
    )
    return str(compiled)
