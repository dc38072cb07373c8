"""How threads reach the database of an async store.

Leases are renewed from a thread, so that a blocked event loop does not lose them. SQLite is reached
through threads anyway. For PostgreSQL behind an async driver the threads get connections of their own,
to the same URL; for leases one is enough. A database that only the event loop can reach (in memory) is
reached through the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as StillWaiting
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar
from weakref import ref

from sqlalchemy import Engine

from pgqrs.aio.bridge import Bridge
from pgqrs.current import in_event_loop
from pgqrs.errors import InvalidArgument, StoreClosed
from pgqrs.keeper import Keeper, forget_leases, keeper_of
from pgqrs.stores import Database, Work, open_database
from pgqrs.stores.daemon_threads import DaemonThreads

T = TypeVar("T")
LOOK_EVERY = 0.5
CLOSE_WITHIN = 2.0
_closing = DaemonThreads("pgqrs-closing")


def for_threads(database: Database, bridge: Bridge, **settings: Any) -> Database:
    """The database of an async store, as threads can use it. `settings` are for the connections that
    they get.
    """
    if bridge.has_threads:
        return database
    if not database.is_shared:
        return LoopDatabase(database, bridge)
    url = database.engine.url
    plain = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=False)
    return open_database(database.config.with_(dsn=plain, **settings), clock=database.clock)


class _Access:
    """Finds what threads reach a database by; opened when it is first asked for."""

    def __init__(self, database: Database, bridge: Bridge) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._database, self._bridge = ref(database), bridge
        self._opening = threading.Lock()
        self._opened: Database | None = None
        self._closed = False

    def __call__(self) -> Database | None:
        with self._opening:
            database = self._database()
            if self._closed or database is None or database.closed:
                return None
            if self._opened is not None:
                return self._opened
            found = for_threads(database, self._bridge, pool_size=1)
            if isinstance(found, LoopDatabase):
                found.loop = self.loop  # and it is not kept: it keeps the database
            else:
                self._opened = found
            return found

    def close(self) -> None:
        with self._opening:
            self._closed = True
            if self._opened is not None:
                self._opened.close()


def keeper_for(database: Database, bridge: Bridge) -> Keeper:
    """The keeper of an async store. It renews from a thread, also while the event loop is blocked."""
    if bridge.has_threads:
        return keeper_of(database)
    access = bridge.thread_access
    if not isinstance(access, _Access):
        access = bridge.thread_access = _Access(database, bridge)
    access.loop = asyncio.get_running_loop()
    return keeper_of(database, access)


async def close_access(database: Database, bridge: Bridge) -> None:
    """Let threads reach the database no more, which is about to be closed."""
    access, bridge.thread_access = bridge.thread_access, None

    def close() -> None:
        forget_leases(database)
        if isinstance(access, _Access):
            access.close()

    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_WITHIN):
            await _closing.run(close)


async def close_soon(database: Database) -> None:
    """Close a database that threads have used, and wait for that a moment."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_WITHIN):
            await _closing.run(database.close)


def in_loop(loop: asyncio.AbstractEventLoop, bridge: Bridge, call: Callable[[], T]) -> T:
    """Call the database for a thread, through the loop. `StoreClosed` if the loop has ended."""
    try:
        answer = asyncio.run_coroutine_threadsafe(bridge.run(call), loop)
    except RuntimeError as exc:
        raise StoreClosed from exc
    while True:
        try:
            return answer.result(LOOK_EVERY)
        except StillWaiting:
            if answer.done():  # just now, or it has raised that itself
                return answer.result()
            if not loop.is_running():
                raise StoreClosed from None


class LoopDatabase(Database):
    """A database that only an event loop can reach, for threads: they wait for the loop."""

    def __init__(self, database: Database, bridge: Bridge) -> None:
        super().__init__(database.config, clock=database.clock, owned=False)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wakeups = database.wakeups
        self._database = database
        self._bridge = bridge

    @property
    def origin(self) -> Database:
        return self._database

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
        self.wakeups.ring(queue)
        if elsewhere and self._database.is_shared:
            self._call(lambda: self._database.ring(queue))

    def _read(self, work: Work[T]) -> T:
        return self._in_loop(self._database.read, work)

    def _write(self, work: Work[T], single: bool) -> T:
        return self._in_loop(self._database.write, work)

    def write_once(self, work: Work[T], *, again: bool = False) -> T:
        return self._in_loop(lambda given: self._database.write_once(given, again=again), work)

    def _in_loop(self, call: Callable[[Work[T]], T], work: Work[T]) -> T:
        return self._call(lambda: call(work))

    def _call(self, call: Callable[[], T]) -> T:
        assert self.loop is not None, "used before the worker runs"
        if in_event_loop() and asyncio.get_running_loop() is self.loop:
            raise InvalidArgument(
                "store", "in the event loop this store is awaited: `await task.aenqueue(…)`"
            )
        return in_loop(self.loop, self._bridge, call)
