"""The few SQL expressions that SQLAlchemy cannot say the same way on both databases.

*Times.* `moment("vt")` is a time bound as two parameters, made by `at(vt=(now, seconds))`: what
Python's clock says, or, when that is None, how many seconds after the server's own time, which is that
of the start of the statement. What waits for a lock reads the time after it: `present(…)`.

*Sets.* `rows(...)` and `held(...)` unfold one JSON parameter into rows, and `is_one_of(...)` looks
into one. One text is quicker to send than arrays (twice as quick for a thousand payloads on
PostgreSQL), both databases can do it, and there is no limit to how many values it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    Boolean,
    Connection,
    Double,
    Integer,
    Interval,
    Table,
    Text,
    TypeDecorator,
    bindparam,
    column,
    literal_column,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ColumnElement, TableValuedAlias
from sqlalchemy.sql.functions import FunctionElement

from pgqrs.sqltypes import BigId, Json, UTCDateTime

T = TypeVar("T")


def per_dialect(**variants: Callable[..., T]) -> Callable[..., T]:
    """One operation whose SQL differs by database: called with a connection, picks the variant."""

    def call(connection: Connection, *args: Any, **kwargs: Any) -> T:
        return variants[connection.dialect.name](connection, *args, **kwargs)

    return call


def qualified_name(connection: Connection, table: Table) -> str:
    """A table's name as the server knows it, for functions that take one as text."""
    return in_its_schema(connection, table.name)


def in_its_schema(connection: Connection, name: str) -> str:
    """The name of a table or function of ours as the server knows it."""
    quote = connection.dialect.identifier_preparer.quote
    translated = connection.get_execution_options().get("schema_translate_map") or {}
    schema = translated.get(None)
    return quote(name) if schema is None else f"{quote(schema)}.{quote(name)}"


# Times


class _Moment(FunctionElement[datetime]):
    type = UTCDateTime()
    name = "pgqrs_moment"
    inherit_cache = True


def moment(name: str) -> _Moment:
    """A time bound as `<name>_at` and `<name>_in`."""
    return _Moment(
        bindparam(f"{name}_at", type_=UTCDateTime()), bindparam(f"{name}_in", type_=Double())
    )


def at(**moments: tuple[datetime | None, float | None]) -> dict[str, Any]:
    """The parameters of `moment`s: each so many seconds after `now`, or after the server's time.

    Without seconds it is no time at all: NULL.
    """
    bound: dict[str, Any] = {}
    for name, (now, seconds) in moments.items():
        if now is None or seconds is None:
            bound[f"{name}_at"] = None
        else:
            bound[f"{name}_at"] = now + timedelta(seconds=seconds) if seconds else now
        bound[f"{name}_in"] = seconds
    return bound


SECOND: ColumnElement[Any] = literal_column("interval '1 second'", Interval())
"""On PostgreSQL."""


class _Instant(FunctionElement[datetime]):
    type = UTCDateTime()
    name = "pgqrs_instant"
    inherit_cache = True


def instant(name: str = "now", *, later: bool = False) -> _Instant:
    """A time as `moment` has it, where it is known which clock tells it (`by_own_clock`). So it is one
    parameter: `<name>_at` on SQLite, and on PostgreSQL `<name>_in` if it is `later`, else none.
    """
    parts = [bindparam(f"{name}_at", type_=UTCDateTime())]
    parts += [bindparam(f"{name}_in", type_=Double())] if later else []
    return _Instant(*parts)


def by_own_clock(connection: Connection, now: datetime | None) -> bool:
    """True if PostgreSQL itself tells the time, and SQLite's caller does: as always, but in tests."""
    return (now is None) == (connection.dialect.name == "postgresql")


@compiles(_Instant, "postgresql")
def _instant_on_server(element: _Instant, compiler: Any, **kw: Any) -> str:
    if len(element.clauses) == 1:
        return "statement_timestamp()"
    seconds = compiler.process(list(element.clauses)[1], **kw)
    return f"(statement_timestamp() + make_interval(secs => {seconds}))"


@compiles(_Instant, "sqlite")
def _instant_of_caller(element: _Instant, compiler: Any, **kw: Any) -> str:
    when: str = compiler.process(next(iter(element.clauses)), **kw)
    return when


class _Present(FunctionElement[datetime]):
    type = UTCDateTime()
    name = "pgqrs_present"
    inherit_cache = True


def present(name: str) -> _Present:
    """A time bound as `<name>_at`, or else PostgreSQL's when this is evaluated, which differs each time:
    so evaluate it once, and after whatever the statement had to wait for.
    """
    return _Present(bindparam(f"{name}_at", type_=UTCDateTime()))


@compiles(_Present, "postgresql")
def _present_on_server(element: _Present, compiler: Any, **kw: Any) -> str:
    (when,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"coalesce({when}, clock_timestamp())"


@compiles(_Moment, "postgresql")
def _moment_on_server(element: _Moment, compiler: Any, **kw: Any) -> str:
    when, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"coalesce({when}, statement_timestamp() + make_interval(secs => {seconds}))"


@compiles(_Moment, "sqlite")
def _moment_of_caller(element: _Moment, compiler: Any, **kw: Any) -> str:
    when, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"coalesce({when}, {seconds})"


def constant(value: str | int) -> ColumnElement[Any]:
    """A value that is part of the statement: not sent, converted and compared anew each time."""
    if isinstance(value, str):
        return literal_column(f"'{value}'", Text())
    return literal_column(str(value), Integer())


# Sets


class _Rows(FunctionElement[Any]):
    name = "pgqrs_rows"
    inherit_cache = True


def rows(name: str) -> TableValuedAlias:
    """The JSON texts bound as `name` as rows with their position."""
    return _Rows(bindparam(name, type_=Text())).table_valued(
        column("value", Json()), column("position", Integer()), name=f"{name}_rows"
    )


@compiles(_Rows, "postgresql")
def _rows_postgres(element: _Rows, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT value, ordinality AS position "
        f"FROM jsonb_array_elements(CAST({text} AS JSONB)) WITH ORDINALITY)"
    )


@compiles(_Rows, "sqlite")
def _rows_sqlite(element: _Rows, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"(SELECT value, key AS position FROM json_each({text}))"


class _Texts(FunctionElement[Any]):
    name = "pgqrs_texts"
    inherit_cache = True


def texts(name: str) -> TableValuedAlias:
    """The strings of the JSON array bound as `name` as rows with their position."""
    return _Texts(bindparam(name, type_=Text())).table_valued(
        column("value", Text()), column("position", Integer()), name=f"{name}_rows"
    )


@compiles(_Texts, "postgresql")
def _texts_postgres(element: _Texts, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT value, ordinality AS position "
        f"FROM jsonb_array_elements_text(CAST({text} AS JSONB)) WITH ORDINALITY)"
    )


compiles(_Texts, "sqlite")(_rows_sqlite)


class JsonArray(TypeDecorator[Sequence[Any]]):
    """A list that is bound as the text of a JSON array: one parameter, however long it is."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Iterable[Any] | None, dialect: Any) -> str | None:
        return None if value is None else json.dumps(list(value), ensure_ascii=False)


class _IsOneOf(FunctionElement[bool]):
    type = Boolean()
    name = "pgqrs_is_one_of"
    inherit_cache = True

    def self_group(self, against: Any = None) -> Any:
        """A condition as it is: SQLite looks nothing up for `(…) = 1`, as a function would be."""
        return self


def is_one_of(wanted: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """True if a number or text is in the list bound as `name`.

    Instead of `IN` with a parameter for each: drivers end at 65,535 parameters, SQLite before that.
    """
    return _IsOneOf(wanted, bindparam(name, type_=JsonArray()))


@compiles(_IsOneOf, "postgresql")
def _is_one_of_postgres(element: _IsOneOf, compiler: Any, **kw: Any) -> str:
    wanted, listed = element.clauses
    kind = "TEXT" if isinstance(wanted.type, Text) else "BIGINT"
    text = compiler.process(listed, **kw)
    # As an array: then the planner looks values up one by one, whatever it thinks of their number.
    return (
        f"{compiler.process(wanted, **kw)} = ANY(ARRAY(SELECT CAST(value AS {kind}) "
        f"FROM jsonb_array_elements_text(CAST({text} AS JSONB))))"
    )


@compiles(_IsOneOf, "sqlite")
def _is_one_of_sqlite(element: _IsOneOf, compiler: Any, **kw: Any) -> str:
    wanted, listed = element.clauses
    text = compiler.process(listed, **kw)
    return f"{compiler.process(wanted, **kw)} IN (SELECT value FROM json_each({text}))"


class _Numbered(FunctionElement[Any]):
    name = "pgqrs_numbered"
    inherit_cache = True


def numbered(name: str) -> TableValuedAlias:
    """The pairs bound as `name`, each a text and a number, as rows."""
    return _Numbered(bindparam(name, type_=JsonArray())).table_valued(
        column("name", Text()), column("number", BigId), name=f"{name}_rows"
    )


@compiles(_Numbered, "postgresql")
def _numbered_postgres(element: _Numbered, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT value->>0 AS name, CAST(value->>1 AS BIGINT) AS number "
        f"FROM jsonb_array_elements(CAST({text} AS JSONB)))"
    )


@compiles(_Numbered, "sqlite")
def _numbered_sqlite(element: _Numbered, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT json_extract(value, '$[0]') AS name, json_extract(value, '$[1]') AS number "
        f"FROM json_each({text}) LIMIT -1)"  # so that it is read once, and looked up what it names
    )


class Holds(NamedTuple):
    """Proof of holding messages: whose they are, and the token of each.

    Without a token, any claim of that worker counts.
    """

    worker_id: int
    tokens: Mapping[int, int | None]


def held_by(holds: Holds) -> dict[str, Any]:
    """The parameters for `held`."""
    return {"held_by": holds.worker_id, "held": json.dumps(holds.tokens)}


def held_with(holds: Holds, results: Mapping[int, str]) -> dict[str, Any]:
    """The parameters for `held_with_results`; results are JSON texts by the id of their message."""
    held = {id: [token, results.get(id)] for id, token in holds.tokens.items()}
    return {"held_by": holds.worker_id, "held": json.dumps(held)}


class _Held(FunctionElement[Any]):
    name = "pgqrs_held"
    inherit_cache = True


def held(name: str = "held") -> TableValuedAlias:
    """The messages bound as `held` with their tokens (see `held_by`), as rows called `name`."""
    return _Held(bindparam("held", type_=Text())).table_valued(
        column("id", BigId), column("read_ct", Integer()), name=name
    )


@compiles(_Held, "postgresql")
def _held_postgres(element: _Held, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT CAST(key AS BIGINT) AS id, CAST(value AS INTEGER) AS read_ct "
        f"FROM jsonb_each_text(CAST({text} AS JSONB)))"
    )


@compiles(_Held, "sqlite")
def _held_sqlite(element: _Held, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"(SELECT CAST(key AS INTEGER) AS id, value AS read_ct FROM json_each({text}))"


class _HeldWithResults(FunctionElement[Any]):
    name = "pgqrs_held_with_results"
    inherit_cache = True


def held_with_results(name: str = "held") -> TableValuedAlias:
    """The messages bound as `held` with their tokens and results (see `held_with`)."""
    return _HeldWithResults(bindparam("held", type_=Text())).table_valued(
        column("id", BigId), column("read_ct", Integer()), column("result", Json()), name=name
    )


@compiles(_HeldWithResults, "postgresql")
def _held_with_results_postgres(element: _HeldWithResults, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT CAST(key AS BIGINT) AS id, CAST(value->>0 AS INTEGER) AS read_ct, "
        f"CAST(value->>1 AS JSONB) AS result FROM jsonb_each(CAST({text} AS JSONB)))"
    )


@compiles(_HeldWithResults, "sqlite")
def _held_with_results_sqlite(element: _HeldWithResults, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT CAST(key AS INTEGER) AS id, json_extract(value, '$[0]') AS read_ct, "
        f"json_extract(value, '$[1]') AS result FROM json_each({text}))"
    )
