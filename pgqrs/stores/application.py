"""Transactions of the application's own on the local database of a store in S3.

The engine that an application gets looks like any other. When one of its transactions begins, it
*enters* the replica; when it ends, it *leaves*. In between, its commit is not only SQLite's: in
durable mode `commit()` returns once the upload is done, and raises `ConflictError` if it was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from pgqrs.errors import InvalidConfig
from pgqrs.stores.daemon_threads import DaemonThreads
from pgqrs.stores.sqlite import SqliteDatabase, marks

ENTERED = "pgqrs_entered"
Wait = Callable[..., Any]


class Enterable(Protocol):
    """What a transaction enters and leaves."""

    def enter(self) -> None: ...

    def before_commit(self, connection: Connection) -> None: ...

    def after_commit(self, driver: Any) -> None: ...

    def leave(self) -> None: ...


def application_engine(database: SqliteDatabase, replica: Enterable) -> Engine:
    """An engine on the connections of a local database, for an application."""
    engine = create_engine(database.engine.url, pool=database.engine.pool)
    _listen(engine, replica, wait=_call, driver=_driver_of)
    return engine


def async_application_engine(database: SqliteDatabase, replica: Enterable) -> AsyncEngine:
    """The same for asyncio, on connections of its own."""
    if database.in_memory:
        raise InvalidConfig("an async engine needs the local copy in files; set s3_cache")
    try:
        engine = create_async_engine(
            database.engine.url.set(drivername="sqlite+aiosqlite"),
            connect_args={"timeout": database.config.sqlite_busy_timeout},
        )
    except ModuleNotFoundError as exc:
        raise InvalidConfig("an async engine needs aiosqlite: pip install aiosqlite") from exc

    @event.listens_for(engine.sync_engine, "connect")
    def begin_by_hand(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    _listen(engine.sync_engine, replica, wait=_call_in_thread, driver=lambda _: None)
    return engine


def _listen(
    engine: Engine, replica: Enterable, *, wait: Wait, driver: Callable[[Connection], Any]
) -> None:
    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        wait(replica.enter)
        connection.info[ENTERED] = (0, 0)
        connection.exec_driver_sql("BEGIN")
        connection.info[ENTERED] = marks(connection)

    @event.listens_for(engine, "commit")
    def commit(connection: Connection) -> None:
        before = connection.info.get(ENTERED)
        try:
            changed = marks(connection) != before
            if changed:
                replica.before_commit(connection)
            connection.connection.commit()
            if changed:
                wait(replica.after_commit, driver(connection))
        finally:
            connection.connection.rollback()
            _leave(connection.info)

    @event.listens_for(engine, "rollback")
    def rollback(connection: Connection) -> None:
        connection.connection.rollback()
        _leave(connection.info)

    @event.listens_for(engine.pool, "checkin")
    def checkin(_connection: Any, record: Any) -> None:
        _leave(record.info)  # forgotten by its owner, without an end

    def _leave(info: dict[Any, Any]) -> None:
        if info.pop(ENTERED, None) is not None:
            replica.leave()


def _driver_of(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments)


_threads = DaemonThreads("pgqrs-commit", limit=32)


def _call_in_thread(function: Callable[..., Any], *arguments: Any) -> None:
    await_only(_threads.run(function, *arguments))
