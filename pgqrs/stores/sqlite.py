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
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, QueuePool, create_engine, delete, event, false

from pgqrs.clock import Clock, SystemClock
from pgqrs.config import Config, default_url
from pgqrs.drivers import in_sqlite_transaction
from pgqrs.errors import InvalidConfig, NotExclusive, StoreDamaged
from pgqrs.models import queues
from pgqrs.repositories.hot import run, wrapped
from pgqrs.stores.base import Database, T, Work
from pgqrs.stores.failures import first_line, original_of
from pgqrs.stores.forks import abandon, watch
from pgqrs.stores.group_commit import Body, GroupCommit
from pgqrs.stores.queue_news import QueueNews
from pgqrs.stores.wakeups import FileSentry, Wakeups
from pgqrs.types import ConcurrencyModel

BEGIN = "pgqrs_begin"
"""The execution option that says how a transaction begins."""
OLDEST = (3, 38, 0)
"""RETURNING, STRICT, UPDATE … FROM and JSON built in."""
FORKED_WITHIN = 1.0
"""Seconds that a fork waits for those who are at work in other threads."""
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
        self._handles: set[int] = set()
        self._opening = threading.Lock()
        if engine is None:
            self._quiet = _create_engine(config)
            self._engine = _with_begin(self._quiet)
            _count_handles(self._quiet, self)
        else:
            self._engine = self._quiet = engine
        self.in_memory = self._engine.url.database in (None, "", ":memory:")
        """True if it is gone when it is closed."""
        self._writer: Connection | None = None
        self._leads_fork = False
        self._group_commit = GroupCommit(self._transact, patience=config.retry_for)
        self._warned = False
        path = self._engine.url.database
        if path and path != ":memory:" and not path.startswith("file:"):
            path = os.path.realpath(path)  # the other files lie beside the database, not the link
            self.wakeups = Wakeups(FileSentry(path, f"{path}-wal", news=QueueNews(path)))

        watch(self)

    def before_fork(self) -> None:
        """Let go of the file, if nobody keeps us from it for long."""
        super().before_fork()
        self._leads_fork = self._group_commit.pause(FORKED_WITHIN)
        self._opening.acquire()
        pool = self._quiet.pool
        if self.in_memory or not isinstance(pool, QueuePool) or self._engine.dialect.is_async:
            return
        if self._leads_fork:
            self._close_writer()
        deadline = time.monotonic() + FORKED_WITHIN
        while pool.checkedout() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not pool.checkedout():
            pool.dispose()

    def after_fork_in_parent(self) -> None:
        super().after_fork_in_parent()
        self._opening.release()
        if self._leads_fork:
            self._group_commit.resume()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        pool = self._quiet.pool
        is_open = self._handles or (isinstance(pool, QueuePool) and _opened_by(pool))
        abandon((self._writer, pool))
        self._writer, self._handles, self._opening = None, set(), threading.Lock()
        self._group_commit = GroupCommit(self._transact, patience=self.config.retry_for)
        self._quiet.dispose(close=False)
        self._engine.pool = self._quiet.pool
        if self.in_memory:
            self._refuse("a database in memory is its process's own; open a store in this process")
        elif is_open:
            self._refuse(
                "this store was in use while its process forked, which SQLite does not survive; "
                "open one in this process"
            )

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def is_shared(self) -> bool:
        return not self.in_memory

    def _is_same_place(self, other: Database) -> bool:
        mine, theirs = self.url.database, other.url.database
        if not (self.is_shared and other.is_shared and mine and theirs):
            return False
        return Path(mine).resolve() == Path(theirs).resolve()

    def now(self) -> datetime:
        return (self.clock or SystemClock()).now()

    def _read(self, work: Work[T]) -> T:
        with self._engine.connect() as connection, connection.begin():
            return work(connection)

    def _write(self, work: Work[T], single: bool) -> T:
        if self._write_lock is None:
            return self._group_commit.submit(work)
        with self._write_lock, self._borrowed_transaction() as connection:
            return work(connection)

    def _write_alone(self, work: Work[T]) -> T:
        if self._write_lock is None:
            return self._group_commit.submit(work, alone=True)
        return self._write(work, False)

    def _transact(self, body: Body) -> None:
        """Run this in a transaction, and commit it: for one writer at a time."""
        if not self.owned:
            with self._engine.connect() as connection:
                connection.begin()
                _guarded(connection, self._begin_on_borrowed, body)
        elif self.in_memory:
            self._transact_in_memory(body)
        else:
            # Kept again only when it is clean: one whose cleaning was interrupted is not used any more.
            connection, self._writer = self._writing_connection(), None
            try:
                _guarded(connection, _begin_immediate, body)
            except BaseException:
                if not connection.invalidated and connection.get_transaction() is None:
                    self._writer = connection
                raise
            self._writer = connection

    def _transact_in_memory(self, body: Body) -> None:
        connection = self._quiet.connect()
        try:
            _guarded(connection, _begin_immediate, body)
            connection.close()  # the only connection there is: others may want to read
        except BaseException:
            connection.close()
            raise

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
        if self._writer is None or self._writer.invalidated:
            self._writer = self._quiet.connect()
        return self._writer

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
        return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

    def is_misplaced(self, error: BaseException) -> bool:
        return _code(error) == sqlite3.SQLITE_CANTOPEN

    def _named(self, error: Exception) -> Exception:
        if _code(error) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreDamaged(self.address, first_line(error))
        return super()._named(error)

    def verify_exclusive_access(self) -> None:
        """Raise `NotExclusive` if anyone else has the file open. Call it while this store is idle."""
        path = self._engine.url.database
        if path is None or self.in_memory:
            return
        if not self.owned:
            raise InvalidConfig("open the store by URL for this: an engine of yours stays open")
        self._close_writer()  # our own idle connections would be in the way
        self.wakeups.rest()
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


def _count_handles(engine: Engine, database: SqliteDatabase) -> None:
    """Know which connections are open, and open none while the process forks."""
    reference = weakref.ref(database)

    @event.listens_for(engine, "do_connect")
    def open_it(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
        found = reference()
        if found is None:
            return None
        with found._opening:
            connection = dialect.connect(*arguments, **options)
            found._handles.add(id(connection))
            return connection

    @event.listens_for(engine, "close")
    def closed(connection: Any, _record: Any) -> None:
        if found := reference():
            found._handles.discard(id(connection))


def _opened_by(pool: QueuePool) -> int:
    return pool.checkedin() + pool.checkedout()


def _begin_immediate(connection: Connection) -> None:
    """Begin on a connection of our own; by the driver, whose cursors take longer than that."""
    driver: Any = connection.connection.dbapi_connection
    try:
        driver.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as exc:
        raise wrapped(connection, exc, "BEGIN IMMEDIATE") from exc


def _guarded(connection: Connection, begin: Body, body: Body) -> None:
    """Run this in a transaction of the driver's, and commit it.

    The driver's own `with` commits or rolls back in C, and so without a gap: an exception from a
    signal handler leaves no transaction open, which would keep all other writers out. A commit that
    fails is rolled back.
    """
    driver: Any = connection.connection.driver_connection
    try:
        with driver:
            begin(connection)
            body(connection)
            if connection.in_transaction():  # SQLAlchemy noticed, so it must notice the end too
                connection.commit()
    except BaseException:
        # Also after a commit that failed: SQLAlchemy calls the transaction inactive then, and waits.
        if connection.get_transaction() is not None:
            connection.rollback()
        raise


def _code(error: BaseException) -> int | None:
    """SQLite's code for an error, without its details."""
    code = getattr(original_of(error), "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


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
        connect_args={"check_same_thread": False, "timeout": _busy_timeout(config)},
        **pool,
    )

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        _set_pragmas(connection, config, in_memory=in_memory)

    return engine


def _busy_timeout(config: Config) -> float:
    """Seconds that SQLite itself waits for a lock; no longer than a call may take."""
    return min(config.sqlite_busy_timeout, config.retry_for)


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
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise InvalidConfig(f"cannot create {path.parent}: {exc.strerror}") from exc
    if not path.parent.is_dir():
        raise InvalidConfig(f"cannot create {path}: there is no directory {path.parent}")
    _create_private(path)
    return path


def _create_private(path: Path) -> None:
    """Create a file that its owner alone can read. SQLite gives its log the same permissions. A file
    that exists keeps its own.
    """
    with suppress(OSError):  # SQLite says why it cannot open it
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))


def _set_pragmas(connection: sqlite3.Connection, config: Config, *, in_memory: bool) -> None:
    wanted: dict[str, Any] = {
        "busy_timeout": int(_busy_timeout(config) * 1000),
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
