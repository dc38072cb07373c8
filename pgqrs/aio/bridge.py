"""How async code runs the sync facades, so that everything is written once.

Two ways, chosen by what the database can do:

- *greenlets*, over an `AsyncEngine`: the sync code runs in a greenlet on the event loop, and
  SQLAlchemy switches back to the loop wherever a statement waits. Waiting of our own does the same,
  see `loop_sleep` and `LoopLock`: a thread's sleep or lock would freeze the loop.
- *threads*, for SQLite: quicker than an async driver, and threads that write at the same time share
  commits.

Cancelling the caller does not undo what was sent. Every command is safe to repeat, and a cancelled
dequeue gives its messages back (see `run_or_undo`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from pgqrs.errors import StoreClosed
from pgqrs.stores.daemon_threads import DaemonThreads
from pgqrs.stores.forks import Forking, watch

P = ParamSpec("P")
T = TypeVar("T")


class Bridge(Forking, ABC):
    """Runs sync code for async callers."""

    has_threads = False
    """Whether the database behind it may be used from any thread."""

    def __init__(self) -> None:
        self._undoing: set[asyncio.Task[None]] = set()
        self.thread_access: object = None
        """What threads reach the database by, if they cannot use it (see `thread_access`)."""
        watch(self)

    def after_fork_in_child(self) -> None:
        self._undoing, self.thread_access = set(), None

    @abstractmethod
    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def run_or_undo(self, call: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Run to the end even if the caller is cancelled meanwhile; then undo it, behind its back."""
        task = asyncio.ensure_future(self.run(call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            undoing = asyncio.ensure_future(self._undo(task, undo))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise

    async def _undo(self, task: asyncio.Task[T], undo: Callable[[T], object]) -> None:
        with suppress(Exception):  # nobody is left to hear of it, and leases lapse by themselves
            await self.run(undo, await task)

    async def settle(self) -> None:
        """Wait for what is being undone."""
        if self._undoing:
            await asyncio.wait(self._undoing)

    def close(self) -> None:
        """Let go of what the bridge itself holds."""
        return


class GreenletBridge(Bridge):
    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await greenlet_spawn(partial(call, *args, **kwargs))


class ThreadBridge(Bridge):
    has_threads = True

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._count = threads
        self._threads = self._new_threads()
        self._closed = False

    def _new_threads(self) -> DaemonThreads:
        return DaemonThreads("pgqrs", limit=self._count)

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._threads = self._new_threads()  # those that it thinks it has are the parent's

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise StoreClosed
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False)


class AnyThreadBridge(Bridge):
    """For a database that is not this store's own: in threads that the event loop has anyway."""

    has_threads = True

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **kwargs)


def loop_sleep(seconds: float) -> None:
    """`time.sleep` for code that runs in a greenlet."""
    await_only(asyncio.sleep(seconds))


class LoopLock(Forking):
    """A fair lock for code that runs in a greenlet."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def after_fork_in_child(self) -> None:
        self._lock = asyncio.Lock()

    def __enter__(self) -> None:
        await_only(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Facade:
    """What the async facades share: `await` it, or enter it; both open it and give it back."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def open(self) -> Self:
        """Make it ready for use."""
        return self

    async def close(self) -> None:
        """Let go of what it holds."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self.open().__await__()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
