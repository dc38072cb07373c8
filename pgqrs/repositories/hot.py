"""Statements of the hot paths: built with Core like all others, but compiled once, and run on the
driver's own cursor.

Running a small statement through `Connection.execute` costs more than the database needs for it.
What is left out here is what these statements do not need: looking up a cache, building a context
and a result. An engine that somebody listens to (tracing, logging of SQL), a driver with another
style of parameters, and statements inside a schema of their own take the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

Convert = Callable[[Any], Any]
_BINARY = 1
"""`psycopg.pq.Format.BINARY`, without importing the driver."""


class _Form(NamedTuple):
    """A statement compiled for one dialect."""

    text: str
    returns_rows: bool
    defaults: dict[str, Any]
    incoming: tuple[tuple[str, Convert], ...]
    outgoing: tuple[tuple[int, Convert], ...]


class Hot:
    """A statement, and its compiled forms."""

    def __init__(self, statement: Any) -> None:
        self.statement = statement
        self._forms: dict[str, _Form] = {}

    def rows(self, connection: Connection, bound: Mapping[str, Any]) -> list[Any]:
        """Execute, and return all rows with the values that Core would return."""
        dialect = connection.dialect
        if (
            connection._has_events
            or connection.engine._has_events
            or connection.get_execution_options().get("schema_translate_map")
            or dialect.driver not in ("pysqlite", "psycopg")
        ):
            result = connection.execute(self.statement, bound)
            return list(result.all()) if result.returns_rows else []
        form = self._forms.get(dialect.name)
        if form is None:
            form = self._forms[dialect.name] = _compile(self.statement, dialect)
        parameters = {**form.defaults, **bound}
        for name, convert in form.incoming:
            parameters[name] = convert(parameters[name])
        found = run(connection, form.text, parameters, returns_rows=form.returns_rows)
        return _converted(found, form.outgoing) if found else found


def _compile(statement: Any, dialect: Any) -> _Form:
    # By name, so that parameters need no order; sqlite3 understands that as well.
    named = type(dialect)(paramstyle="named" if dialect.name == "sqlite" else "pyformat")
    compiled = statement.compile(dialect=named)
    return _Form(
        compiled.string,
        bool(compiled._result_columns),
        dict(compiled.params),
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
    """Column by column, which is quicker than row by row."""
    if not outgoing:
        return rows
    columns: list[Any] = list(zip(*rows, strict=True))
    for index, convert in outgoing:
        columns[index] = map(convert, columns[index])
    return list(zip(*columns, strict=True))


def run(
    connection: Connection, text: str, parameters: Mapping[str, Any], *, returns_rows: bool = False
) -> list[Any]:
    """Execute text as it is. Errors are those of SQLAlchemy."""
    fairy = connection.connection
    cursor = fairy.cursor()
    if connection.dialect.driver == "psycopg":
        _answer_in_binary(cursor)
    try:
        cursor.execute(text, parameters)
        # Asking the cursor would have psycopg describe all columns first.
        return list(cursor.fetchall()) if returns_rows else []
    except connection.dialect.loaded_dbapi.Error as exc:
        lost = connection.dialect.is_disconnect(exc, fairy.dbapi_connection, cursor)
        if lost:
            connection.invalidate(exc)
        raise DBAPIError.instance(
            text,
            parameters,
            exc,
            connection.dialect.loaded_dbapi.Error,
            connection_invalidated=lost,
            dialect=connection.dialect,
        ) from exc
    finally:
        cursor.close()


def _answer_in_binary(cursor: Any) -> None:
    """Numbers and times are then not written as text by the server, to be read by the driver: a
    sixth of the time of a large batch.
    """
    getattr(cursor, "_cursor", cursor).format = _BINARY
