"""How the tables of a database differ from the models.

There are two checks. *Quick*, whenever a store is opened: one query for the names of our tables, indexes
and functions. *Whole*, on demand: every table, column, index and constraint, by SQLAlchemy's inspector,
and the text of every function.

An index that an administrator added is no difference, unless it is unique: it slows writes down,
and refuses none. Everything else is, because the next revision may trip over it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    CursorResult,
    Dialect,
    ForeignKeyConstraint,
    Index,
    Inspector,
    Table,
    UniqueConstraint,
    inspect,
    text,
)

from pgqrs.models import FUNCTIONS, Base, staged

_VISIBLE = "pg_table_is_visible(pg_class.oid)"
_IN_SCHEMA = "relnamespace = to_regnamespace(quote_ident(CAST(:schema AS text)))"
_POSTGRES_NAMES = r"""
SELECT relname FROM pg_class LEFT JOIN pg_index ON indexrelid = pg_class.oid
WHERE relname LIKE 'pgqrs\_%' AND relkind IN ('r', 'p') AND {place}
   OR relname LIKE 'ix\_pgqrs\_%' AND relkind IN ('i', 'I') AND indisvalid AND {place}
UNION ALL SELECT proname FROM pg_proc WHERE proname LIKE 'pgqrs\_%' AND {functions}
"""
_FUNCTION_VISIBLE = "pg_function_is_visible(pg_proc.oid)"
_FUNCTION_IN_SCHEMA = "pronamespace = to_regnamespace(quote_ident(CAST(:schema AS text)))"
_POSTGRES_FUNCTIONS = r"""
SELECT proname, prosrc, proconfig FROM pg_proc WHERE proname LIKE 'pgqrs\_%' AND {functions}
"""
_POSTGRES_UNLOGGED = r"""
SELECT relname FROM pg_class
WHERE relname LIKE 'pgqrs\_%' AND relkind = 'r' AND relpersistence = 'u' AND {place} ORDER BY 1
"""
_SQLITE_DESCENDING = text('SELECT name FROM pragma_index_xinfo(:index) WHERE "desc" AND "key"')
_SQLITE_NAMES = text("SELECT name FROM sqlite_master WHERE type IN ('table', 'index')")


def names(connection: Connection, schema: str | None) -> set[str]:
    """Returns the names of the tables and indexes that are there, with one query."""
    if connection.dialect.name != "postgresql":
        return set(connection.execute(_SQLITE_NAMES).scalars())
    return set(_ask(connection, _POSTGRES_NAMES, schema).scalars())


def _ask(connection: Connection, sql: str, schema: str | None) -> CursorResult[*tuple[Any, ...]]:
    """Ask PostgreSQL for what is ours."""
    if schema is None:
        place, functions, given = _VISIBLE, _FUNCTION_VISIBLE, {}
    else:
        place, functions, given = _IN_SCHEMA, _FUNCTION_IN_SCHEMA, {"schema": schema}
    return connection.execute(text(sql.format(place=place, functions=functions)), given)


@cache
def _expected_names() -> tuple[tuple[str, str, str], ...]:
    """Table, kind and name of everything that the quick check looks for."""
    return tuple(
        (table.name, kind, name)
        for table in Base.metadata.sorted_tables
        for kind, name in [
            ("table", table.name),
            *(("index", str(index.name)) for index in table.indexes),
        ]
    )


def missing(found: set[str], dialect: str) -> list[str]:
    """Returns what the quick check misses among these names."""
    functions = FUNCTIONS if dialect == "postgresql" else ()
    return [
        _said(table, kind, name, "is missing")
        for table, kind, name in _expected_names()
        if name not in found and (kind == "table" or table in found)
    ] + [f"function {name} is missing" for name in functions if name not in found]


def differences(connection: Connection, schema: str | None) -> list[str]:
    """Returns all differences between the tables and the models, one sentence each."""
    inspector = inspect(connection)
    there = set(inspector.get_table_names(schema))
    found: list[str] = []
    for table in sorted(Base.metadata.tables.values(), key=lambda table: table.name):
        if table.name not in there:
            found.append(f"table {table.name} is missing")
            continue
        found += _columns(table, inspector.get_columns(table.name, schema), connection.dialect)
        indexes = inspector.get_indexes(table.name, schema)
        found += _indexes(table, _with_directions(connection, indexes), connection.dialect)
        found += _constraints(table, inspector, schema)
    if connection.dialect.name == "postgresql":
        found += _functions(connection, schema)
        found += _unlogged(connection, schema)
    return found + _invalid(connection, schema, found)


def _functions(connection: Connection, schema: str | None) -> Iterator[str]:
    quote = connection.dialect.identifier_preparer.quote
    found: dict[str, set[str]] = {}
    for name, source, settings in _ask(connection, _POSTGRES_FUNCTIONS, schema):
        if schema is not None:
            source = source.replace(f"{quote(schema)}.pgqrs_", "pgqrs_")
        found.setdefault(name, set()).add(digest(source, settings))
    for name, wanted in FUNCTIONS.items():
        if name not in found:
            yield f"function {name} is missing"
        elif wanted not in found[name]:
            yield f"function {name} was altered"


def digest(source: str, settings: Iterable[str] | None) -> str:
    """What tells a function from others: its body, and what is set while it runs."""
    return hashlib.sha256("\n".join([source, *sorted(settings or ())]).encode()).hexdigest()


def _unlogged(connection: Connection, schema: str | None) -> Iterator[str]:
    """Tables that a crash of the server would empty."""
    for name in _ask(connection, _POSTGRES_UNLOGGED, schema).scalars():
        if name in Base.metadata.tables and name != staged.name:
            yield f"table {name} is unlogged"


def _invalid(connection: Connection, schema: str | None, found: Iterable[str]) -> list[str]:
    """Indexes of PostgreSQL that are there and cannot be used: what building them left behind."""
    return [
        said.replace("is missing", "is not valid: build it again")
        for said in missing(names(connection, schema), connection.dialect.name)
        if said not in found
    ]


def _said(table: str, kind: str, name: str, problem: str) -> str:
    return f"table {table} {problem}" if kind == "table" else f"{table}: {kind} {name} {problem}"


def _compare(
    table: Table, kind: str, wanted: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[str]:
    for name, value in wanted.items():
        if name not in found:
            yield _said(table.name, kind, name, "is missing")
        elif found[name] != value:
            yield _said(table.name, kind, name, f"is {found[name]}, not {value}")
    for name in found:
        if name not in wanted:
            yield _said(table.name, kind, name, "was added")


# Columns


def _columns(table: Table, reflected: Iterable[Any], dialect: Dialect) -> Iterator[str]:
    wanted = {column.name: _column(column, dialect) for column in table.columns}
    found = {
        column["name"]: _described(
            column["type"].compile(dialect),
            column["nullable"],
            column["default"] is not None,
            bool(column.get("identity")),
        )
        for column in reflected
    }
    yield from _compare(table, "column", wanted, found)


def _column(column: Column[Any], dialect: Dialect) -> str:
    return _described(
        column.type.compile(dialect),
        bool(column.nullable),
        column.server_default is not None and column.identity is None,
        dialect.name == "postgresql" and column.identity is not None,
    )


def _described(kind: str, nullable: bool, has_default: bool, is_numbered: bool) -> str:
    return (
        kind
        + ("" if nullable else " NOT NULL")
        + (" with a default" if has_default else "")
        + (" with an identity" if is_numbered else "")
    )


# Indexes


def _indexes(table: Table, reflected: Iterable[Any], dialect: Dialect) -> Iterator[str]:
    wanted = {str(index.name): _index(index, dialect.name) for index in table.indexes}
    found = {
        index["name"]: _index_said(
            [
                _directed(column, bool(sorting and "desc" in sorting))
                for column in index["column_names"]
                for sorting in [index.get("column_sorting", {}).get(column)]
            ],
            bool(index["unique"]),
            index.get("dialect_options", {}).get(f"{dialect.name}_where"),
        )
        for index in reflected
        if not index.get("duplicates_constraint")
        and (index["unique"] or index["name"] in wanted)  # others do no harm
    }
    yield from _compare(table, "index", wanted, found)


def _index(index: Index, dialect: str) -> str:
    columns = [_indexed_column(expression) for expression in index.expressions]
    return _index_said(columns, bool(index.unique), index.dialect_options[dialect]["where"])


def _with_directions(connection: Connection, indexes: list[Any]) -> list[Any]:
    """These indexes, on SQLite with what the inspector leaves out there: which columns descend."""
    if connection.dialect.name == "sqlite":
        for index in indexes:
            descending = connection.execute(_SQLITE_DESCENDING, {"index": index["name"]}).scalars()
            index["column_sorting"] = dict.fromkeys(descending, ("desc",))
    return indexes


def _indexed_column(expression: Any) -> str:
    """Returns the name of the column, also of `column.desc()` and `text("column DESC")`."""
    inner = getattr(expression, "element", expression)
    if isinstance(inner, Column):
        return _directed(str(inner.name), inner is not expression)
    name, *direction = str(inner).split()
    return _directed(name, bool(direction))


def _directed(column: str | None, is_descending: bool) -> str:
    return (column or "an expression") + " DESC" * is_descending


def _index_said(columns: Iterable[str], unique: bool, where: Any) -> str:
    listed = ", ".join(columns)
    # PostgreSQL stores a condition in its own words: with more parentheses, and casts.
    condition = " ".join(re.sub(r"[()]|::\w+", "", str(where)).split()) if where is not None else ""
    return f"{'unique ' * unique}on {listed}" + (f" where {condition}" if condition else "")


# Constraints


def _constraints(table: Table, inspector: Inspector, schema: str | None) -> Iterator[str]:
    key = inspector.get_pk_constraint(table.name, schema)["constrained_columns"]
    if key != (wanted_key := [column.name for column in table.primary_key.columns]):
        yield f"{table.name}: the primary key is {key}, not {wanted_key}"
    for kind, constraint, reflected in (
        ("constraint", UniqueConstraint, inspector.get_unique_constraints(table.name, schema)),
        ("constraint", CheckConstraint, inspector.get_check_constraints(table.name, schema)),
        ("foreign key", ForeignKeyConstraint, inspector.get_foreign_keys(table.name, schema)),
    ):
        wanted = [each for each in table.constraints if isinstance(each, constraint)]
        yield from _compare(
            table,
            kind,
            {_name(each): _columns_of(each) for each in wanted},
            {str(each["name"]): _columns_of_reflected(each) for each in reflected},
        )


def _name(constraint: Any) -> str:
    return str(constraint.name)


def _columns_of(constraint: Any) -> str:
    if isinstance(constraint, CheckConstraint):
        return "a check"  # each database has its own words for the same condition
    return "on " + ", ".join(column.name for column in constraint.columns)


def _columns_of_reflected(constraint: Any) -> str:
    if "sqltext" in constraint:
        return "a check"
    columns = constraint.get("constrained_columns") or constraint.get("column_names")
    return "on " + ", ".join(columns)
