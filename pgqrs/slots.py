"""Where handlers run: threads for functions, an event loop for coroutines.

Both take loads first come first served, run no more than `concurrency` at a time, and report what
came of each. Loads that have not started yet can be taken back.

Whatever a handler raises is its own failure: also an exit, an interrupt, or a cancellation that nobody
here asked for. Slots go on with the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from pgqrs.errors import HandlerTimedOut
from pgqrs.handlers import Load
from pgqrs.hooks import Hooks
from pgqrs.outcomes import GivenBack, Outcome
from pgqrs.stores.daemon_threads import DaemonThreads

logger = logging.getLogger("pgqrs.worker")
T = TypeVar("T")
Report = Callable[[Load, list[Outcome]], None]
SLICE = 0.001
"""Seconds after which handlers that never wait let the rest of the event loop have a turn."""
PATIENCE = 0.5
"""Seconds for coroutines that were cancelled, and for an event loop, to end."""


class ThreadSlots:
    """Threads, started as they are needed.

    They are daemons: a handler that never returns must not keep the process from ending.

    Handing a message to another thread costs more than a short handler: a lock, a wake-up, a turn of
    the interpreter. So threads take loads from one deque, which needs no lock, and go on as long as
    there are any. A thread that finds none sleeps. One that takes a load and leaves others sees to it
    that another thread is awake, whatever its own load will do: that one has its turn as soon as the
    load waits for something, and then wakes the next. If loads are short, it finds nothing left. The
    rows `worker` and `worker-tasks` of the benchmarks notice the loss of this.
    """

    def __init__(self, concurrency: int, report: Report, hooks: Hooks) -> None:
        self._concurrency = concurrency
        self._report = report
        self._hooks = hooks
        self._inbox: deque[Load] = deque()
        self._sleeping: deque[threading.Lock] = deque()
        """For each thread that sleeps, the lock that it waits for."""
        self._is_waking = False
        """True if a thread was woken, and has not looked for a load yet."""
        self._threads: set[threading.Thread] = set()
        self._timed: dict[Load, threading.Thread] = {}
        """What runs and has a time limit."""
        self._starting = threading.Lock()

    def start(self, loads: Iterable[Load]) -> None:
        """Run these as soon as there is a thread for them."""
        self._inbox.extend(loads)
        room = self._concurrency - len(self._threads)
        for _ in range(min(room, len(self._inbox) - len(self._sleeping))):
            self._start_thread()
        if self._inbox:
            self._wake_one()

    def _start_thread(self) -> None:
        with self._starting:
            if len(self._threads) < self._concurrency:
                thread = threading.Thread(
                    target=self._work,
                    args=(self._inbox, self._sleeping),
                    name="pgqrs-handler",
                    daemon=True,
                )
                self._threads.add(thread)
                try:
                    thread.start()
                except BaseException:
                    self._threads.discard(thread)
                    raise

    def _wake_one(self) -> None:
        if not self._is_waking:
            try:
                awaited = self._sleeping.pop()
            except IndexError:  # all are awake
                return
            self._is_waking = True
            awaited.release()

    def abandon(self, load: Load) -> None:
        """Nobody waits for this any more: its thread, which cannot be ended, has no slot from now on."""
        with self._starting:
            thread = self._timed.pop(load, None)
            if thread is not None:
                self._threads.discard(thread)
        if thread is not None and self._inbox:
            self._start_thread()

    def oldest(self) -> float | None:
        """When the first of those was handed in that have not started; None if all have."""
        return _oldest(self._inbox)

    def take_back(self) -> list[Load]:
        """Those that have not started."""
        return _take_all(self._inbox)

    def cancel(self) -> None:
        """A thread cannot be interrupted; whoever asks has ended the deliveries already."""

    def close(self) -> None:
        """Threads end when they are done with what they do."""
        with self._starting:
            sleeping = self._sleeping
            self._inbox, self._sleeping = deque(), deque()
            self._threads.clear()
            self._timed.clear()
        for awaited in _take_all(sleeping):
            awaited.release()

    # In the threads

    def _work(self, inbox: deque[Load], sleeping: deque[threading.Lock]) -> None:
        awaited = threading.Lock()
        awaited.acquire()
        while self._inbox is inbox:  # else the worker has left
            try:
                load = inbox.popleft()
            except IndexError:
                self._sleep(inbox, sleeping, awaited)
                continue
            if inbox:
                self._wake_one()
            if load.job.timeout is not None:
                self._timed[load] = threading.current_thread()
            self._hooks.before(load)
            outcomes = _run(load)
            self._hooks.after(load, outcomes)
            self._report(load, outcomes)
            if load.job.timeout is not None and self._timed.pop(load, None) is None:
                return  # it was abandoned, or the worker has left

    def _sleep(
        self, inbox: deque[Load], sleeping: deque[threading.Lock], awaited: threading.Lock
    ) -> None:
        """Until there may be a load. One that comes from now on wakes this thread; one that came just
        before is seen here, and so is the end.
        """
        sleeping.append(awaited)
        if inbox or self._inbox is not inbox:
            try:
                sleeping.remove(awaited)
            except ValueError:
                pass  # it was woken just now
            else:
                return
        awaited.acquire()
        self._is_waking = False


def _oldest(inbox: deque[Load]) -> float | None:
    """Since when the first of them waits; None if there is none."""
    try:
        return inbox[0].given_at
    except IndexError:
        return None


def _take_all(found: deque[T]) -> list[T]:
    """What is in it, while others may take from it too."""
    taken: list[T] = []
    with suppress(IndexError):
        while True:
            taken.append(found.popleft())
    return taken


def _run(load: Load) -> list[Outcome]:
    try:
        return load.outcomes(load.start())
    except BaseException as exc:
        return load.failed(exc)


class LoopSlots:
    """Tasks in an event loop: the caller's, or one in a thread of its own.

    A task handles one load after the other, since making a task costs more than a short handler. It
    is used again only as long as it is as good as new: not after it was cancelled, nor with what a
    handler left in its context variables. One that takes a load and leaves others sees to it that
    another task is about to begin, as threads do. The row `worker-async` of the benchmarks notices the
    loss of this.
    """

    def __init__(self, concurrency: int, report: Report, hooks: Hooks) -> None:
        self._concurrency = concurrency
        self._report = report
        self._hooks = hooks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._closing = threading.Event()
        self._inbox: deque[Load] = deque()
        self._running: dict[asyncio.Task[None], Load | None] = {}
        self._fresh: asyncio.Task[None] | None = None
        """One that has not begun."""
        self._told: set[asyncio.Task[None]] = set()
        """Those that were cancelled here."""

    def use(self, loop: asyncio.AbstractEventLoop, owner: asyncio.Task[Any] | None) -> None:
        """Run them in this loop. If the owner is cancelled, so are they."""
        self._loop, self._owner = loop, owner

    def start(self, loads: Iterable[Load]) -> None:
        """Run these as soon as there is a slot for them."""
        self._inbox.extend(loads)
        if self._inbox:
            self._call(self._fill)

    def oldest(self) -> float | None:
        """When the first of those was handed in that have not started; None if all have."""
        return _oldest(self._inbox)

    def take_back(self) -> list[Load]:
        """Those that have not started."""
        return _take_all(self._inbox)

    def cancel(self) -> None:
        """Cancel those that run."""
        if self._running:
            self._told.update(self._running.copy())
            self._call(self._cancel_all)

    def close(self) -> None:
        """Wait a moment for those that were cancelled, and end the loop, if it is our own. A loop that
        is blocked is left behind.
        """
        deadline = time.monotonic() + PATIENCE
        while self._told and time.monotonic() < deadline:
            time.sleep(PATIENCE / 50)
        if self._thread is not None and self._loop is not None:
            self._closing.set()
            with suppress(RuntimeError):  # it has ended just now
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                logger.error("the event loop is blocked, and is left behind: %s", self._names())
            self._running, self._told = {}, set()
        self._thread = self._loop = self._owner = self._fresh = None

    def _names(self) -> str:
        return ", ".join({load.job.name for load in self._running.copy().values() if load})

    def _call(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            self._loop, self._closing = asyncio.new_event_loop(), threading.Event()
            # Not the usual one, whose threads are waited for when the process ends.
            threads = min(32, (os.cpu_count() or 1) + 4)
            self._loop.set_default_executor(DaemonThreads("pgqrs-loop-thread", limit=threads))
            self._thread = threading.Thread(
                target=_serve, args=(self._loop, self._closing), name="pgqrs-loop", daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(call)

    # In the loop

    def _fill(self) -> None:
        """Let another task begin, if there is something to do for it."""
        if self._inbox and self._fresh is None and len(self._running) < self._concurrency:
            self._fresh = task = asyncio.get_running_loop().create_task(self._work())
            self._running[task] = None
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._fresh is task:  # it was cancelled before it had begun
            self._fresh = None
        self._running.pop(task, None)
        self._told.discard(task)
        self._fill()

    def _cancel_all(self) -> None:
        self._told.update(self._running)
        for task in self._running:
            task.cancel()

    def _cancel(self, task: asyncio.Task[None], load: Load) -> None:
        if self._running.get(task) is load:  # not if it has gone on to the next
            self._told.add(task)
            task.cancel()

    async def _work(self) -> None:
        task, clean = asyncio.current_task(), copy_context()
        assert task is not None
        self._fresh = None
        began = time.monotonic()
        while not task.cancelling() and copy_context() == clean:
            try:
                load = self._inbox.popleft()
            except IndexError:  # all done, or taken back
                return
            self._running[task] = load
            if self._inbox:
                self._fill()
            task.set_name(load.job.name)
            await self._handle(load, task)
            if time.monotonic() - began > SLICE:
                await asyncio.sleep(0)
                began = time.monotonic()

    async def _handle(self, load: Load, task: asyncio.Task[None]) -> None:
        lose = partial(self._lose, task, load)
        for delivery in load.deliveries:
            delivery.when_lost(lose)
        self._hooks.before(load)
        try:
            if load.job.timeout is None:
                outcomes = load.outcomes(await load.start())
            else:
                outcomes = await _run_in_time(load, load.job.timeout)
        except asyncio.CancelledError as exc:
            # The worker leaves, or the lease is lost; then this is not heard any more. Or it is a
            # failure like any other, since nobody here has cancelled it.
            is_told = task in self._told or (self._owner is not None and self._owner.cancelling())
            outcomes = [GivenBack()] * len(load.deliveries) if is_told else load.failed(exc)
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


def _serve(loop: asyncio.AbstractEventLoop, closing: threading.Event) -> None:
    """Run a loop until it is closed, though handlers may stop it, or a task of theirs exits."""
    while not closing.is_set():
        try:
            loop.run_forever()
        except BaseException as exc:
            logger.error("a task of a handler ended the event loop, which goes on", exc_info=exc)
    loop.close()


async def _run_in_time(load: Load, seconds: float) -> list[Outcome]:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return load.outcomes(await load.start())
    except TimeoutError as exc:
        if not timeout.expired():
            return load.failed(exc)  # the handler's own
        return load.failed(HandlerTimedOut(load.job.name, seconds))
