"""How the tables of a database differ from the models.

There are two checks. *Quick*, whenever a store is opened: one query for the names of our tables and
indexes. *Whole*, on demand: every table, column, index and constraint, by SQLAlchemy's inspector.

An index that an administrator added is no difference, unless it is unique: it slows writes down,
and refuses none. Everything else is, because the next revision may trip over it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Dialect,
    ForeignKeyConstraint,
    Index,
    Inspector,
    Table,
    UniqueConstraint,
    inspect,
    text,
)

from pgqrs.models import Base

_VISIBLE = "pg_table_is_visible(pg_class.oid)"
_IN_SCHEMA = "relnamespace = to_regnamespace(quote_ident(CAST(:schema AS text)))"
_POSTGRES_NAMES = r"""
SELECT relname FROM pg_class LEFT JOIN pg_index ON indexrelid = pg_class.oid
WHERE relname LIKE 'pgqrs\_%' AND relkind IN ('r', 'p') AND {place}
   OR relname LIKE 'ix\_pgqrs\_%' AND relkind IN ('i', 'I') AND indisvalid AND {place}
"""
_SQLITE_NAMES = text("SELECT name FROM sqlite_master WHERE type IN ('table', 'index')")


def names(connection: Connection, schema: str | None) -> set[str]:
    """Returns the names of the tables and indexes that are there, with one query."""
    if connection.dialect.name != "postgresql":
        return set(connection.execute(_SQLITE_NAMES).scalars())
    place, given = (_VISIBLE, {}) if schema is None else (_IN_SCHEMA, {"schema": schema})
    return set(connection.execute(text(_POSTGRES_NAMES.format(place=place)), given).scalars())


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


def missing(found: set[str]) -> list[str]:
    """Returns what the quick check misses among these names."""
    return [
        _said(table, kind, name, "is missing")
        for table, kind, name in _expected_names()
        if name not in found and (kind == "table" or table in found)
    ]


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
        found += _indexes(table, inspector.get_indexes(table.name, schema), connection.dialect)
        found += _constraints(table, inspector, schema)
    return found + _invalid(connection, schema, found)


def _invalid(connection: Connection, schema: str | None, found: Iterable[str]) -> list[str]:
    """Indexes of PostgreSQL that are there and cannot be used: what building them left behind."""
    return [
        said.replace("is missing", "is not valid: build it again")
        for said in missing(names(connection, schema))
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
            column["type"].compile(dialect), column["nullable"], column["default"] is not None
        )
        for column in reflected
    }
    yield from _compare(table, "column", wanted, found)


def _column(column: Column[Any], dialect: Dialect) -> str:
    return _described(
        column.type.compile(dialect),
        bool(column.nullable),
        column.server_default is not None and column.identity is None,
    )


def _described(kind: str, nullable: bool, has_default: bool) -> str:
    return kind + ("" if nullable else " NOT NULL") + (" with a default" if has_default else "")


# Indexes


def _indexes(table: Table, reflected: Iterable[Any], dialect: Dialect) -> Iterator[str]:
    wanted = {str(index.name): _index(index, dialect.name) for index in table.indexes}
    found = {
        index["name"]: _index_said(
            index["column_names"],
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


def _indexed_column(expression: Any) -> str:
    """Returns the name of the column, also of `column.desc()` and `text("column DESC")`."""
    inner = getattr(expression, "element", expression)
    return str(inner.name) if isinstance(inner, Column) else str(inner).split()[0]


def _index_said(columns: Iterable[str | None], unique: bool, where: Any) -> str:
    listed = ", ".join(column or "an expression" for column in columns)
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
