"""A SQLite file, or a database in memory.

One writer at a time: writers wait in a fair queue (`group_commit`) and then take the file's write
lock with `BEGIN IMMEDIATE`, so that a transaction never finds out halfway that it may not write.
Readers run beside them on a snapshot of their own. Other processes may use the same file: the lock
is the file's, and waiting for it is bounded by `sqlite_busy_timeout` and then `retry_for`.

On an engine of our own the pragmas are set and checked on every connection. On the application's
own engine nothing is set; what weakens a promise is warned about, once.
"""

from __future__ import annotations

import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, QueuePool, create_engine, delete, event, false
from sqlalchemy.exc import DBAPIError

from pgqrs.clock import Clock, SystemClock
from pgqrs.config import Config, default_url
from pgqrs.drivers import in_sqlite_transaction
from pgqrs.errors import InvalidConfig, NotExclusive
from pgqrs.models import queues
from pgqrs.repositories.hot import run
from pgqrs.stores.base import Database, T, Work
from pgqrs.stores.group_commit import GroupCommit
from pgqrs.stores.wakeups import FileSentry, Wakeups
from pgqrs.types import ConcurrencyModel

BEGIN = "pgqrs_begin"
"""The execution option that says how a transaction begins."""
OLDEST = (3, 38, 0)
"""RETURNING, STRICT, UPDATE … FROM and JSON built in."""
_SYNCHRONOUS = {"OFF": 0, "NORMAL": 1, "FULL": 2, "EXTRA": 3}
_TAKE_WRITE_LOCK = delete(queues).where(false())
Marks = tuple[int, int]


def marks(connection: Connection) -> Marks:
    """Two numbers; one of them moves when this connection changes anything."""
    ((changes,),) = run(connection, "SELECT total_changes()", {}, returns_rows=True)
    ((version,),) = run(connection, "PRAGMA schema_version", {}, returns_rows=True)
    return changes, version


class _Undo(Exception):
    """Ends a work that was only tried out."""

    def __init__(self, changed: bool, result: Any) -> None:
        self.changed = changed
        self.result = result


class SqliteDatabase(Database):
    """A SQLite database. Several processes on one host may share the file."""

    backend_name = "sqlite"
    concurrency_model = ConcurrencyModel.SINGLE_PROCESS

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        write_lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(
            config, clock=clock, sleep=sleep, owned=engine is None, write_lock=write_lock
        )
        if config.schema is not None:
            raise InvalidConfig("SQLite has no schemas; use another file instead")
        if sqlite3.sqlite_version_info < OLDEST:
            raise InvalidConfig(f"SQLite {sqlite3.sqlite_version} is too old; 3.38 is needed")
        if engine is None:
            self._quiet = _create_engine(config)
            self._engine = _with_begin(self._quiet)
        else:
            self._engine = self._quiet = engine
        self._writer: Connection | None = None
        self._writer_pid = 0
        self._group_commit = GroupCommit(self._transaction)
        self._warned = False
        path = self._engine.url.database
        if path and path != ":memory:":
            self.wakeups = Wakeups(FileSentry(path, f"{path}-wal"))

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def is_shared(self) -> bool:
        return not self.in_memory

    def now(self) -> datetime:
        return (self.clock or SystemClock()).now()

    def _read(self, work: Work[T]) -> T:
        with self._engine.connect() as connection, connection.begin():
            return work(connection)

    def _write(self, work: Work[T], single: bool) -> T:
        if self._write_lock is None:
            return self._group_commit.submit(work)
        with self._write_lock, self._transaction() as connection:
            return work(connection)

    def _write_alone(self, work: Work[T]) -> T:
        if self._write_lock is None:
            return self._group_commit.submit(work, alone=True)
        return self._write(work, False)

    def _transaction(self) -> AbstractContextManager[Connection]:
        return self._own_transaction() if self.owned else self._borrowed_transaction()

    @contextmanager
    def _own_transaction(self) -> Iterator[Connection]:
        """On the connection kept for writing: there is one writer at a time."""
        connection = self._writing_connection()
        driver: Any = connection.connection
        try:
            run(connection, "BEGIN IMMEDIATE", {})
            yield connection
            if connection.in_transaction():  # SQLAlchemy noticed, so it must notice the end too
                connection.commit()
            else:
                driver.commit()
        except BaseException:
            if connection.in_transaction():
                connection.rollback()
            driver.rollback()
            raise
        finally:
            if self.in_memory:  # the only connection there is: others may want to read
                connection.close()

    def try_out(self, work: Work[T]) -> tuple[bool, T]:
        """Whether a work would change anything, and what it would return. Nothing is changed."""

        def tried(connection: Connection) -> None:
            before = marks(connection)
            result = work(connection)
            raise _Undo(marks(connection) != before, result)

        try:
            self.write(tried, needs_schema=False)
        except _Undo as undone:
            return undone.changed, undone.result
        raise AssertionError("a work that is tried out never ends well")

    @contextmanager
    def raw_connection(self) -> Iterator[sqlite3.Connection]:
        """The driver's own connection, for what SQLite offers beyond SQL: backup, serialize."""
        fairy = self._quiet.raw_connection()
        try:
            driver: Any = fairy.driver_connection
            yield driver
        finally:
            fairy.close()

    def _writing_connection(self) -> Connection:
        if self.in_memory:
            return self._quiet.connect()
        if self._writer is None or self._writer.invalidated or self._writer_pid != os.getpid():
            self._writer = self._quiet.connect()
            self._writer_pid = os.getpid()
        return self._writer

    @property
    def in_memory(self) -> bool:
        """Whether it is gone when it is closed."""
        return self._engine.url.database in (None, "", ":memory:")

    def close(self) -> None:
        self._close_writer()
        super().close()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    @contextmanager
    def _borrowed_transaction(self) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            self._begin_on_borrowed(connection)
            yield connection

    def _begin_on_borrowed(self, connection: Connection) -> None:
        """An application's engine may begin lazily, or not at all, or with a plain BEGIN."""
        if not self._warned:
            self._warned = True
            _warn_of_weak_pragmas(connection)
        if not in_sqlite_transaction(connection):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        elif self._schema_is_there:
            connection.execute(_TAKE_WRITE_LOCK)  # deletes nothing, but is a write

    def is_transient(self, error: BaseException) -> bool:
        if not isinstance(error, DBAPIError):
            return False
        code = getattr(error.orig, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

    def verify_exclusive_access(self) -> None:
        """Raise `NotExclusive` if anyone else has the file open. Call it while this store is idle."""
        path = self._engine.url.database
        if path is None or self.in_memory:
            return
        if not self.owned:
            raise InvalidConfig("open the store by URL for this: an engine of yours stays open")
        self._close_writer()  # our own idle connections would be in the way
        self._quiet.pool.dispose()
        probe = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            probe.execute("PRAGMA locking_mode=EXCLUSIVE")
            probe.execute("BEGIN EXCLUSIVE")
            probe.execute("ROLLBACK")
        except sqlite3.OperationalError as exc:
            raise NotExclusive(path) from exc
        finally:
            probe.close()


def _create_engine(config: Config) -> Engine:
    url = config.url
    in_memory = url.database == ":memory:"
    if in_memory:
        # One connection, handed from thread to thread: the pool is the lock.
        pool: dict[str, Any] = {"pool_size": 1, "max_overflow": 0}
    else:
        url = url.set(database=str(_usable_path(url.database or "", config)))
        pool = {"pool_size": 5, "max_overflow": 50}
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_timeout=config.retry_for,
        connect_args={"check_same_thread": False, "timeout": config.sqlite_busy_timeout},
        **pool,
    )

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        _set_pragmas(connection, config, in_memory=in_memory)

    return engine


def _with_begin(quiet: Engine) -> Engine:
    """The engine that applications get: the same pool, and transactions as SQLAlchemy means them.

    Works run on the other one, since listening to an engine makes all of it slower.
    """
    engine = create_engine(quiet.url, pool=quiet.pool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, "BEGIN"))

    return engine


def _usable_path(database: str, config: Config) -> Path:
    path = Path(database).expanduser().absolute()
    if config.dsn is None and str(path) == default_url().database:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InvalidConfig(f"cannot create {path.parent}: {exc.strerror}") from exc
    if not path.parent.is_dir():
        raise InvalidConfig(f"cannot create {path}: there is no directory {path.parent}")
    return path


def _set_pragmas(connection: sqlite3.Connection, config: Config, *, in_memory: bool) -> None:
    wanted: dict[str, Any] = {
        "busy_timeout": int(config.sqlite_busy_timeout * 1000),
        "foreign_keys": 1,
        "synchronous": _SYNCHRONOUS[config.sqlite_synchronous],
    }
    if not in_memory:
        wanted["journal_mode"] = config.sqlite_journal_mode.lower()
    for name, value in wanted.items():
        connection.execute(f"PRAGMA {name}={value}").close()
        (found,) = connection.execute(f"PRAGMA {name}").fetchone()
        if found != value:
            raise InvalidConfig(f"SQLite refused PRAGMA {name}={value}; it stays at {found}")


def _warn_of_weak_pragmas(connection: Connection) -> None:
    if connection.exec_driver_sql("PRAGMA synchronous").scalar_one() < _SYNCHRONOUS["FULL"]:
        warnings.warn(
            "this engine's connections use synchronous=NORMAL or OFF: a power cut can lose messages "
            "whose enqueue has returned; set PRAGMA synchronous=FULL on connect",
            stacklevel=2,
        )
    if connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 0:
        warnings.warn(
            "this engine's connections use no busy_timeout: waiting for other processes is left to "
            "retries; pass connect_args={'timeout': 5}",
            stacklevel=2,
        )
