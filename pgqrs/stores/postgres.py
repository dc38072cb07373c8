"""PostgreSQL, through psycopg 3.

Most operations are one statement. Those run in AUTOCOMMIT: one round trip instead of three. When
the connection breaks in the middle of such a statement, or of a COMMIT, nobody can tell whether the
server finished it; that is `CommitUncertain`, never a silent retry. A connection that broke while
it lay idle in the pool (the server was restarted) is noticed before it is used, and replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from pgqrs.clock import Clock
from pgqrs.config import Config, parse_dsn
from pgqrs.errors import CommitUncertain
from pgqrs.repositories import queues
from pgqrs.sqltypes import json_from_bytes
from pgqrs.stores.base import Database, T, Work
from pgqrs.stores.notify import NotifySentry
from pgqrs.stores.pooler import PROCESS, is_pooled
from pgqrs.stores.wakeups import RESULTS, Wakeups
from pgqrs.types import ConcurrencyModel

TRANSIENT = frozenset(
    (
        "40001",  # serialization failure
        "40P01",  # deadlock detected
        "53300",  # too many connections
        "57P03",  # cannot connect now: starting up, shutting down, in recovery
    )
)
CONNECTION_ENDED = frozenset(("57P01", "57P02", "57P05"))
"""The server ended the session: administrator, crash of a sibling, idle too long."""
UNPREPARED = frozenset(("26000", "42P05"))
"""A prepared statement is missing, or there already: a pooler gave us somebody else's session."""


KEPT = 4
"""Connections kept at hand for single statements."""
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
            engine = create_engine(config.url, **self.engine_options(config))
        if config.schema is not None:
            engine = engine.execution_options(schema_translate_map={None: config.schema})
        self._single: Engine
        self._engine: Engine
        if self.owned:
            event.listen(engine, "connect", _greet)
            self._single = engine
            self._engine = engine.execution_options(isolation_level="READ COMMITTED")
        else:
            self._single = engine.execution_options(isolation_level="AUTOCOMMIT")
            self._engine = engine
        self._preparing = True
        self._keeps = self.owned and sleep is time.sleep  # not in an event loop
        self._kept: list[Connection] = []
        self.wakeups = Wakeups(NotifySentry(self._connect_listener, self._channel))

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
                "connect_timeout": 10,
                "keepalives_idle": 30,
            },
        }

    @property
    def engine(self) -> Engine:
        return self._engine

    def now(self) -> datetime | None:
        return None if self.clock is None else self.clock.now()

    def _read(self, work: Work[T]) -> T:
        with self._for_single() as connection:
            return work(connection)

    def _write(self, work: Work[T], single: bool) -> T:
        return self._write_single(work) if single else self._write_transaction(work)

    def _write_single(self, work: Work[T]) -> T:
        with self._for_single() as connection:
            try:
                return work(connection)
            except DBAPIError as exc:
                raise _uncertain_if_lost(exc) from exc

    def _write_transaction(self, work: Work[T]) -> T:
        with self._connected(self._engine) as connection, connection.begin() as transaction:
            result = work(connection)
            try:
                transaction.commit()
            except DBAPIError as exc:
                raise _uncertain_if_lost(exc) from exc
            return result

    def is_transient(self, error: BaseException) -> bool:
        if not isinstance(error, DBAPIError):
            return False
        if _sqlstate(error) in UNPREPARED:
            return self._stop_preparing()
        return is_lost(error) or _sqlstate(error) in TRANSIENT

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        super().ring(queue)
        if elsewhere:
            now = self.now()
            self.write(
                lambda c: queues.tell(c, queue, channel=self._channel, now=now),
                single=True,
                repeatable=True,
            )

    def ring_at_commit(self, connection: Connection, queue: str) -> None:
        queues.tell_at_commit(connection, queue, channel=self._channel)

    def expect(self, queue: str, *, seconds: float) -> bool:
        if not self.wakeups.hears:
            return False
        now = self.now()
        self.write(
            lambda c: queues.expect(c, queue, seconds=seconds, now=now),
            single=True,
            repeatable=True,
        )
        return True

    def ring_of_results(self, queue: str) -> None:
        super().ring_of_results(queue)
        now = self.now()
        self.write(
            lambda c: queues.tell_of_results(
                c, queue, channel=self._channel, payload=RESULTS, now=now
            ),
            single=True,
            repeatable=True,
        )

    def expect_results(self, queue: str, *, seconds: float) -> bool:
        if not self.wakeups.hears:
            return False
        now = self.now()
        self.write(
            lambda c: queues.expect_results(c, queue, seconds=seconds, now=now),
            single=True,
            repeatable=True,
        )
        return True

    @property
    def _channel(self) -> str:
        return "pgqrs" if self.config.schema is None else f"pgqrs:{self.config.schema}"[:63]

    def _connect_listener(self) -> psycopg.Connection:
        """A connection apart from the pool, to the same server."""
        direct = self.config.listen_dsn
        url = self._engine.url if direct is None else parse_dsn(direct)
        _, settings = self._engine.dialect.create_connect_args(url)
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
        except BaseException:
            connection.close()  # whatever state it is in, the pool resets it
            raise
        if connection.in_transaction():  # in the eyes of SQLAlchemy; this asks the server nothing
            connection.commit()
        if self._keeps and len(self._kept) < KEPT and not self.closed:
            self._kept.append(connection)
        else:
            connection.close()

    def _take(self) -> Connection:
        try:
            connection = self._kept.pop()
        except IndexError:
            return self._connect(self._single)
        if connection.invalidated or _ended_while_idle(connection.connection.driver_connection):
            connection.invalidate()
            connection.close()
            return self._connect(self._single)
        self._stop_preparing_on(connection)
        return connection

    @contextmanager
    def _connected(self, engine: Engine) -> Iterator[Connection]:
        with self._connect(engine) as connection:
            yield connection

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


def _greet(connection: Any, _record: Any) -> None:
    """Times in UTC: then those of the driver need no converting one by one. Text in UTF-8, whatever the
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
    if is_pooled(driver, cursor.fetchone()[0]):
        driver.prepare_threshold = None
    else:
        cursor.execute(
            "SELECT set_config('enable_seqscan', 'off', false), set_config('jit', 'off', false), "
            f"octet_length(repeat(repeat(' ', {SOME}), {LARGE // SOME}))"
        )
    cursor.close()


def _ended_while_idle(driver: Any) -> bool:
    pgconn = getattr(driver, "pgconn", None)
    if pgconn is None:
        return False
    try:
        # Two non-blocking reads: the server's farewell message first, then the end of the stream.
        pgconn.consume_input()
        pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return False


REFUSED = (
    "password authentication failed",
    "no pg_hba.conf entry",
    "does not exist",
    "permission denied",
)
"""Failures to connect carry no code; these will not pass by waiting."""


def is_lost(error: DBAPIError) -> bool:
    """Whether the connection is gone. After `kill -9` of a backend there is not even a code."""
    code = _sqlstate(error)
    if error.connection_invalidated or code in CONNECTION_ENDED:
        return True
    if code is None:
        refused = any(text in str(error.orig) for text in REFUSED)
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
