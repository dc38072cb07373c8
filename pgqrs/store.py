"""The sync face: a store, and what can be got from it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.orm import Session

from pgqrs.admin import Admin
from pgqrs.clock import Clock
from pgqrs.config import Config, shown
from pgqrs.consumer import Consumer
from pgqrs.errors import InvalidConfig
from pgqrs.keeper import forget_leases
from pgqrs.producer import Producer
from pgqrs.schedules import Schedules
from pgqrs.stores import Database, Work, open_database
from pgqrs.transaction import Owner, Transaction, connection_of
from pgqrs.types import ConcurrencyModel, Duration
from pgqrs.workflows.runs import Workflows

T = TypeVar("T")
_ASYNC = ("AsyncEngine", "AsyncConnection", "AsyncSession")
"""By name: whoever uses these has imported them, and others should not have to."""


class Store:
    """A database that pgqrs lives in: a URL, the application's own engine, or what the environment
    says.

    One store serves all threads of a process. Opening looks at the recorded schema and refuses what
    it does not know; an empty database is fine until something is used.
    """

    def __init__(
        self,
        target: str | URL | Engine | Config | None = None,
        *,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are the fields of `Config`."""
        engine = target if isinstance(target, Engine) else None
        if type(target).__name__ in _ASYNC:
            raise InvalidConfig(
                f"a Store cannot use an {type(target).__name__}; pgqrs.AsyncStore can, "
                "or give Store a plain Engine or a URL"
            )
        self.config = config_from(None if engine is not None else target, settings)
        self._database: Database = open_database(self.config, engine, clock=clock)
        try:
            self._database.open()
        except BaseException:
            self.close()
            raise

    @classmethod
    def _of(cls, database: Database) -> Self:
        """The sync face of a database that is open elsewhere."""
        store = cls.__new__(cls)
        store.config, store._database = database.config, database
        return store

    @property
    def backend_name(self) -> str:
        """`sqlite`, `postgres` or `s3`."""
        return self._database.backend_name

    @property
    def concurrency_model(self) -> ConcurrencyModel:
        """How many processes the store is made for."""
        return self._database.concurrency_model

    @property
    def supports_skip_locked(self) -> bool:
        """Whether consumers claim side by side instead of one after the other."""
        return self._database.supports_skip_locked

    @property
    def supports_notify(self) -> bool:
        """Whether the database itself tells other processes of a new message."""
        return self._database.supports_notify

    @property
    def engine(self) -> Engine:
        """The engine, for rows of your own in the same transaction as `using`."""
        return self._database.engine

    def admin(self) -> Admin:
        """Look after tables, queues, workers and the archive."""
        return Admin(self._database)

    def producer(
        self,
        queue: str,
        *,
        register: bool = False,
        hostname: str | None = None,
        port: int = 0,
    ) -> Producer:
        """Put messages into a queue; `register` to be seen among the workers."""
        return Producer(self._database, queue, register=register, hostname=hostname, port=port)

    def consumer(
        self,
        queue: str,
        *,
        lease: Duration | None = None,
        hostname: str | None = None,
        port: int = 0,
    ) -> Consumer:
        """Take messages out of a queue."""
        return Consumer(self._database, queue, lease=lease, hostname=hostname, port=port)

    @property
    def schedules(self) -> Schedules:
        """What is enqueued again and again."""
        return Schedules(self._database)

    @property
    def workflows(self) -> Workflows:
        """The runs of workflows."""
        return Workflows(self._database)

    def shard(self, queue: str) -> Self:
        """The part of the store that a queue is in, as a store: for what cannot be done over several
        objects in S3, such as transactions of your own. Close the whole store, not this. A store that
        is one database is its own part.
        """
        return type(self)._of(self._database.of_queue(queue))

    def using(self, owner: Owner) -> Transaction:
        """Enqueue and end claims inside the transaction of this connection or session.

        A `scoped_session` is as good as the session in it. One in AUTOCOMMIT is refused.
        """
        return Transaction(self._database, connection_of(owner))

    def read(self, work: Work[T]) -> T:
        """Run a work that changes nothing. Errors of its own statements are SQLAlchemy's."""
        return self._database.read_for_application(work)

    def write(self, work: Work[T]) -> T:
        """Run a work in one transaction and commit it. It may be run again: no I/O of its own in
        it. Errors of its own statements are SQLAlchemy's.
        """
        return self._database.write_for_application(work)

    def verify_exclusive_access(self) -> None:
        """Raise `NotExclusive` if another process has the SQLite file open; elsewhere there is
        nothing to check.
        """
        self._database.verify_exclusive_access()

    def close(self) -> None:
        """Let go of the connections. An engine of the application's own stays open."""
        forget_leases(self._database)
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._database.url)})"


def config_from(target: object, settings: dict[str, Any]) -> Config:
    """The configuration for whatever a store was opened with."""
    if isinstance(target, Config):
        return target.with_(**settings) if settings else target
    if isinstance(target, URL):
        target = target.render_as_string(hide_password=False)
    if isinstance(target, str):
        return Config.from_dsn(target, **settings)
    if target is None:
        return Config.from_env(**settings)
    kind, hint = type(target), ""
    if isinstance(target, Connection | Session) or kind.__name__ in _ASYNC:
        hint = "; a store has an engine: store.using(…) takes connections and sessions"
    raise InvalidConfig(f"expected a URL, an engine or a Config, got {kind.__name__}{hint}")
