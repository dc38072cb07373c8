"""Where handlers run: threads for functions, an event loop for coroutines.

Both take loads first come first served, run no more than `concurrency` at a time, and report what
came of each. Loads that have not started yet can be taken back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import copy_context
from importlib import import_module
from queue import Empty, SimpleQueue

from pgqrs.errors import HandlerTimedOut
from pgqrs.handlers import Load
from pgqrs.hooks import Hooks
from pgqrs.outcomes import GivenBack, Outcome

Report = Callable[[Load, list[Outcome]], None]
SLICE = 0.001
"""Seconds after which handlers that never wait let the rest of the event loop have a turn."""


class ThreadSlots:
    """Threads, started as they are needed.

    They are daemons: a handler that never returns must not keep the process from ending.
    """

    def __init__(self, concurrency: int, report: Report, hooks: Hooks) -> None:
        self._concurrency = concurrency
        self._report = report
        self._hooks = hooks
        self._inbox: SimpleQueue[Load | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def start(self, loads: Iterable[Load]) -> None:
        """Run these as soon as there is a thread for them."""
        for load in loads:
            self._inbox.put(load)
            if len(self._threads) < self._concurrency and self._inbox.qsize() > self._idle:
                name = f"pgqrs-handler-{len(self._threads) + 1}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def take_back(self) -> list[Load]:
        """Those that have not started."""
        taken: list[Load] = []
        with suppress(Empty):
            while True:
                load = self._inbox.get_nowait()
                if load is not None:
                    taken.append(load)
        return taken

    def cancel(self) -> None:
        """A thread cannot be interrupted; whoever asks has ended the deliveries already."""

    def close(self) -> None:
        """Threads end when they are done with what they do."""
        for _ in self._threads:
            self._inbox.put(None)
        self._threads.clear()

    def _work(self) -> None:
        while True:
            self._idle += 1  # a hint: whether another thread is worth starting
            load = self._inbox.get()
            self._idle -= 1
            if load is None:
                return
            self._hooks.before(load)
            outcomes = _run(load)
            self._hooks.after(load, outcomes)
            self._report(load, outcomes)


class Processes:
    """A pool of processes for what needs a core of its own, made when it is first used.

    A process that died takes the pool with it; the next call makes a new one.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: Executor | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Executor:
        with self._lock:
            if self._pool is None or getattr(self._pool, "_broken", False):
                # Not by fork: a child would inherit the locks of all our threads.
                context = import_module("multiprocessing").get_context("spawn")
                make = import_module("concurrent.futures").ProcessPoolExecutor
                self._pool = make(
                    min(self._count, os.cpu_count() or 1),
                    mp_context=context,
                    initializer=_leave_signals_to_the_parent,
                )
            return self._pool

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _leave_signals_to_the_parent() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _run(load: Load) -> list[Outcome]:
    try:
        return load.outcomes(load.start())
    except BaseException as exc:
        return load.failed(exc)


class LoopSlots:
    """Tasks in an event loop: the caller's, or one in a thread of its own.

    A task handles one load after the other, since making a task costs more than a short handler. It
    is used again only as long as it is as good as new: not after it was cancelled, nor with what a
    handler left in its context variables.
    """

    def __init__(self, concurrency: int, report: Report, hooks: Hooks) -> None:
        self._concurrency = concurrency
        self._report = report
        self._hooks = hooks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Load] = deque()
        self._running: dict[asyncio.Task[None], Load | None] = {}

    def use(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Run them in this loop."""
        self._loop = loop

    def start(self, loads: Iterable[Load]) -> None:
        """Run these as soon as there is a slot for them."""
        self._inbox.extend(loads)
        if self._inbox:
            self._call(self._fill)

    def take_back(self) -> list[Load]:
        """Those that have not started."""
        taken: list[Load] = []
        with suppress(IndexError):
            while True:
                taken.append(self._inbox.popleft())
        return taken

    def cancel(self) -> None:
        """Cancel those that run."""
        if self._running:
            self._call(self._cancel_all)

    def close(self) -> None:
        """End the loop, if it is our own."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._thread = self._loop = None

    def _call(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="pgqrs-loop", daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(call)

    # In the loop

    def _fill(self) -> None:
        for _ in range(min(len(self._inbox), self._concurrency - len(self._running))):
            task = asyncio.get_running_loop().create_task(self._work())
            self._running[task] = None
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._fill()

    def _cancel_all(self) -> None:
        for task in self._running:
            task.cancel()

    def _cancel(self, task: asyncio.Task[None], load: Load) -> None:
        if self._running.get(task) is load:  # not if it has gone on to the next
            task.cancel()

    async def _work(self) -> None:
        task, clean = asyncio.current_task(), copy_context()
        assert task is not None
        began = time.monotonic()
        while not task.cancelling() and copy_context() == clean:
            try:
                load = self._inbox.popleft()
            except IndexError:  # all done, or taken back
                return
            self._running[task] = load
            task.set_name(load.job.name)
            await self._handle(load, task)
            if time.monotonic() - began > SLICE:
                await asyncio.sleep(0)
                began = time.monotonic()

    async def _handle(self, load: Load, task: asyncio.Task[None]) -> None:
        for delivery in load.deliveries:
            delivery.when_lost(lambda: self._lose(task, load))
        self._hooks.before(load)
        try:
            if load.job.timeout is None:
                outcomes = load.outcomes(await load.start())
            else:
                outcomes = await _run_in_time(load, load.job.timeout)
        except asyncio.CancelledError:
            # The worker leaves, or the lease is lost; then this is not heard any more.
            outcomes = [GivenBack()] * len(load.deliveries)
        except BaseException as exc:
            outcomes = load.failed(exc)
        self._hooks.after(load, outcomes)
        self._report(load, outcomes)

    def _lose(self, task: asyncio.Task[None], load: Load) -> None:
        """If nobody will take the outcome of any of it: stop. From the keeper's thread."""
        loop = task.get_loop()
        if all(delivery.is_lost for delivery in load.deliveries):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._cancel, task, load)


async def _run_in_time(load: Load, seconds: float) -> list[Outcome]:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return load.outcomes(await load.start())
    except TimeoutError as exc:
        if not timeout.expired():
            return load.failed(exc)  # the handler's own
        return load.failed(HandlerTimedOut(load.job.name, seconds))
