"""Statements of the hot paths: built with Core like all others, but compiled once, and run on the
driver's own cursor.

Running a small statement through `Connection.execute` costs more than the database needs for it.
What is left out here is what these statements do not need: looking up a cache, building a context
and a result. An engine that somebody listens to (tracing, logging of SQL), a driver with another
style of parameters, and statements inside a schema of their own take the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import Connection, Text, cast
from sqlalchemy.exc import DBAPIError

from pgqrs.sqltypes import Json, json_from_text

Convert = Callable[[Any], Any]
_DRIVERS = ("pysqlite", "psycopg")
FETCHED_AT_ONCE = 8
"""Rows: what is read beyond a budget is no more than these."""
_BINARY = 1
"""`psycopg.pq.Format.BINARY`, without importing the driver."""


class _Form(NamedTuple):
    """A statement compiled for one dialect."""

    text: str
    returns_rows: bool
    defaults: dict[str, Any]
    incoming: tuple[tuple[str, Convert], ...]
    outgoing: tuple[tuple[int, Convert], ...]


class Budget(NamedTuple):
    """So many bytes of one column; reading ends with the row that uses them up."""

    max_bytes: int
    column: int


class Hot:
    """A statement, and its compiled forms."""

    def __init__(self, statement: Any) -> None:
        self.statement = statement
        self._forms: dict[str, _Form] = {}

    def rows(
        self, connection: Connection, bound: Mapping[str, Any], *, budget: Budget | None = None
    ) -> list[Any]:
        """Execute, and return all rows with the values that Core would return.

        With a budget only as many as fit, for a database that works out rows as they are read.
        """
        dialect = connection.dialect
        if (
            connection._has_events
            or connection.engine._has_events
            or connection._execution_options.get("schema_translate_map")
            or dialect.driver not in _DRIVERS
        ):
            if budget is not None:
                return self._rows_within(connection, bound, budget)
            result = connection.execute(self.statement, bound)
            return list(result.all()) if result.returns_rows else []
        form = self._forms.get(dialect.name)
        if form is None:
            form = self._forms[dialect.name] = _compile(self.statement, dialect)
        parameters = {**form.defaults, **bound}
        for name, convert in form.incoming:
            parameters[name] = convert(parameters[name])
        found = run(
            connection, form.text, parameters, returns_rows=form.returns_rows, budget=budget
        )
        return _converted(found, form.outgoing) if found and form.outgoing else found

    def _rows_within(
        self, connection: Connection, bound: Mapping[str, Any], budget: Budget
    ) -> list[Any]:
        """The same the ordinary way. JSON is read as text: a decoded value does not tell its size."""
        statement, outgoing = _as_text(self.statement)
        options = {"stream_results": True}
        with connection.execute(statement, bound, execution_options=options) as result:
            found = _within(result.fetchmany, budget)
        return _converted(found, outgoing) if found else found


@cache  # and not a cached_property: on Python 3.11 that takes a lock, which a fork may copy
def _as_text(statement: Any) -> tuple[Any, tuple[tuple[int, Convert], ...]]:
    """Returns the statement with JSON as text, and how to decode its rows."""
    columns = list(statement.selected_columns)
    json = [index for index, column in enumerate(columns) if isinstance(column.type, Json)]
    for index in json:
        columns[index] = cast(columns[index], Text())
    decoding = tuple((index, json_from_text) for index in json)
    return statement.with_only_columns(*columns), decoding


def _within(fetch: Callable[[int], Sequence[Any]], budget: Budget) -> list[Any]:
    """The first rows that fit; at least one. They are fetched a few at a time, which is quicker."""
    left, column = budget
    found: list[Any] = []
    while rows := fetch(FETCHED_AT_ONCE):
        size = sum([len(row[column]) for row in rows])
        if size >= left:
            return found + _until_spent(rows, left, column)
        found += rows
        left -= size
    return found


def _until_spent(rows: Sequence[Any], left: int, column: int) -> list[Any]:
    for count, row in enumerate(rows, 1):
        left -= len(row[column])
        if left <= 0:
            return list(rows[:count])
    return list(rows)


def _compile(statement: Any, dialect: Any) -> _Form:
    # By name, so that parameters need no order; sqlite3 understands that as well.
    named = type(dialect)(paramstyle="named" if dialect.name == "sqlite" else "pyformat")
    compiled = statement.compile(dialect=named)
    return _Form(
        compiled.string,
        bool(compiled._result_columns),
        {name: bind.value for name, bind in compiled.binds.items() if not bind.required},
        tuple(
            (name, convert)
            for name, bind in compiled.binds.items()
            if (convert := bind.type._cached_bind_processor(dialect)) is not None
        ),
        tuple(
            (index, convert)
            for index, column in enumerate(compiled._result_columns)
            if (convert := column.type._cached_result_processor(dialect, None)) is not None
        ),
    )


def _converted(rows: list[Any], outgoing: tuple[tuple[int, Convert], ...]) -> list[Any]:
    """Column by column, which is quicker than row by row; unless there is but one."""
    if len(rows) == 1:
        values = list(rows[0])
        for index, convert in outgoing:
            values[index] = convert(values[index])
        return [tuple(values)]
    columns: list[Any] = list(zip(*rows, strict=True))
    for index, convert in outgoing:
        if columns[index].count(None) < len(rows):  # few messages have headers, or expire
            columns[index] = map(convert, columns[index])
    return list(zip(*columns, strict=True))


def run(
    connection: Connection,
    text: str,
    parameters: Mapping[str, Any],
    *,
    returns_rows: bool = False,
    budget: Budget | None = None,
) -> list[Any]:
    """Execute text as it is. Errors are those of SQLAlchemy."""
    cursor: Any = connection.connection.dbapi_connection.cursor()  # type: ignore[union-attr]
    if connection.dialect.driver == "psycopg":
        # Numbers and times are then not written as text by the server, to be read by the driver: a
        # sixth of the time of a large batch.
        getattr(cursor, "_cursor", cursor).format = _BINARY
    try:
        cursor.execute(text, parameters)
        if budget is not None:
            return _within(cursor.fetchmany, budget)
        # Asking the cursor would have psycopg describe all columns first.
        return list(cursor.fetchall()) if returns_rows else []
    except connection.dialect.loaded_dbapi.Error as exc:
        raise wrapped(connection, exc, text, parameters, cursor) from exc
    finally:
        cursor.close()


def commands(connection: Connection, *texts: str) -> None:
    """Execute commands without parameters; in one round trip, if the driver can do that."""
    if connection.dialect.driver == "psycopg" and not connection.dialect.is_async:
        # It would prepare them sooner or later, and only a single command can be prepared.
        pieces, options = ["; ".join(texts)], {"prepare": False}
    else:
        pieces, options = list(texts), {}
    cursor: Any = connection.connection.cursor()
    try:
        for piece in pieces:
            cursor.execute(piece, **options)
    except connection.dialect.loaded_dbapi.Error as exc:
        raise wrapped(connection, exc, "; ".join(texts), {}, cursor) from exc
    finally:
        cursor.close()


def wrapped(
    connection: Connection,
    error: Any,
    text: str,
    parameters: Mapping[str, Any] = MappingProxyType({}),
    cursor: Any = None,
) -> Exception:
    """SQLAlchemy's error for one of the driver's."""
    driver = connection.connection.dbapi_connection
    lost = connection.dialect.is_disconnect(error, driver, cursor)
    if lost:
        connection.invalidate(error)
    named: Exception = DBAPIError.instance(
        text,
        parameters,
        error,
        connection.dialect.loaded_dbapi.Error,
        connection_invalidated=lost,
        dialect=connection.dialect,
    )
    return named
