"""Rows as they are, of any table: for moving them to another database.

Driven by the models, so that a table or column added there comes along. Values are those that the
column types give to Python, which are the same on every database; JSON stays text, since SQL's NULL
and JSON's null would both be None.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    Connection,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    or_,
    select,
    text,
    tuple_,
    update,
)

from pgqrs.models import Base, schema_history, staged, uploads, waiting, workers
from pgqrs.repositories.expressions import per_dialect, qualified_name
from pgqrs.sqltypes import Json

Row = tuple[Any, ...]
STAYING = frozenset((schema_history.name, staged.name, uploads.name, waiting.name, workers.name))
"""What belongs to a place: the history of its schema, the processes that are registered or wait there,
and what they have only prepared.
"""


def tables() -> list[Table]:
    """The tables whose rows move, those that others refer to first."""
    return [table for table in Base.metadata.sorted_tables if table.name not in STAYING]


def counted_tables() -> list[Table]:
    """The tables that number their rows, also where the rows stay: numbers are not used twice."""
    return [table for table in Base.metadata.sorted_tables if _is_numbered(table)]


def _is_numbered(table: Table) -> bool:
    return "id" in table.columns and table.columns["id"].identity is not None


def count(connection: Connection, table: Table) -> int:
    """How many rows a table has."""
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def _is_json(column: Column[Any]) -> bool:
    return isinstance(column.type, Json)


def _select(table: Table) -> Select[Any]:
    return select(*(cast(c, Text()).label(c.name) if _is_json(c) else c for c in table.columns))


def _key(table: Table) -> list[Column[Any]]:
    return list(table.primary_key.columns)


def key_of(table: Table, row: Row) -> Row:
    """The primary key of a row."""
    names = [column.name for column in table.columns]
    return tuple(row[names.index(column.name)] for column in _key(table))


def page(connection: Connection, table: Table, *, after: Row | None, limit: int) -> list[Row]:
    """Rows by primary key, a page at a time."""
    key = _key(table)
    statement = _select(table).order_by(*key).limit(limit)
    if after is not None:
        if len(key) == 1:
            statement = statement.where(key[0] > after[0])
        else:
            statement = statement.where(tuple_(*key) > tuple_(*_bound(key, after)))
    return [tuple(row) for row in connection.execute(statement)]


def _bound(key: list[Column[Any]], values: Row) -> list[Any]:
    pairs = zip(key, values, strict=True)
    return [bindparam(None, value, type_=column.type) for column, value in pairs]


def same(connection: Connection, table: Table, rows: Sequence[Row]) -> list[Row]:
    """The rows that have the primary keys of these."""
    key = _key(table)
    wanted = [key_of(table, row) for row in rows]
    chosen = key[0].in_([only for (only,) in wanted]) if len(key) == 1 else tuple_(*key).in_(wanted)
    return [tuple(row) for row in connection.execute(_select(table).where(chosen))]


def last_key(connection: Connection, table: Table) -> Row | None:
    """The greatest number of a table whose rows are numbered; None if that does not say how far it
    is filled: texts are ordered by each database in its own way.
    """
    if not _is_numbered(table):
        return None
    greatest = connection.execute(select(func.max(table.columns["id"]))).scalar()
    return None if greatest is None else (greatest,)


def _insert_ignoring(dialect: Any, table: Table) -> Any:
    values = {
        column.name: (
            cast(bindparam(column.name, type_=Text()), Json())
            if _is_json(column)
            else bindparam(column.name, type_=column.type)
        )
        for column in table.columns
    }
    return dialect.insert(table).values(values).on_conflict_do_nothing()


def _insert_postgres(_connection: Connection, table: Table) -> Any:
    from sqlalchemy.dialects import postgresql  # only where it is used: it is slow to import

    return _insert_ignoring(postgresql, table)


def _insert_sqlite(_connection: Connection, table: Table) -> Any:
    from sqlalchemy.dialects import sqlite

    return _insert_ignoring(sqlite, table)


_insert: Any = per_dialect(postgresql=_insert_postgres, sqlite=_insert_sqlite)


def made_at(connection: Connection) -> datetime | None:
    """When the tables of this store were made, which is what tells it from others."""
    times = schema_history.c.applied_at
    made: datetime | None = connection.execute(select(func.min(times, type_=times.type))).scalar()
    return made


def take_over(connection: Connection, made: datetime | None) -> None:
    """From now on this store counts as the one whose tables were made at that time."""
    revision, times = schema_history.c.revision, schema_history.c.applied_at
    first = select(func.min(revision)).scalar_subquery()
    connection.execute(
        update(schema_history)
        .where(or_(times < made, revision == first))
        .values(applied_at=bindparam("made", made, type_=times.type))
    )


def put(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Add rows that are not there yet."""
    names = [column.name for column in table.columns]
    connection.execute(
        _insert(connection, table), [dict(zip(names, row, strict=True)) for row in rows]
    )


# Numbers


def _counter_postgres(connection: Connection, table: Table) -> int:
    name = _sequence(connection, table)
    value, called = connection.execute(text(f"SELECT last_value, is_called FROM {name}")).one()
    return int(value) if called else int(value) - 1


def _sequence(connection: Connection, table: Table) -> str:
    name = qualified_name(connection, table)
    return str(connection.execute(select(func.pg_get_serial_sequence(name, "id"))).scalar_one())


def _set_counter_postgres(connection: Connection, table: Table, value: int) -> None:
    name = _sequence(connection, table)
    connection.execute(select(func.setval(name, max(value, 1), value > 0)))


def _counter_sqlite(connection: Connection, table: Table) -> int:
    asked = text("SELECT seq FROM sqlite_sequence WHERE name = :name")
    return int(connection.execute(asked, {"name": table.name}).scalar() or 0)


def _set_counter_sqlite(connection: Connection, table: Table, value: int) -> None:
    bound = {"name": table.name, "value": value}
    connection.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), bound)
    connection.execute(
        text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :value)"), bound
    )


counter = per_dialect(postgresql=_counter_postgres, sqlite=_counter_sqlite)
"""The last number that was given to a row of a table, whether or not the row is still there."""
set_counter = per_dialect(postgresql=_set_counter_postgres, sqlite=_set_counter_sqlite)
"""Go on numbering after this."""


# Comparing


class Fingerprint(NamedTuple):
    """How many rows, and a checksum of them that does not depend on their order."""

    rows: int
    checksum: int

    def add(self, table: Table, rows: Iterable[Row]) -> Fingerprint:
        """With these rows too."""
        found = [int.from_bytes(_digest(table, row)) for row in rows]
        return Fingerprint(self.rows + len(found), (self.checksum + sum(found)) % 2**128)


def digests(table: Table, rows: Iterable[Row]) -> set[bytes]:
    """What tells these rows from others."""
    return {_digest(table, row) for row in rows}


def _digest(table: Table, row: Row) -> bytes:
    """The same for the same row on every database."""
    values = zip(table.columns, row, strict=True)
    known = [[column.name, _plain(column, value)] for column, value in values]
    return hashlib.blake2b(json.dumps(known).encode(), digest_size=16).digest()


def _plain(column: Column[Any], value: Any) -> Any:
    if value is None:
        return None
    if _is_json(column):
        return _canonical(value)
    return value.isoformat() if isinstance(value, datetime) else value


def _canonical(document: str) -> str:
    try:
        return json.dumps(json.loads(document), sort_keys=True)
    except (ValueError, RecursionError):  # as a row that was written past this library may be
        return document
