"""What a database driver does not do by itself."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection


def in_sqlite_transaction(connection: Connection) -> bool:
    """Whether SQLite itself is in a transaction, whatever SQLAlchemy thinks."""
    dbapi_connection: Any = connection.connection.dbapi_connection
    raw = getattr(dbapi_connection, "driver_connection", None) or dbapi_connection
    return bool(getattr(raw, "in_transaction", False))


def join_transaction(connection: Connection) -> None:
    """Make sure that what is written next is part of the connection's transaction.

    Python's `sqlite3` begins a transaction only before what it takes for a write. It does not take
    a statement that starts with WITH for one, nor CREATE TABLE: they would commit by themselves.
    And SQLAlchemy does not hear of statements run on the driver's cursor: its `commit` would do
    nothing.
    """
    if not connection.in_transaction():
        connection.begin()
    if connection.dialect.name == "sqlite" and not in_sqlite_transaction(connection):
        connection.exec_driver_sql("BEGIN")
