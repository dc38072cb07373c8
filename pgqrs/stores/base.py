"""What every database offers: `read(work)` and `write(work)`, and nothing else.

A *work* is a function over a `Connection`, run in one transaction. It may be run again after a
transient error, so it holds no user code and no I/O of its own. Retrying lives here, once. What is
transient, and when a commit may have been lost, each database knows for itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import Retrying, retry_if_exception, wait_random_exponential

from pgqrs import schema
from pgqrs.clock import Clock
from pgqrs.config import Config, address_of
from pgqrs.drivers import join_transaction
from pgqrs.errors import (
    CommitUncertain,
    ConflictError,
    InvalidConfig,
    NotSupported,
    PgqrsError,
    SchemaNotInstalled,
    SeveralShards,
    StoreClosed,
    StoreUnavailable,
    UpgradeRequired,
)
from pgqrs.repositories.announcements import Announced
from pgqrs.stores.failures import first_line, is_of_a_driver, statement_failed
from pgqrs.stores.forks import Forking
from pgqrs.stores.wakeups import RESULTS, Wakeups
from pgqrs.types import ConcurrencyModel, S3State, S3Stats, S3Version

if TYPE_CHECKING:
    from pgqrs.stores.results import ResultWatch

T = TypeVar("T")
Work = Callable[[Connection], T]


class RowsLocked(PgqrsError):
    """A row of a message is locked, by a transaction of somebody else. Never reaches an application."""

    def __init__(self) -> None:
        super().__init__("the row of a message is locked by another transaction")


class Remote(Protocol):
    """What a database offers that is only a copy of something elsewhere."""

    def pull(self) -> bool: ...

    def submit(self, operations: Iterable[Work[Any]]) -> int: ...

    def flush(self) -> list[Any]: ...

    def state(self) -> S3State: ...

    def stats(self) -> S3Stats: ...

    def snapshot(self, path: Path) -> None: ...

    def versions(self, limit: int) -> list[S3Version]: ...

    def restore(self, version: str) -> None: ...


class Database(Forking, ABC):
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
    uploads_every_write: ClassVar[bool] = False
    """Whether each write costs an upload of everything, so that a few large ones are better."""
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
        self._store_id: str | None = None
        self.closed = False
        self._refusal: str | None = None
        self.wakeups = Wakeups()
        self.limited: set[str] = set()
        """Queues that were found to have limits: what ends there makes room for others."""
        self.result_watch: ResultWatch | None = None

    @classmethod
    def kind_for(cls, config: Config) -> type[Database]:
        """The class for this configuration: this one, or one of several databases of this kind."""
        return cls

    # When the process forks: see `forks`

    def before_fork(self) -> None:
        self.wakeups.before_fork()

    def after_fork_in_parent(self) -> None:
        self.wakeups.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        self.wakeups.after_fork_in_child()
        self.result_watch = None
        if isinstance(self._write_lock, Forking):
            self._write_lock.after_fork_in_child()

    def _refuse(self, why: str) -> None:
        """Be of no use in this process."""
        self.closed, self._refusal = True, why

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

    @property
    def address(self) -> str:
        """Where the database is, without user and password."""
        return address_of(self.url)

    @abstractmethod
    def now(self) -> datetime | None:
        """The time for a work; None if the database tells it."""

    @property
    def channel(self) -> str | None:
        """Where statements tell those who wait in other processes; None if that needs no telling."""
        return None

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        """Wake who waits for this queue, in this process and, if need be, elsewhere."""
        self.wakeups.ring(queue)

    def ring_at_commit(self, connection: Connection, queue: str) -> None:
        """Wake who waits elsewhere when the transaction of this connection is committed."""
        return

    def savepoint(self) -> AbstractContextManager[None]:
        """Inside an application's transaction: what this block did is undone if it raises."""
        return nullcontext()

    def tolerating(self, seconds: float) -> AbstractContextManager[None]:
        """In this block what was read so many seconds ago counts as current, where reading afresh costs
        a request. For whoever looks again and again.
        """
        return nullcontext()

    def bounding(self, connection: Connection) -> AbstractContextManager[None]:
        """Bound how long statements inside an application's transaction wait for locks."""
        return nullcontext()

    def expect(self, queue: str, *, seconds: float) -> Announced | None:
        """A consumer waits for this queue, and producers elsewhere should ring. None where they need not
        be told. If it is news to them, look again, at once and soon after.
        """
        return None

    def withdraw(self, queue: str, announced: Announced) -> None:
        """The consumer waits no more."""
        return

    def ring_of_results(self, queue: str) -> None:
        """Wake those who wait for what becomes of messages of this queue, here and elsewhere."""
        self.wakeups.ring(RESULTS)

    def expect_results(self, queue: str, *, seconds: float) -> Announced | None:
        """A process waits for results, and workers elsewhere should ring. As `expect`."""
        return None

    def for_renewals(self) -> Database:
        """A way to the database that waits for no connection of others, opened and connected; this one
        itself if there are no connections to wait for, or if they are the application's.
        """
        return self

    @property
    def lasting(self) -> Database:
        """The database for what outlives a transaction."""
        return self

    @property
    def origin(self) -> Database:
        """The database itself, where this one passes calls on to it."""
        return self

    # Where things are, in a store of several databases: see `placement`

    @property
    def shards(self) -> Sequence[Database]:
        """The databases of the store: one, but in a store of several shards."""
        return (self,)

    @property
    def is_sharded(self) -> bool:
        """True for the database of a store of several shards, and for each of the shards."""
        return False

    @property
    def whole(self) -> Database:
        """The database of the whole store, if this one is a shard of it."""
        return self

    def of_queue(self, name: str) -> Database:
        """The database that a queue is in."""
        return self

    def of_run(self, id: int) -> Database:
        """The database that a run is in."""
        return self

    def of_message(self, id: int) -> Database:
        """The database that a message is in, or was before it was finished."""
        return self

    def of_worker(self, id: int) -> Database:
        """The database that a worker is registered in."""
        return self

    def is_of_another_shard(self, id: int) -> bool:
        """True if another shard of the store has given this id."""
        return False

    def of_connection(self, connection: Connection) -> Database:
        """The database that a connection of an application is to."""
        return self

    def move_above(self, id: int) -> None:
        """Of a shard: give only ids above this one."""
        raise NotSupported("move_above", self.backend_name)

    def where(self, look: Work[bool]) -> Database:
        """The database of the store in which this is true; any, if there is none."""
        for shard in self.shards[:-1]:
            if shard.read(look):
                return shard
        return self.shards[-1]

    def is_same_store(self, other: Database) -> bool | None:
        """True if the other is on the same tables, however it was opened; None if their URLs do not
        tell, and only the `store_id` does.
        """
        mine, theirs = self.origin.whole, other.origin.whole
        if mine is theirs:
            return True
        if len(mine.shards) != len(theirs.shards):
            return False
        if mine.shards[0].engine is theirs.shards[0].engine:
            return mine.config.schema == theirs.config.schema
        if mine.backend_name != theirs.backend_name or mine.config.schema != theirs.config.schema:
            return False
        return mine._is_same_place(theirs)

    def _is_same_place(self, other: Database) -> bool | None:
        return self.address == other.address

    @property
    def store_id(self) -> str:
        """What tells this store from others, however it was opened."""
        if self._store_id is None:
            self._store_id = self.read(schema.store_id)
        return self._store_id

    def forget_store_id(self) -> None:
        """Ask for it again: it is about to become that of another store."""
        self._store_id = None

    def read(self, work: Work[T], *, needs_schema: bool = True) -> T:
        """Run a work that changes nothing."""
        self._check(needs_schema)
        return self._persist(lambda: self._read(work), repeatable=True)

    def read_for_application(self, work: Work[T]) -> T:
        """Run an application's work that changes nothing. Errors that it raises stay as they are."""
        raised: list[Exception] = []
        self._check(needs_schema=True)
        noted = _noting(work, raised)
        return self._persist(lambda: self._read(noted), repeatable=True, raised=raised)

    def write_for_application(self, work: Work[T]) -> T:
        """Run an application's work and commit it. Errors that it raises stay as they are."""
        raised: list[Exception] = []
        self._check(needs_schema=True)
        noted = _noting(work, raised)
        return self._persist(lambda: self._write(noted, False), repeatable=False, raised=raised)

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
        began = time.monotonic()
        try:
            return self._write(work, single)
        except Exception as exc:
            attempt = partial(self._write, work, single)
            return self._go_on(attempt, exc, began=began, repeatable=repeatable)

    def write_in_batches(
        self,
        batch: Callable[[Connection, int], tuple[T, int | None]],
        *,
        after: int = 0,
        repeatable: bool = False,
    ) -> list[T]:
        """Run a batch again and again until none is left. Returns what the batches returned.

        A batch is given where to go on after, and returns where the next one does: None if there is
        none. Each has a transaction of its own; where each write is an upload, all share one.
        """
        outcomes: list[T] = []
        last: int | None = after
        while last is not None:
            done, last = self.write(partial(self._batches, batch, last), repeatable=repeatable)
            outcomes += done
        return outcomes

    def _batches(
        self,
        batch: Callable[[Connection, int], tuple[T, int | None]],
        after: int,
        connection: Connection,
    ) -> tuple[list[T], int | None]:
        outcome, last = batch(connection, after)
        outcomes = [outcome]
        while last is not None and self.uploads_every_write:
            outcome, last = batch(connection, last)
            outcomes.append(outcome)
        return outcomes, last

    def write_within(self, work: Work[T], *, wait: float, single: bool = False) -> T:
        """Run a work that may be run again, and commit it. `RowsLocked` if it waits longer than so many
        seconds for a row that somebody has locked.
        """
        return self.write(work, single=single, repeatable=True)

    def write_once(self, work: Work[T], *, again: bool = False) -> T:
        """Run a work that holds an application's code, in a transaction of its own.

        Once it has begun it is not run again, whatever happens; and no work of others shares its
        transaction. With `again` it is begun again if its transaction was undone for a passing reason (a
        deadlock, a lost connection), which the work raised, or what it raised has as its cause.
        """
        self._check(needs_schema=True)
        begun, raised = False, list[Exception]()
        noted = _noting(work, raised)

        def first(connection: Connection) -> T:
            nonlocal begun
            begun = True
            try:
                return noted(connection)
            except Exception as exc:
                if again and (passing := self._passing(exc)) is not None:
                    raise passing from None
                raise

        return self._persist(
            lambda: self._write_alone(first),
            repeatable=False,
            while_=lambda: again or not begun,
            raised=raised,
        )

    def _passing(self, error: Exception) -> Exception | None:
        """The passing reason for which a work failed, if that is why."""
        for each in (error, error.__cause__):
            if isinstance(each, Exception) and self.is_transient(each):
                return each
        return None

    def open(self) -> None:
        """Refuse a database with a history this pgqrs does not know; migrate it if allowed to.

        One that does not answer just now may still be opened: then the first use looks. One that is
        not there at all (no such database, no such host, no such user) is refused.
        """
        try:
            self._read(self._check_schema)
            self._schema_is_there = True
        except (SchemaNotInstalled, UpgradeRequired) as exc:
            if self.config.upgrade:
                self.install()
            elif isinstance(exc, UpgradeRequired):
                raise
        except Exception as exc:
            if self.is_misplaced(exc):
                raise StoreUnavailable(first_line(exc), address=self.address) from exc
            if not self.is_transient(exc):
                self._raise(exc)

    def install(self) -> None:
        """Create or upgrade the tables."""
        self.write(self._install, repeatable=True, needs_schema=False)
        self._schema_is_there = True

    def _install(self, connection: Connection) -> None:
        schema.upgrade(connection, schema=self.config.schema)

    def _check_schema(self, connection: Connection) -> None:
        """Raise if this is not what this pgqrs works with."""
        schema.check(connection)

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

    def is_misplaced(self, error: BaseException) -> bool:
        """True if there is no such database: waiting does not help, another URL does."""
        return False

    def _check(self, needs_schema: bool) -> None:
        if self.closed:
            raise StoreClosed if self._refusal is None else InvalidConfig(self._refusal)
        if needs_schema and not self._schema_is_there:
            self._find_schema()

    def _find_schema(self) -> None:
        try:
            self.read(self._check_schema, needs_schema=False)
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
        raised: Sequence[Exception] = (),
    ) -> T:
        """Try once; only if that fails for a passing reason, set up to try for a while.

        All of it together takes `retry_for`. `raised` are errors of an application's own.
        """
        began = time.monotonic()
        try:
            return attempt()
        except Exception as exc:
            return self._go_on(
                attempt, exc, began=began, repeatable=repeatable, while_=while_, raised=raised
            )

    def _go_on(
        self,
        attempt: Callable[[], T],
        error: Exception,
        *,
        began: float,
        repeatable: bool,
        while_: Callable[[], bool] = lambda: True,
        raised: Sequence[Exception] = (),
    ) -> T:
        """The first attempt raised this: try for a while, if the reason is a passing one."""

        def may_retry(error: BaseException) -> bool:
            if not while_():
                return False
            if isinstance(error, CommitUncertain):
                return repeatable
            return self.is_transient(error) or (repeatable and isinstance(error, ConflictError))

        if not may_retry(error):
            self._raise(error, raised)
        try:
            return Retrying(
                retry=retry_if_exception(may_retry),
                stop=lambda _: time.monotonic() - began >= self.config.retry_for,
                wait=wait_random_exponential(multiplier=0.02, max=1.0),
                sleep=self._sleep,
                reraise=True,
            )(attempt)
        except Exception as exc:
            self._raise(exc, raised)

    def _raise(self, error: Exception, raised: Sequence[Exception] = ()) -> NoReturn:
        """Raise our error for this one, or the application's as it is."""
        for own in raised:
            if own is error or own is error.__cause__:
                raise own
        named = self._named(error)
        if named is error:
            raise error
        if isinstance(error, StatementError):
            error.hide_parameters = True  # tracebacks must not show payloads
        raise named from error

    def _named(self, error: Exception) -> Exception:
        if isinstance(error, PoolTimeout):
            return StoreUnavailable(
                "all connections of the pool stayed in use; raise pool_size, or hold them shorter"
            )
        if isinstance(error, CommitUncertain | ConflictError):
            return error
        if self.is_misplaced(error):
            return StoreUnavailable(first_line(error), address=self.address)
        if self.is_transient(error):
            return StoreUnavailable(
                f"gave up after {self.config.retry_for:g} s: {first_line(error)}",
                address=self.address,
            )
        if is_of_a_driver(error) and not isinstance(error, PgqrsError):
            return statement_failed(error)
        return error


def lock_timeout(config: Config) -> int:
    """Milliseconds that a statement waits for a lock at most; 0 would be for ever."""
    return max(1, min(2**31 - 1, int(config.retry_for * 1000)))


def _noting(work: Work[T], raised: list[Exception]) -> Work[T]:
    """The work, and a note of what it raises."""

    def noted(connection: Connection) -> T:
        try:
            return work(connection)
        except Exception as exc:
            raised.append(exc)
            raise

    return noted


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
    def lasting(self) -> Database:
        return self._database

    @property
    def origin(self) -> Database:
        return self._database.origin

    def of_queue(self, name: str) -> Database:
        if self._database.of_queue(name) is not self._database:
            raise SeveralShards(
                "using",
                f"queue {name!r} is on another shard than this connection; open the transaction on "
                f"store.shard({name!r}), or place queues together, with shard_by=group",
            )
        return self

    @property
    def is_sharded(self) -> bool:
        return self._database.is_sharded

    def of_run(self, id: int) -> Database:
        return self._same(self._database.of_run(id), f"run {id}")

    def of_message(self, id: int) -> Database:
        return self._same(self._database.of_message(id), f"message {id}")

    def _same(self, found: Database, what: str) -> Database:
        if found is not self._database:
            raise SeveralShards("using", f"{what} is on another shard than this connection")
        return self

    @property
    def engine(self) -> Engine:
        return self._connection.engine

    @property
    def store_id(self) -> str:
        if self._database._store_id is None:
            self._database._store_id = self.read(schema.store_id)
        return self._database._store_id

    def now(self) -> datetime | None:
        return self._database.now()

    def is_transient(self, error: BaseException) -> bool:
        return False

    def _check(self, needs_schema: bool) -> None:
        # On the borrowed connection: the pool may have no other to give.
        if needs_schema and not self._database._schema_is_there:
            self._persist(lambda: self._read(schema.check), repeatable=False)
            self._database._schema_is_there = True

    def _read(self, work: Work[T]) -> T:
        with schema.in_schema(self._connection, self.config.schema):
            return work(self._connection)

    def _write(self, work: Work[T], single: bool) -> T:
        join_transaction(self._connection)
        with self._database.bounding(self._connection):
            return self._read(work)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        join_transaction(self._connection)
        self._connection.exec_driver_sql("SAVEPOINT pgqrs")
        try:
            yield
        except Exception:
            with suppress(DBAPIError):  # the connection may be lost
                self._connection.exec_driver_sql("ROLLBACK TO SAVEPOINT pgqrs")
                self._connection.exec_driver_sql("RELEASE SAVEPOINT pgqrs")
            raise
        self._connection.exec_driver_sql("RELEASE SAVEPOINT pgqrs")

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        # Only with the commit, and who will wait then is not known yet.
        self._ring_at_commit(queue)

    def ring_of_results(self, queue: str) -> None:
        self._ring_at_commit(RESULTS)

    def _ring_at_commit(self, queue: str) -> None:
        self._persist(
            lambda: self._read(lambda c: self._database.ring_at_commit(c, queue)), repeatable=False
        )
