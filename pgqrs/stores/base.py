"""What every database offers: `read(work)` and `write(work)`, and nothing else.

A *work* is a function over a `Connection`, run in one transaction. It may be run again after a
transient error, so it holds no user code and no I/O of its own. Retrying lives here, once. What is
transient, and when a commit may have been lost, each database knows for itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from pgqrs import schema
from pgqrs.clock import Clock
from pgqrs.config import Config
from pgqrs.drivers import join_transaction
from pgqrs.errors import (
    CommitUncertain,
    ConflictError,
    SchemaNotInstalled,
    StoreClosed,
    StoreUnavailable,
    UpgradeRequired,
)
from pgqrs.stores.wakeups import RESULTS, Wakeups
from pgqrs.types import ConcurrencyModel, S3State, S3Stats

if TYPE_CHECKING:
    from pgqrs.stores.results import ResultWatch

T = TypeVar("T")
Work = Callable[[Connection], T]


class Remote(Protocol):
    """What a database offers that is only a copy of something elsewhere."""

    def pull(self) -> bool: ...

    def submit(self, operations: Iterable[Work[Any]]) -> int: ...

    def flush(self) -> list[Any]: ...

    def state(self) -> S3State: ...

    def stats(self) -> S3Stats: ...

    def snapshot(self, path: Path) -> None: ...


class Database(ABC):
    """A database that pgqrs lives in."""

    backend_name: ClassVar[str]
    concurrency_model: ClassVar[ConcurrencyModel]
    supports_schemas: ClassVar[bool] = False
    """Whether `Config.schema` can name where the tables live."""
    supports_skip_locked: ClassVar[bool] = False
    """Whether consumers claim side by side instead of one after the other."""
    supports_async_engine: ClassVar[bool] = False
    """Whether async access is best through an `AsyncEngine`, and not through threads."""
    supports_notify: ClassVar[bool] = False
    """Whether the database itself tells other processes of a new message."""
    supports_copy: ClassVar[bool] = False
    """Whether rows can be streamed into a table as text, past the statements."""
    bridge_threads: ClassVar[int] = 32
    """How many threads async access takes at most, where it is through threads."""
    supports_server_time: ClassVar[bool] = False
    """Whether the database tells the time, so that `now` may be None."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        owned: bool = True,
        sleep: Callable[[float], None] = time.sleep,
        write_lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`sleep` and `write_lock` say how to wait where a thread may not: in an event loop."""
        self.config = config
        self.clock = clock
        self.owned = owned
        self._sleep = sleep
        self._write_lock = write_lock
        self._schema_is_there = False
        self.closed = False
        self.wakeups = Wakeups()
        self.limited: set[str] = set()
        """Queues that were found to have limits: what ends there makes room for others."""
        self.result_watch: ResultWatch | None = None

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine for an application that wants its own rows in the same transaction."""

    @property
    def is_shared(self) -> bool:
        """Whether it can be opened once more by its URL."""
        return True

    @property
    def remote(self) -> Remote | None:
        """The object in a bucket, if this database is a copy of one."""
        return None

    @property
    def url(self) -> URL:
        """What the store is on, to be shown."""
        return self.engine.url

    @abstractmethod
    def now(self) -> datetime | None:
        """The time for a work; None if the database tells it."""

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        """Wake who waits for this queue, in this process and, if need be, elsewhere."""
        self.wakeups.ring(queue)

    def ring_at_commit(self, connection: Connection, queue: str) -> None:
        """Wake who waits elsewhere when the transaction of this connection is committed."""
        return

    def expect(self, queue: str, *, seconds: float) -> bool:
        """Somebody waits for this queue. Whether to look again: producers had to be told so first."""
        return False

    def ring_of_results(self, queue: str) -> None:
        """Wake who waits for what becomes of messages of this queue, here and elsewhere."""
        self.wakeups.ring(RESULTS)

    def expect_results(self, queue: str, *, seconds: float) -> bool:
        """Somebody waits for results. Whether to look again: workers had to be told so first."""
        return False

    def read(self, work: Work[T], *, needs_schema: bool = True) -> T:
        """Run a work that changes nothing."""
        self._check(needs_schema)
        return self._persist(lambda: self._read(work), repeatable=True)

    def write(
        self,
        work: Work[T],
        *,
        single: bool = False,
        repeatable: bool = False,
        needs_schema: bool = True,
        probe: bool = False,
    ) -> T:
        """Run a work and commit it.

        `single` promises that the work is one statement, which may then commit itself. `repeatable`
        promises that the work may be run again even after it was committed. `probe` says that it
        often finds nothing to do: where writing is dear, that is found out first.
        """
        self._check(needs_schema)
        return self._persist(lambda: self._write(work, single), repeatable=repeatable)

    def write_once(self, work: Work[T]) -> T:
        """Run a work that holds an application's code, in a transaction of its own.

        Once it has begun it is not run again, whatever happens; and no work of others shares its
        transaction.
        """
        self._check(needs_schema=True)
        begun = False

        def first(connection: Connection) -> T:
            nonlocal begun
            begun = True
            return work(connection)

        return self._persist(
            lambda: self._write_alone(first), repeatable=False, while_=lambda: not begun
        )

    def open(self) -> None:
        """Refuse a database with a history this pgqrs does not know; migrate it if allowed to.

        One that cannot be reached just now may still be opened: then the first use looks.
        """
        try:
            self._read(schema.verify)
            self._schema_is_there = True
        except (SchemaNotInstalled, UpgradeRequired) as exc:
            if self.config.upgrade:
                self.install()
            elif isinstance(exc, UpgradeRequired):
                raise
        except Exception as exc:
            if not self.is_transient(exc):
                raise

    def install(self) -> None:
        """Create or upgrade the tables."""
        self.write(
            lambda connection: schema.upgrade(connection, schema=self.config.schema),
            repeatable=True,
            needs_schema=False,
        )
        self._schema_is_there = True

    def verify(self) -> None:
        """Raise the error that says how the tables differ from what this pgqrs needs."""
        self.read(schema.verify, needs_schema=False)

    def verify_exclusive_access(self) -> None:
        """Raise `NotExclusive` if a database made for one process is open in another."""
        return

    def close(self) -> None:
        """Let go of the connections, unless the engine is the application's own."""
        self.closed = True
        self.wakeups.close()
        if self.owned:
            self.engine.dispose()

    @abstractmethod
    def _read(self, work: Work[T]) -> T: ...

    @abstractmethod
    def _write(self, work: Work[T], single: bool) -> T: ...

    def _write_alone(self, work: Work[T]) -> T:
        """Write, and share the transaction with nobody."""
        return self._write(work, False)

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether trying again may help, and nothing was committed."""

    def _check(self, needs_schema: bool) -> None:
        if self.closed:
            raise StoreClosed
        if needs_schema and not self._schema_is_there:
            self._find_schema()

    def _find_schema(self) -> None:
        try:
            self.verify()
            self._schema_is_there = True
        except (SchemaNotInstalled, UpgradeRequired):
            if not self.config.upgrade:
                raise
            self.install()

    def _persist(
        self,
        attempt: Callable[[], T],
        *,
        repeatable: bool,
        while_: Callable[[], bool] = lambda: True,
    ) -> T:
        """Try once; only if that fails for a passing reason, set up to try for a while."""

        def may_retry(error: BaseException) -> bool:
            if not while_():
                return False
            if isinstance(error, CommitUncertain):
                return repeatable
            return self.is_transient(error) or (repeatable and isinstance(error, ConflictError))

        try:
            return attempt()
        except PoolTimeout as exc:
            raise StoreUnavailable(
                "all connections of the pool stayed in use; raise pool_size, or hold them shorter"
            ) from exc
        except Exception as exc:
            if not may_retry(exc):
                raise
        try:
            return Retrying(
                retry=retry_if_exception(may_retry),
                stop=stop_after_delay(self.config.retry_for),
                wait=wait_random_exponential(multiplier=0.02, max=1.0),
                sleep=self._sleep,
                reraise=True,
            )(attempt)
        except (CommitUncertain, ConflictError):
            raise
        except Exception as exc:
            if not self.is_transient(exc):
                raise
            raise StoreUnavailable(
                f"gave up after {self.config.retry_for:g} s: {_first_line(exc)}"
            ) from exc


def _first_line(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


class BorrowedConnection(Database):
    """A connection inside a transaction of the application's own: works run there, and nothing is
    committed.

    Nothing is retried either, since what failed is the application's whole transaction.
    """

    def __init__(self, database: Database, connection: Connection) -> None:
        super().__init__(database.config, clock=database.clock, owned=False)
        self._database = database
        self._connection = connection
        self.limited = database.limited

    @property
    def engine(self) -> Engine:
        return self._connection.engine

    def now(self) -> datetime | None:
        return self._database.now()

    def is_transient(self, error: BaseException) -> bool:
        return False

    def _check(self, needs_schema: bool) -> None:
        # On the borrowed connection: the pool may have no other to give.
        if needs_schema and not self._database._schema_is_there:
            self._read(schema.verify)
            self._database._schema_is_there = True

    def _read(self, work: Work[T]) -> T:
        with schema.in_schema(self._connection, self.config.schema):
            return work(self._connection)

    def _write(self, work: Work[T], single: bool) -> T:
        join_transaction(self._connection)
        return self._read(work)

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        # Only with the commit, and who will wait then is not known yet.
        self._read(lambda connection: self._database.ring_at_commit(connection, queue))

    def ring_of_results(self, queue: str) -> None:
        self._read(lambda connection: self._database.ring_at_commit(connection, RESULTS))
