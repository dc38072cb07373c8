"""What a database driver does not do by itself."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection


def sqlite_connection(connection: Connection) -> Any:
    """The driver's own connection."""
    dbapi_connection: Any = connection.connection.dbapi_connection
    return getattr(dbapi_connection, "driver_connection", None) or dbapi_connection


def in_sqlite_transaction(connection: Connection) -> bool:
    """Whether SQLite itself is in a transaction, whatever SQLAlchemy thinks."""
    return bool(getattr(sqlite_connection(connection), "in_transaction", False))


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


def commits_each_statement(connection: Connection) -> bool:
    """True if there is no transaction to join: every statement is committed by itself."""
    if connection.dialect.name != "sqlite":
        return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))
    # SQLite's driver cannot be asked: those who say BEGIN by themselves set it up the same way.
    level = connection.get_execution_options().get(
        "isolation_level", connection.dialect._on_connect_isolation_level
    )
    return level == "AUTOCOMMIT" and not in_sqlite_transaction(connection)
