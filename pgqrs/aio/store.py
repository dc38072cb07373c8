"""The async twin of `pgqrs.store`."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pgqrs.admin import Admin
from pgqrs.aio.admin import AsyncAdmin
from pgqrs.aio.bridge import (
    AnyThreadBridge,
    Bridge,
    Facade,
    GreenletBridge,
    LoopLock,
    ThreadBridge,
    loop_sleep,
)
from pgqrs.aio.consumer import AsyncConsumer
from pgqrs.aio.producer import AsyncProducer
from pgqrs.aio.schedules import AsyncSchedules
from pgqrs.aio.thread_access import close_access
from pgqrs.aio.transaction import AsyncOwner, AsyncTransaction
from pgqrs.aio.workflows import AsyncWorkflows
from pgqrs.clock import Clock
from pgqrs.config import Config, shown
from pgqrs.consumer import Consumer
from pgqrs.errors import InvalidConfig
from pgqrs.handles import LoopResultWatch
from pgqrs.producer import Producer
from pgqrs.schedules import Schedules
from pgqrs.store import config_from
from pgqrs.stores import Database, Work, database_class, open_database
from pgqrs.types import ConcurrencyModel, Duration

T = TypeVar("T")


class AsyncStore(Facade):
    """A database that pgqrs lives in, for asyncio: the same methods as `Store`, awaited.

    Awaiting or entering it opens it. Without that it is opened by its first use.
    """

    def __init__(
        self,
        target: str | URL | AsyncEngine | Config | None = None,
        *,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are the fields of `Config`."""
        engine = target if isinstance(target, AsyncEngine) else None
        if isinstance(target, Engine):
            raise InvalidConfig(
                "an AsyncStore cannot use a plain Engine; pgqrs.Store can, or give AsyncStore the "
                "AsyncEngine of create_async_engine, or a URL"
            )
        self.config = config_from(None if engine is not None else target, settings)
        bridge, self._database = _bridged(self.config, engine, clock)
        super().__init__(bridge)

    @classmethod
    def _of(cls, database: Database, bridge: Bridge | None = None) -> Self:
        """The async face of a database that is open elsewhere; without a bridge threads can use it."""
        store = cls.__new__(cls)
        store.config, store._database = database.config, database
        Facade.__init__(store, bridge or AnyThreadBridge())
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
        """The sync engine underneath."""
        return self._database.engine

    def admin(self) -> AsyncAdmin:
        """Look after tables, queues, workers and the archive."""
        return AsyncAdmin(self._bridge, Admin(self._database))

    def producer(
        self,
        queue: str,
        *,
        register: bool = False,
        hostname: str | None = None,
        port: int = 0,
    ) -> AsyncProducer:
        """Put messages into a queue; `register` to be seen among the workers."""
        return AsyncProducer(
            self._bridge,
            Producer(self._database, queue, register=register, hostname=hostname, port=port),
        )

    def consumer(
        self,
        queue: str,
        *,
        lease: Duration | None = None,
        hostname: str | None = None,
        port: int = 0,
    ) -> AsyncConsumer:
        """Take messages out of a queue."""
        return AsyncConsumer(
            self._bridge,
            Consumer(self._database, queue, lease=lease, hostname=hostname, port=port),
        )

    @property
    def schedules(self) -> AsyncSchedules:
        """What is enqueued again and again."""
        return AsyncSchedules(self._bridge, Schedules(self._database))

    @property
    def workflows(self) -> AsyncWorkflows:
        """The runs of workflows."""
        return AsyncWorkflows(self._bridge, self._database)

    def shard(self, queue: str) -> Self:
        """The part of the store that a queue is in, as a store: for what cannot be done over several
        objects in S3, such as transactions of your own. Close the whole store, not this. A store that
        is one database is its own part.
        """
        return type(self)._of(self._database.of_queue(queue), self._bridge)

    def using(self, owner: AsyncOwner) -> AsyncTransaction:
        """Enqueue and end claims inside the transaction of this connection or session.

        An `async_scoped_session` is as good as the session in it. One in AUTOCOMMIT is refused.
        """
        return AsyncTransaction(self._bridge, self._database, owner)

    async def read(self, work: Work[T]) -> T:
        """Run a work that changes nothing. Errors of its own statements are SQLAlchemy's."""
        return await self._bridge.run(self._database.read_for_application, work)

    async def write(self, work: Work[T]) -> T:
        """Run a work in one transaction and commit it. It may be run again: no I/O of its own in
        it. Errors of its own statements are SQLAlchemy's.
        """
        return await self._bridge.run(self._database.write_for_application, work)

    async def verify_exclusive_access(self) -> None:
        """Raise `NotExclusive` if another process has the SQLite file open; elsewhere there is
        nothing to check.
        """
        await self._bridge.run(self._database.verify_exclusive_access)

    async def open(self) -> Self:
        """Look at the recorded schema and refuse what is not known; an empty database is fine."""
        try:
            await self._bridge.run(self._database.open)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Let go of the connections. An engine of the application's own stays open."""
        if not self._database.closed:
            await self._bridge.settle()
            if isinstance(self._database.result_watch, LoopResultWatch):
                await self._database.result_watch.end()
            await close_access(self._database, self._bridge)
            await self._bridge.run(self._database.close)
            self._bridge.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._database.url)})"


async def connect(
    target: str | URL | AsyncEngine | Config | None = None,
    *,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncStore:
    """Open an async store."""
    return await AsyncStore(target, clock=clock, **settings)


def _bridged(
    config: Config, engine: AsyncEngine | None, clock: Clock | None
) -> tuple[Bridge, Database]:
    """The database, and the way async code reaches it."""
    kind = database_class(
        engine.dialect.name if engine is not None else config.url.get_backend_name()
    )
    options: dict[str, Any] = {"clock": clock}
    if engine is None:
        if not kind.supports_async_engine:
            return ThreadBridge(kind.bridge_threads), open_database(config, None, **options)
        engine = create_async_engine(config.url, **kind.engine_options(config))
        options["owned"] = True
    options |= {"sleep": loop_sleep, "write_lock": LoopLock()}
    return GreenletBridge(), open_database(config, engine.sync_engine, **options)
