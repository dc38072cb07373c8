"""What revision scripts are made of: column types and operations that never change.

A revision must do in ten years what it did on its first day, whatever became of the models, the
column types and the functions of pgqrs since. So the scripts in `alembic/versions` import
SQLAlchemy, `alembic.op` and this module, and nothing else; a test refuses other imports. This
module in turn imports nothing of pgqrs.

After a release that contains it, a name of this module is never changed and never removed. Add
another one instead. `tests/migrations` replays all revisions and compares the outcome with the
schema that is recorded there.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

if TYPE_CHECKING:
    from alembic.operations import Operations

# Column types. SQLite tables are STRICT: only INTEGER, REAL and TEXT occur there.

BigId: TypeEngine[Any] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""A 64-bit id; SQLite's autoincrement needs the column to be called INTEGER."""
Small: TypeEngine[Any] = sa.SmallInteger().with_variant(sa.Integer(), "sqlite")
Seconds: TypeEngine[Any] = sa.Double().with_variant(sa.REAL(), "sqlite")
Flag: TypeEngine[Any] = sa.Boolean().with_variant(sa.Integer(), "sqlite")
UTCDateTime: TypeEngine[Any] = sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")


class _Jsonb(sa.types.UserDefinedType[Any]):
    """Only for DDL: no values pass through it. SQLAlchemy's own is slow to import."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "JSONB"


Json: TypeEngine[Any] = _Jsonb().with_variant(sa.Text(), "sqlite")
JsonText: TypeEngine[Any] = sa.JSON().with_variant(sa.Text(), "sqlite")
"""JSON that is kept as it was written: the keys of objects stay in their order."""


def many(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """An array of these on PostgreSQL, one of these where there are no arrays."""
    return kind.with_variant(sa.ARRAY(kind), "postgresql")


# The record of applied revisions.

_history = sa.Table(
    "pgqrs_schema_history",
    sa.MetaData(),
    sa.Column("revision", sa.Text),
    sa.Column("checksum", sa.Text),
    sa.Column("applied_at", UTCDateTime),
)


def checksum(script: str | Path) -> str:
    """Returns the SHA-256 of a script's text; it does not depend on the line endings."""
    return checksum_of(Path(script).read_text(encoding="utf-8"))


def checksum_of(source: str) -> str:
    """Returns the same of a text that was read already."""
    return hashlib.sha256(source.encode()).hexdigest()


def is_applied(op: Operations, revision: str) -> bool:
    """The first line of every upgrade: another Alembic environment may have applied it already."""
    if op.get_context().as_sql:
        return False
    connection = op.get_bind()
    if not sa.inspect(connection).has_table(_history.name, schema=schema_of(op)):
        return False
    applied = sa.select(_history.c.revision).where(_history.c.revision == revision)
    return connection.execute(applied).first() is not None


def record(op: Operations, revision: str, script: str) -> None:
    """The last line of every upgrade: this revision was applied, from this script (`__file__`)."""
    now: Any = datetime.now(UTC)
    if op.get_context().dialect.name == "sqlite":
        now = now.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    values = {"revision": revision, "checksum": checksum(script), "applied_at": now}
    op.execute(sa.insert(_history).values(values))


def forget(op: Operations, revision: str) -> None:
    """The first line of every downgrade: this revision is not applied any more."""
    op.execute(sa.delete(_history).where(_history.c.revision == revision))


# Operations.


def schema_of(op: Operations) -> str | None:
    """Returns the schema of our tables, for Alembic's operations that do not translate it."""
    if op.get_context().as_sql:
        return None
    translations = op.get_bind().get_execution_options().get("schema_translate_map") or {}
    translated = translations.get(None)
    return None if translated is None else str(translated)


def tune_for_postgres(op: Operations, table: str, **parameters: float) -> None:
    """Set storage parameters; other databases have none."""
    settings = ", ".join(f"{key} = {value}" for key, value in parameters.items())
    _alter_in_postgres(op, table, f"SET ({settings})")


def leave_unlogged(op: Operations, table: str) -> None:
    """Give up a table's rows when the server crashes, for speed; other databases cannot."""
    _alter_in_postgres(op, table, "SET UNLOGGED")


def leave_uncompressed(op: Operations, table: str, column: str) -> None:
    """Store large values as they are: compressing costs more than it saves where they do not stay."""
    _alter_in_postgres(op, table, f"ALTER COLUMN {column} SET STORAGE EXTERNAL")


def _alter_in_postgres(op: Operations, table: str, change: str) -> None:
    dialect = op.get_context().dialect
    if dialect.name != "postgresql":
        return
    schema = schema_of(op)
    if schema is not None:
        table = f"{dialect.identifier_preparer.quote(schema)}.{table}"
    op.execute(sa.text(f"ALTER TABLE {table} {change}"))


def alter_type(op: Operations, table: str, column: str, kind: TypeEngine[Any]) -> None:
    """Give a column another type that its values can be cast to; only PostgreSQL can."""
    name = kind.compile(op.get_context().dialect)
    _alter_in_postgres(
        op, table, f"ALTER COLUMN {column} TYPE {name} USING CAST({column} AS {name})"
    )
