"""A database's tables as text: one line a fact, in an order that does not depend on the database."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sqlalchemy import Connection, inspect, text

from pgqrs.schema import VERSION_TABLE
from pgqrs.schema_differences import digest

COLUMNS = """
SELECT column_name, concat_ws(' ',
       format_type(atttypid, atttypmod),
       CASE WHEN attnotnull THEN 'NOT NULL' END,
       'DEFAULT ' || column_default,
       CASE WHEN is_identity = 'YES' THEN 'IDENTITY ' || identity_generation END,
       CASE WHEN attstorage <> typstorage THEN 'STORAGE ' || attstorage::text END)
FROM information_schema.columns
JOIN pg_attribute ON attrelid = table_name::regclass AND attname = column_name
JOIN pg_type ON pg_type.oid = atttypid
WHERE table_schema = 'public' AND table_name = CAST(:name AS text)
ORDER BY ordinal_position
"""
OTHERS = """
SELECT 'constraint ' || conname || ': ' || pg_get_constraintdef(oid)
FROM pg_constraint WHERE conrelid = to_regclass(CAST(:name AS text)) AND contype <> 'n'
UNION ALL
SELECT 'index ' || indexdef
FROM pg_indexes WHERE schemaname = 'public' AND tablename = CAST(:name AS text)
UNION ALL
SELECT 'option ' || unnest(reloptions) FROM pg_class WHERE oid = to_regclass(CAST(:name AS text))
UNION ALL
SELECT 'unlogged' FROM pg_class WHERE oid = to_regclass(CAST(:name AS text)) AND relpersistence = 'u'
"""
FUNCTIONS = r"""
SELECT proname, pg_get_function_identity_arguments(oid), prosrc, proconfig
FROM pg_proc WHERE proname LIKE 'pgqrs\_%' AND pronamespace = 'public'::regnamespace ORDER BY 1, 2
"""


def describe(connection: Connection) -> str:
    """Returns everything the database knows of pgqrs' tables, as lines of text."""
    facts = _postgres if connection.dialect.name == "postgresql" else _sqlite
    lines: list[str] = []
    for table in sorted(inspect(connection).get_table_names()):
        if table.startswith("pgqrs_") and table != VERSION_TABLE:
            lines += [f"table {table}", *(f"    {fact}" for fact in facts(connection, table)), ""]
    if connection.dialect.name == "postgresql":
        for name, arguments, source, settings in connection.execute(text(FUNCTIONS)):
            lines += [f"function {name}({arguments}) {digest(source, settings)}"]
    return "\n".join(lines)


def _postgres(connection: Connection, table: str) -> Iterator[str]:
    for name, kind in connection.execute(text(COLUMNS), {"name": table}):
        yield f"column {name} {kind}"
    yield from sorted(connection.execute(text(OTHERS), {"name": table}).scalars())


def _sqlite(connection: Connection, table: str) -> Iterator[str]:
    def pragma(call: str) -> list[dict[str, object]]:
        return [dict(row) for row in connection.exec_driver_sql(f"PRAGMA {call}").mappings()]

    for column in pragma(f"table_xinfo({table})"):
        parts = [column["name"], column["type"], "NOT NULL" if column["notnull"] else ""]
        parts += [f"DEFAULT {column['dflt_value']}" if column["dflt_value"] is not None else ""]
        yield "column " + " ".join(str(part) for part in parts if part)
    yield from sorted(_sqlite_constraints(connection, table))
    for index in sorted(pragma(f"index_list({table})"), key=lambda row: str(row["name"])):
        if index["origin"] == "c":
            made = text("SELECT sql FROM sqlite_master WHERE name = :name")
            sql = connection.execute(made, {"name": index["name"]}).scalar_one()
            yield "index " + " ".join(sql.split())
    (listed,) = (row for row in pragma("table_list") if row["name"] == table)
    made = text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name")
    sql = connection.execute(made, {"name": table}).scalar_one()
    yield from (["strict"] if listed["strict"] else []) + (
        ["without rowid"] if listed["wr"] else []
    )
    yield from ["autoincrement"] if re.search("AUTOINCREMENT", sql) else []


def _sqlite_constraints(connection: Connection, table: str) -> Iterator[str]:
    inspector = inspect(connection)
    key = inspector.get_pk_constraint(table)
    if key["constrained_columns"]:
        name = key["name"] or "(no name)"
        yield f"constraint {name}: PRIMARY KEY ({', '.join(key['constrained_columns'])})"
    for unique in inspector.get_unique_constraints(table):
        yield f"constraint {unique['name']}: UNIQUE ({', '.join(unique['column_names'])})"
    for check in inspector.get_check_constraints(table):
        yield f"constraint {check['name']}: CHECK ({check['sqltext']})"
    for foreign in inspector.get_foreign_keys(table):
        columns = ", ".join(foreign["constrained_columns"])
        others = ", ".join(foreign["referred_columns"])
        options = "".join(f" {key} {value}" for key, value in foreign["options"].items())
        yield (
            f"constraint {foreign['name']}: FOREIGN KEY ({columns}) "
            f"REFERENCES {foreign['referred_table']} ({others}){options}"
        )
