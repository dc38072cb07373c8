"""PostgreSQL, through psycopg 3.

Most operations are one statement. Those run in AUTOCOMMIT: one round trip instead of three. When
the connection breaks in the middle of such a statement, or of a COMMIT, nobody can tell whether the
server finished it; that is `CommitUncertain`, never a silent retry. A connection that broke while
it lay idle in the pool (the server was restarted) is noticed before it is used, and replaced. One to
a server that has become read-only (another one took over) is dropped, and the call goes on elsewhere.

No statement waits for a lock longer than `retry_for`. On connections of our own that is set once. On
an application's, and behind a pooler that mixes sessions, it must not outlive what it was set for:
there every statement runs in a transaction, which begins with it.
"""

from __future__ import annotations

import hashlib
import math
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, QueuePool, RootTransaction, create_engine, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pgqrs.clock import Clock
from pgqrs.config import MAX_IDENTIFIER, Config, parse_dsn
from pgqrs.errors import CommitUncertain
from pgqrs.repositories import announcements
from pgqrs.repositories.announcements import Announced
from pgqrs.repositories.hot import commands
from pgqrs.sqltypes import json_from_bytes
from pgqrs.stores.base import Database, RowsLocked, T, Work, lock_timeout
from pgqrs.stores.forks import abandon, hang_up, opening, watch
from pgqrs.stores.notify import NotifySentry
from pgqrs.stores.pooler import PROCESS, is_pooled
from pgqrs.stores.wakeups import Wakeups
from pgqrs.types import ConcurrencyModel

LOCKED = "55P03"
"""A lock was not to be had within `lock_timeout`."""
TRANSIENT = frozenset(
    (
        "40001",  # serialization failure
        "40P01",  # deadlock detected
        "53300",  # too many connections
        LOCKED,
        "57P03",  # cannot connect now: starting up, shutting down, in recovery
    )
)
FAREWELL_SECONDS = 0.2
"""How long to wait for the end of a connection on which the server said something unasked."""
CONNECTION_ENDED = frozenset(("57P01", "57P02", "57P05"))
"""The server ended the session: administrator, crash of a sibling, idle too long."""
UNPREPARED = frozenset(("26000", "42P05"))
"""A prepared statement is missing, or there already: a pooler gave us somebody else's session."""
_BOUND = text("SELECT current_setting('lock_timeout'), set_config('lock_timeout', :value, true)")
READ_ONLY = "25006"
"""The server takes no writes: it is a standby, or was demoted in a failover."""


KEPT = 4
"""Connections kept at hand for single statements, at most; and one less than the pool has."""
SOME, LARGE = 8 * 1024, 4 * 1024 * 1024
"""Bytes: a piece, and of such pieces more than a server needs at once for a batch."""


class PostgresDatabase(Database):
    """A PostgreSQL server, for any number of processes and hosts."""

    backend_name = "postgres"
    concurrency_model = ConcurrencyModel.MULTI_PROCESS
    supports_schemas = True
    supports_skip_locked = True
    supports_server_time = True
    supports_async_engine = True
    supports_notify = True
    supports_copy = True

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        write_lock: AbstractContextManager[Any] | None = None,
        owned: bool | None = None,
    ) -> None:
        super().__init__(
            config,
            clock=clock,
            sleep=sleep,
            write_lock=write_lock,
            owned=engine is None if owned is None else owned,
        )
        if engine is None:
            engine = create_engine(
                config.url, poolclass=GenerousPool, **self.engine_options(config)
            )
        if config.schema is not None:
            engine = engine.execution_options(schema_translate_map={None: config.schema})
        self._single: Engine
        self._engine: Engine
        if self.owned:
            event.listen(engine, "connect", _greeting(self))
            event.listen(engine, "do_connect", _open)
            self._single = engine
            self._engine = engine.execution_options(isolation_level="READ COMMITTED")
        else:
            self._single = self._engine = engine
        self._preparing = True
        self._is_shared_session = not self.owned
        """True if what is set in a session would be met by somebody else."""
        in_threads = self.owned and sleep is time.sleep  # an event loop is not worth it
        self._most_kept = min(KEPT, config.pool_size - 1) if in_threads else 0
        self._kept: list[Connection] = []
        self._keeping = threading.Lock()
        if isinstance(engine.pool, GenerousPool):
            engine.pool.give_up = _weakly(self._give_up)
        self.wakeups = Wakeups(NotifySentry(self._connect_listener, self.channel))
        watch(self)

    @staticmethod
    def engine_options(config: Config) -> dict[str, Any]:
        """How an engine of our own is made."""
        return {
            # Switching to a transaction costs a little, and single statements are the hot path.
            "isolation_level": "AUTOCOMMIT",
            "pool_size": config.pool_size,
            "max_overflow": config.pool_size,
            "pool_timeout": config.retry_for,
            "use_native_hstore": False,
            "json_deserializer": json_from_bytes,
            "connect_args": {
                "prepare_threshold": config.prepare_threshold,
                "application_name": "pgqrs",
                "connect_timeout": max(2, min(10, math.ceil(config.retry_for))),
                # A peer that vanished without a word is noticed in about a minute.
                "keepalives_idle": 30,
                "keepalives_interval": 10,
                "keepalives_count": 3,
                "tcp_user_timeout": 60_000,
            },
        }

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        inherited, self._kept = self._kept, []
        self._keeping = threading.Lock()
        for connection in inherited:
            _hang_up(connection.connection.dbapi_connection)
        pool = self._single.pool
        for record in _idle(pool):
            _hang_up(record.dbapi_connection)
        abandon((inherited, pool))
        self._single.dispose(close=False)

    @property
    def engine(self) -> Engine:
        return self._engine

    def _is_same_place(self, other: Database) -> bool | None:
        mine, theirs = self.url, other.url
        if mine.database and theirs.database and mine.database != theirs.database:
            return False
        if mine.host and mine.database and self.address == other.address:
            return True
        return None  # one server has many names

    def now(self) -> datetime | None:
        return None if self.clock is None else self.clock.now()

    def _read(self, work: Work[T]) -> T:
        if self._is_shared_session:
            return self._run_bounded(work)
        with self._for_single() as connection:
            return work(connection)

    def _write(self, work: Work[T], single: bool) -> T:
        return self._write_single(work) if single else self._write_transaction(work)

    def _write_single(self, work: Work[T]) -> T:
        if self._is_shared_session:
            return self._run_bounded(work)
        connection = self._take()
        try:
            result = work(connection)
        except BaseException as exc:
            self._leave_if_read_only(connection, exc)
            connection.close()  # whatever state it is in, the pool resets it
            if isinstance(exc, DBAPIError):
                raise _uncertain_if_lost(exc) from exc
            raise
        self._put_back(connection)
        return result

    def _write_transaction(self, work: Work[T]) -> T:
        with self._connected(self._engine) as connection, self._begun(connection) as transaction:
            if self._is_shared_session:
                commands(connection, self._bound)
            result = work(connection)
            try:
                transaction.commit()
            except DBAPIError as exc:
                raise _uncertain_if_lost(exc) from exc
            return result

    def write_within(self, work: Work[T], *, wait: float, single: bool = False) -> T:
        def bounded(connection: Connection) -> T:
            commands(connection, f"SET LOCAL lock_timeout = {max(1, int(wait * 1000))}")
            with _telling_of_locks():
                return work(connection)

        return self.write(bounded, repeatable=True)

    def for_renewals(self) -> Database:
        if not self.owned:
            return self
        options = self.engine_options(self.config) | {"pool_size": 1, "max_overflow": 0}
        options["connect_args"]["application_name"] = "pgqrs-leases"
        engine = create_engine(self.config.url, poolclass=GenerousPool, **options)
        apart = PostgresDatabase(
            self.config.with_(pool_size=1), engine=engine, clock=self.clock, owned=True
        )
        try:
            apart.engine.connect().close()
        except Exception:
            apart.close()
            raise
        return apart

    @property
    def _bound(self) -> str:
        """The command that bounds how long the statements of a transaction wait for locks."""
        return f"SET LOCAL lock_timeout = {lock_timeout(self.config)}"

    def _run_bounded(self, work: Work[T]) -> T:
        """Run a single statement in a transaction of its own."""
        with self._connected(self._single) as connection, _in_autocommit(connection, True):
            commands(connection, "BEGIN ISOLATION LEVEL READ COMMITTED", self._bound)
            result = work(connection)
            try:
                commands(connection, "COMMIT")
            except DBAPIError as exc:
                raise _uncertain_if_lost(exc) from exc
            return result

    @contextmanager
    def bounding(self, connection: Connection) -> Iterator[None]:
        """Bound how long statements wait for locks inside an application's transaction, and leave no
        trace of it.
        """
        value = str(lock_timeout(self.config))
        (before, _) = connection.execute(_BOUND, {"value": value}).one()
        try:
            yield
        except Exception:
            with suppress(SQLAlchemyError):  # a transaction that failed ends, and the bound with it
                connection.execute(_BOUND, {"value": before}).close()
            raise
        connection.execute(_BOUND, {"value": before}).close()

    def is_transient(self, error: BaseException) -> bool:
        if not isinstance(error, DBAPIError):
            return False
        if _sqlstate(error) in UNPREPARED:
            return self._stop_preparing()
        return is_lost(error) or _sqlstate(error) in TRANSIENT or _sqlstate(error) == READ_ONLY

    def is_misplaced(self, error: BaseException) -> bool:
        if not isinstance(error, DBAPIError) or _sqlstate(error) is not None:
            return False  # failures to connect carry no code
        said = str(error.orig)
        return any(part in said for part in (*REFUSED, *UNRESOLVED))

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        super().ring(queue)
        if elsewhere:
            self._announce(
                lambda c: announcements.tell(c, queue, channel=self.channel, now=self.now())
            )

    def ring_at_commit(self, connection: Connection, queue: str) -> None:
        announcements.tell_at_commit(connection, queue, channel=self.channel)

    def expect(self, queue: str, *, seconds: float) -> Announced | None:
        if not self.wakeups.hears:
            return None
        return self._announce(
            lambda c: announcements.expect(c, queue, seconds=seconds, now=self.now())
        )

    def withdraw(self, queue: str, announced: Announced) -> None:
        self._announce(lambda c: announcements.withdraw(c, queue, announced))

    def ring_of_results(self, queue: str) -> None:
        super().ring_of_results(queue)
        self._announce(
            lambda c: announcements.tell_of_results(c, queue, channel=self.channel, now=self.now())
        )

    def expect_results(self, queue: str, *, seconds: float) -> Announced | None:
        if not self.wakeups.hears:
            return None
        return self._announce(
            lambda c: announcements.expect_results(c, queue, seconds=seconds, now=self.now())
        )

    def _announce(self, work: Work[T]) -> T | None:
        """None if a process that stands still keeps others from announcing anything: they go on."""

        def briefly(connection: Connection) -> T:
            with _telling_of_locks():
                return work(connection)

        try:
            return self.write(briefly, single=True, repeatable=True)
        except RowsLocked:
            return None

    @property
    def channel(self) -> str:
        return _channel_of(self.config.schema)

    def _connect_listener(self) -> psycopg.Connection:
        """A connection apart from the pool, to the same server."""
        direct = self.config.listen_dsn
        url = self._engine.url if direct is None else parse_dsn(direct)
        _, settings = self._engine.dialect.create_connect_args(url)
        with opening():
            return psycopg.connect(**settings, autocommit=True, application_name="pgqrs-listener")

    def _stop_preparing(self) -> bool:
        """Behind a pooler that mixes sessions prepared statements cannot work: do without.

        An application's own engine is left as it is.
        """
        self._preparing = False
        return self.owned

    @contextmanager
    def _for_single(self) -> Iterator[Connection]:
        """A connection in AUTOCOMMIT. A few are kept: going to the pool and back costs as much as
        half a statement.
        """
        connection = self._take()
        try:
            yield connection
        except BaseException as exc:
            self._leave_if_read_only(connection, exc)
            connection.close()  # whatever state it is in, the pool resets it
            raise
        self._put_back(connection)

    def _put_back(self, connection: Connection) -> None:
        if connection.in_transaction():  # in the eyes of SQLAlchemy; this asks the server nothing
            connection.commit()
        with self._keeping:
            kept = len(self._kept) < self._most_kept and not self.closed
            if kept:
                self._kept.append(connection)
        if not kept:
            connection.close()
        elif _is_dry(self._single.pool):  # somebody waits for one
            self._give_up()

    def _give_up(self) -> None:
        """Let the pool have a connection that was kept."""
        with suppress(IndexError):
            self._kept.pop().close()

    def _leave_if_read_only(self, connection: Connection, error: BaseException) -> None:
        """After a failover: this connection, and all that lie idle, lead to the wrong server."""
        if isinstance(error, DBAPIError) and _sqlstate(error) == READ_ONLY:
            connection.invalidate(error)
            if self.owned:
                while self._kept:
                    self._give_up()
                self._single.dispose()

    def _take(self) -> Connection:
        try:
            connection = self._kept.pop()
        except IndexError:
            return self._connect(self._single)
        if connection.invalidated or _ended_while_idle(connection.connection.dbapi_connection):
            connection.invalidate()
            connection.close()
            return self._connect(self._single)
        if not self._preparing:
            self._stop_preparing_on(connection)
        return connection

    @contextmanager
    def _connected(self, engine: Engine) -> Iterator[Connection]:
        with self._connect(engine) as connection:
            try:
                yield connection
            except DBAPIError as exc:
                self._leave_if_read_only(connection, exc)
                raise

    @contextmanager
    def _begun(self, connection: Connection) -> Iterator[RootTransaction]:
        """A transaction, also where an application's driver begins none."""
        if self.owned:
            with connection.begin() as transaction:
                yield transaction
        else:
            with _in_autocommit(connection, False), connection.begin() as transaction:
                yield transaction

    def _connect(self, engine: Engine) -> Connection:
        """A connection that was alive a moment ago."""
        while True:
            connection = engine.connect()
            if not _ended_while_idle(connection.connection.driver_connection):
                self._stop_preparing_on(connection)
                return connection
            connection.invalidate()
            connection.close()

    def _stop_preparing_on(self, connection: Connection) -> None:
        if self.owned and not self._preparing:
            driver: Any = connection.connection.driver_connection
            driver.prepare_threshold = None

    def close(self) -> None:
        while self._kept:
            self._kept.pop().close()
        super().close()


@contextmanager
def _telling_of_locks() -> Iterator[None]:
    """Raise `RowsLocked` for a lock that was not to be had in time: trying again is no use."""
    try:
        yield
    except DBAPIError as exc:
        if _sqlstate(exc) == LOCKED:
            raise RowsLocked from exc
        raise


def _channel_of(schema: str | None) -> str:
    """What is listened to. Names of channels end at 63 bytes, so a long schema is known by its hash."""
    channel = "pgqrs" if schema is None else f"pgqrs:{schema}"
    if len(channel.encode()) <= MAX_IDENTIFIER:
        return channel
    return f"pgqrs:{hashlib.sha256(channel.encode()).hexdigest()[:48]}"


def _idle(pool: Any) -> list[Any]:
    """What lies in a pool, for threads or for an event loop."""
    if not isinstance(pool, QueuePool):
        return []
    queue: Any = pool._pool
    return list(queue.queue if hasattr(queue, "queue") else queue._queue._queue)


def _open(dialect: Any, record: object, arguments: Any, settings: Any) -> Any:
    """Returns a new connection. The process does not fork while it is being opened."""
    with opening():
        return dialect.connect(*arguments, **settings)


def _hang_up(connection: Any) -> None:
    """Close our copy of a connection that another process goes on to use."""
    pgconn = getattr(getattr(connection, "driver_connection", connection), "pgconn", None)
    with suppress(psycopg.Error):
        if pgconn is not None:
            hang_up(pgconn.socket)


@contextmanager
def _in_autocommit(connection: Connection, wanted: bool) -> Iterator[None]:
    """Let the driver commit every statement, or none, and afterwards do as the application has it.

    By the driver's own switch: SQLAlchemy's would reset it to what SQLAlchemy takes for the default.
    """
    driver: Any = connection.connection.dbapi_connection
    before = driver.autocommit
    if before == wanted:
        yield
        return
    driver.autocommit = wanted
    try:
        yield
    finally:
        if not connection.invalidated:
            try:
                driver.rollback()  # of what failed; it must not be committed by the switch
                driver.autocommit = before
            except Exception as exc:  # it is of no more use
                connection.invalidate(exc)


class GenerousPool(QueuePool):
    """A pool that asks for what is kept, before it lets anybody wait."""

    give_up: Callable[[], object] = staticmethod(lambda: None)

    def _do_get(self) -> Any:
        if _is_dry(self):
            self.give_up()
        return super()._do_get()

    def recreate(self) -> GenerousPool:
        fresh = super().recreate()
        assert isinstance(fresh, GenerousPool)
        fresh.give_up = self.give_up
        return fresh


def _is_dry(pool: Any) -> bool:
    """True if whoever asks the pool next has to wait."""
    # In this order: as a rule the first, which takes no lock, says no.
    return bool(pool.overflow() >= pool._max_overflow and not pool.checkedin())


def _weakly(method: Callable[[], object]) -> Callable[[], object]:
    """Calls a method for as long as its object is there."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if found := reference():
            found()

    return call


def _greeting(database: PostgresDatabase) -> Callable[[Any, Any], None]:
    """What is done with every new connection of our own."""
    milliseconds, reference = lock_timeout(database.config), weakref.ref(database)

    def greet(connection: Any, _record: Any) -> None:
        if _greet(connection, milliseconds) and (found := reference()):
            found._is_shared_session = True

    return greet


def _greet(connection: Any, milliseconds: int) -> bool:
    """Returns True if there is a pooler between us and the server.

    Times in UTC: then those of the driver need no converting one by one. Text in UTF-8, whatever the
    database stores. Poolers know these settings and keep them to the client that made them.

    Always by index: a consumer that polls an empty queue has its statements planned for an empty table,
    and keeps those plans when a hundred thousand messages arrive, until statistics are gathered. And
    without compiling: servers before 18 take a scan they were told to avoid for an expensive one.

    And with some memory at hand: the C library of most servers gives large pieces back to the system
    at once, until it has seen a larger one come and go. Without that a sixth of the time of a large
    batch goes into taking the same memory again.
    """
    cursor = connection.cursor()
    cursor.execute(
        f"SELECT {PROCESS}, set_config('TimeZone', 'UTC', false), "
        "set_config('client_encoding', 'UTF8', false)"
    )
    driver = getattr(connection, "driver_connection", connection)
    pooled = is_pooled(driver, cursor.fetchone()[0])
    if pooled:
        driver.prepare_threshold = None
    else:
        cursor.execute(
            "SELECT set_config('enable_seqscan', 'off', false), set_config('jit', 'off', false), "
            f"set_config('lock_timeout', '{milliseconds}', false), "
            f"octet_length(repeat(repeat(' ', {SOME}), {LARGE // SOME}))"
        )
    cursor.close()
    return pooled


def _ended_while_idle(driver: Any) -> bool:
    pgconn = getattr(driver, "pgconn", None)
    if pgconn is None:
        return False
    try:
        if not _has_news(pgconn.socket, 0.0):
            return False  # nearly always
        pgconn.consume_input()
        # A farewell of the server, most likely: the end of the stream comes after it, a moment later.
        if _has_news(pgconn.socket, FAREWELL_SECONDS):
            pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return False


def _has_news(socket: int, seconds: float) -> bool:
    """True if something can be read from the socket, or can within so many seconds."""
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([socket], [], [], seconds)[0])
    poller = select.poll()
    poller.register(socket, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


REFUSED = (
    "password authentication failed",
    "no pg_hba.conf entry",
    "does not exist",
    "permission denied",
)
"""Failures to connect carry no code; these will not pass by waiting."""
UNRESOLVED = (
    "failed to resolve host",
    "could not translate host name",
    # As the system says it, which older drivers pass on.
    "Name or service not known",
    "nodename nor servname provided",
    "getaddrinfo failed",
)
"""These may pass, but are more often a wrong address."""


def is_lost(error: DBAPIError) -> bool:
    """Whether the connection is gone. After `kill -9` of a backend there is not even a code."""
    code = _sqlstate(error)
    if error.connection_invalidated or code in CONNECTION_ENDED:
        return True
    if code is None:
        refused = any(part in str(error.orig) for part in REFUSED)
        return isinstance(error.orig, psycopg.OperationalError | OSError) and not refused
    return code.startswith("08")


def _uncertain_if_lost(error: DBAPIError) -> Exception:
    if not is_lost(error):
        return error
    return CommitUncertain(
        "the connection broke while a change was being committed; it may or may not be stored"
    )


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
