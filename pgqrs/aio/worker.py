"""The async twin of `pgqrs.worker`: coroutines are handled in the caller's event loop.

The loop that claims and ends messages is the very same, in a thread beside the event loop. So leases
are renewed also while a handler blocks the event loop by mistake. For that the worker needs a way to
the database that works from threads: the store's own for SQLite; for PostgreSQL a pool of its own to
the same URL, of which it needs two connections as a rule, and one more for leases. A database that only
the event loop can reach (in memory, behind an async driver) is reached through the loop (see
`pgqrs.aio.thread_access`).

An event loop that a handler blocks for ever cannot leave `run`. If a signal told the process to end,
then it is ended all the same, when the grace is over and the worker has given back its messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

from pgqrs.aio.bridge import Facade
from pgqrs.aio.store import AsyncStore
from pgqrs.aio.thread_access import LoopDatabase, close_soon, for_threads
from pgqrs.errors import InvalidArgument
from pgqrs.handlers import Handler, Route
from pgqrs.hooks import Hook
from pgqrs.leaving import LATE, Running
from pgqrs.store import Store
from pgqrs.tasks import Task
from pgqrs.types import Duration
from pgqrs.worker import GRACE, PREFETCH, Worker, listed
from pgqrs.workflows.decorators import Workflow

logger = logging.getLogger("pgqrs.worker")


class AsyncWorker(Facade):
    """Handles the messages of some queues until it is told to stop.

    `handlers` are functions by the name of their queue, or `Handler`s to say more; coroutines run in
    the event loop, other functions in threads. `tasks` are run, and no others, from their own queues and
    from `queues`; with `queues` alone all tasks that are declared in this process. Queues that do not
    exist yet are created. Awaited or entered it works in the background, until closed.
    """

    def __init__(
        self,
        store: AsyncStore,
        *,
        queues: Iterable[str] = (),
        handlers: Mapping[str, Handler | Callable[[Any], Any]] | None = None,
        tasks: Iterable[Task[Any, Any] | Callable[..., Any] | str] = (),
        routes: Iterable[Route] = (),
        workflows: Iterable[Workflow[..., Any]] = (),
        codecs: Iterable[str] = (),
        hooks: Iterable[Hook] = (),
        concurrency: int = 8,
        prefetch: int = PREFETCH,
        lease: Duration | None = None,
        grace: Duration = GRACE,
        log_messages: bool = False,
        hostname: str | None = None,
        port: int = 0,
    ) -> None:
        """`grace` is how long handlers may go on after the worker was told to stop. `log_messages` logs
        every message that is finished; failures are always logged.
        """
        if not isinstance(store, AsyncStore):
            hint = "; a Store has a Worker" if isinstance(store, Store) else ""
            kind = type(store).__name__
            raise InvalidArgument("store", f"expected an AsyncStore, got {kind}{hint}")
        super().__init__(store._bridge)
        self._store = store
        self._make = partial(
            Worker,
            queues=queues if isinstance(queues, str) else tuple(queues),
            handlers=handlers,
            tasks=listed("tasks", tasks),
            routes=tuple(routes),
            workflows=listed("workflows", workflows),
            codecs=tuple(codecs),
            hooks=tuple(hooks),
            concurrency=concurrency,
            prefetch=prefetch,
            lease=lease,
            grace=grace,
            log_messages=log_messages,
            hostname=hostname,
            port=port,
        )
        self._sync = self._make(Store._of(for_threads(store._database, store._bridge)))
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
            database = for_threads(self._store._database, self._bridge)
            self._sync = self._make(Store._of(database))
        if isinstance(database, LoopDatabase):
            database.loop = loop
        self._sync._tasks.use(loop, asyncio.current_task())
        try:
            with self._listening_to_signals(signals):
                running, ended = self._sync._start_running(until_empty), loop.create_future()
                threading.Thread(
                    target=_tell_loop, args=(running, loop, ended), name="pgqrs-end", daemon=True
                ).start()
                await self._attend(ended)
        finally:
            if database is not self._store._database:
                await close_soon(database)

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

    def _listening_to_signals(self, wanted: bool) -> AbstractContextManager[None]:
        return self._sync._listening_to_signals(wanted)


def _tell_loop(
    running: Running, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]
) -> None:
    """Wait for the worker in a thread, and let the event loop know."""
    error: BaseException | None = None
    try:
        running.wait()
    except BaseException as exc:
        error = exc
    heard = threading.Event()

    def tell() -> None:
        heard.set()
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # it is closed
        return
    leaving = running.leaving
    if leaving.by and not heard.wait(max(0.0, leaving.left) + LATE):
        logger.critical("a handler blocks the event loop: the process ends, as %s said", leaving.by)
        os._exit(128 + signal.Signals[leaving.by])
