"""The async twin of `pgqrs.worker`: coroutines are handled in the caller's event loop.

The loop that claims and ends messages is the very same, in a thread beside the event loop. So leases
are renewed also while a handler blocks the event loop by mistake. For that the worker needs a way to
the database that works from threads: the store's own for SQLite, another pool of connections to the
same URL for PostgreSQL. A database that only the event loop can reach (in memory, behind an async
driver) is reached through the loop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, Self

from sqlalchemy import Connection, Engine

from pgqrs.aio.bridge import Bridge, Facade
from pgqrs.aio.store import AsyncStore
from pgqrs.handlers import Handler, Route
from pgqrs.hooks import Hook
from pgqrs.store import Store
from pgqrs.stores import Database, Work, open_database
from pgqrs.stores.base import T
from pgqrs.tasks import Task
from pgqrs.types import Duration
from pgqrs.worker import GRACE, PREFETCH, STOP_SIGNALS, Worker
from pgqrs.workflows.decorators import Workflow


class AsyncWorker(Facade):
    """Handles the messages of some queues until it is told to stop.

    `handlers` are functions by the name of their queue, or `Handler`s to say more; coroutines run in
    the event loop, other functions in threads. Queues that do not exist yet are created. Awaited or
    entered it works in the background, until closed.
    """

    def __init__(
        self,
        store: AsyncStore,
        *,
        queues: Iterable[str] = (),
        handlers: Mapping[str, Handler | Callable[[Any], Any]] | None = None,
        tasks: Iterable[Task[Any, Any]] = (),
        routes: Iterable[Route] = (),
        workflows: Iterable[Workflow[..., Any]] = (),
        codecs: Iterable[str] = (),
        hooks: Iterable[Hook] = (),
        concurrency: int = 8,
        prefetch: int = PREFETCH,
        lease: Duration | None = None,
        grace: Duration = GRACE,
        hostname: str | None = None,
        port: int = 0,
    ) -> None:
        """`grace` is how long handlers may go on after the worker was told to stop."""
        super().__init__(store._bridge)
        self._store = store
        self._make = partial(
            Worker,
            queues=queues if isinstance(queues, str) else tuple(queues),
            handlers=handlers,
            tasks=tuple(tasks),
            routes=tuple(routes),
            workflows=tuple(workflows),
            codecs=tuple(codecs),
            hooks=tuple(hooks),
            concurrency=concurrency,
            prefetch=prefetch,
            lease=lease,
            grace=grace,
            hostname=hostname,
            port=port,
        )
        self._sync = self._make(Store._of(_for_threads(store)))
        self.queues = self._sync.queues
        self._background: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> int | None:
        """Its row among the workers; None while it does not run."""
        return self._sync.worker_id

    async def run(self, *, until_empty: bool = False, signals: bool = True) -> None:
        """Work until told to stop: by `stop`, by cancelling, by SIGTERM or SIGINT, by an admin.

        A second signal makes it leave at once. With `until_empty` it ends when nothing is left to do
        now.
        """
        loop, database = asyncio.get_running_loop(), self._sync._database
        if database.closed and database is not self._store._database:  # it ran before
            database = _for_threads(self._store)
            self._sync = self._make(Store._of(database))
        if isinstance(database, LoopDatabase):
            database.loop = loop
        self._sync._tasks.use(loop)
        try:
            with (
                ThreadPoolExecutor(1, thread_name_prefix="pgqrs-worker") as thread,
                self._listening_to_signals(loop, signals),
            ):
                await self._attend(loop.run_in_executor(thread, self._sync._run, until_empty))
        finally:
            if database is not self._store._database:
                await asyncio.to_thread(database.close)

    async def _attend(self, running: asyncio.Future[None]) -> None:
        """Wait for the worker. Cancelled, tell it to stop, and go on waiting until it has."""
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError as exc:
                self.stop(now=cancelled is not None)
                cancelled = exc
            else:
                break
        if cancelled is not None:
            raise cancelled

    def stop(self, *, now: bool = False) -> None:
        """Claim nothing more, finish what was begun, give back the rest, and return from `run`.

        With `now` it gives back also what was begun. From any thread, and from a signal handler.
        """
        self._sync.stop(now=now)

    async def open(self) -> Self:
        """Work in the background, until closed."""
        if self._background is None:
            self._background = asyncio.ensure_future(self.run(signals=False))
        return self

    async def close(self) -> None:
        """Stop, and wait until it has left. What ended it before is raised here."""
        background, self._background = self._background, None
        if background is not None:
            if not background.done():
                self.stop()
            await background

    @contextmanager
    def _listening_to_signals(
        self, loop: asyncio.AbstractEventLoop, wanted: bool
    ) -> Iterator[None]:
        heard: list[signal.Signals] = []
        if wanted:
            # Only the main thread can, and not on every system.
            with suppress(NotImplementedError, RuntimeError, ValueError):
                for number in STOP_SIGNALS:
                    loop.add_signal_handler(number, lambda: self.stop(now=self._sync._stopping))
                    heard.append(number)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)


def _for_threads(store: AsyncStore) -> Database:
    """The database of an async store, as threads can use it."""
    database = store._database
    if store._bridge.has_threads:
        return database
    if not database.is_shared:
        return LoopDatabase(database, store._bridge)
    url = database.engine.url
    plain = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=False)
    return open_database(store.config.with_(dsn=plain), clock=database.clock)


class LoopDatabase(Database):
    """A database that only an event loop can reach, for threads: they wait for the loop."""

    def __init__(self, database: Database, bridge: Bridge) -> None:
        super().__init__(database.config, clock=database.clock, owned=False)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wakeups = database.wakeups
        self._database = database
        self._bridge = bridge

    @property
    def engine(self) -> Engine:
        return self._database.engine

    def close(self) -> None:
        return  # the loop's to close

    def now(self) -> datetime | None:
        return self._database.now()

    def is_transient(self, error: BaseException) -> bool:
        return False  # the database itself has retried

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        self.wakeups.ring(queue)  # nobody is elsewhere

    def _read(self, work: Work[T]) -> T:
        return self._in_loop(self._database.read, work)

    def _write(self, work: Work[T], single: bool) -> T:
        return self._in_loop(self._database.write, work)

    def _write_alone(self, work: Work[T]) -> T:
        return self._in_loop(self._database.write_once, work)

    def _in_loop(self, call: Callable[[Callable[[Connection], T]], T], work: Work[T]) -> T:
        assert self.loop is not None, "used before the worker runs"
        return asyncio.run_coroutine_threadsafe(self._bridge.run(call, work), self.loop).result()
