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
from queue import Empty, SimpleQueue
from typing import Any

from pgqrs.errors import HandlerTimedOut
from pgqrs.handlers import Load
from pgqrs.hooks import Hooks
from pgqrs.outcomes import GivenBack, Outcome
from pgqrs.stores.daemon_threads import DaemonThreads

logger = logging.getLogger("pgqrs.worker")
Report = Callable[[Load, list[Outcome]], None]
SLICE = 0.001
"""Seconds after which handlers that never wait let the rest of the event loop have a turn."""
PATIENCE = 0.5
"""Seconds for coroutines that were cancelled, and for an event loop, to end."""


class ThreadSlots:
    """Threads, started as they are needed.

    They are daemons: a handler that never returns must not keep the process from ending.
    """

    def __init__(self, concurrency: int, report: Report, hooks: Hooks) -> None:
        self._concurrency = concurrency
        self._report = report
        self._hooks = hooks
        self._inbox: SimpleQueue[Load | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._at_work: dict[Load, threading.Thread] = {}
        self._starting = threading.Lock()
        self._idle = 0

    def start(self, loads: Iterable[Load]) -> None:
        """Run these as soon as there is a thread for them."""
        for load in loads:
            self._inbox.put(load)
            if len(self._threads) < self._concurrency and self._inbox.qsize() > self._idle:
                self._start_thread()

    def _start_thread(self) -> None:
        with self._starting:
            if len(self._threads) < self._concurrency:
                thread = threading.Thread(target=self._work, name="pgqrs-handler", daemon=True)
                self._threads.add(thread)
                thread.start()

    def abandon(self, load: Load) -> None:
        """Nobody waits for this any more: its thread, which cannot be ended, has no slot from now on."""
        with self._starting:
            thread = self._at_work.pop(load, None)
            if thread is not None:
                self._threads.discard(thread)
        if thread is not None and not self._inbox.empty():
            self._start_thread()

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
        with self._starting:
            inbox, self._inbox = self._inbox, SimpleQueue()
            for _ in self._threads:
                inbox.put(None)
            self._threads.clear()
            self._at_work.clear()

    def _work(self) -> None:
        thread, inbox = threading.current_thread(), self._inbox
        while True:
            self._idle += 1  # a hint: whether another thread is worth starting
            load = inbox.get()
            self._idle -= 1
            if load is None:
                return
            self._at_work[load] = thread
            self._hooks.before(load)
            outcomes = _run(load)
            self._hooks.after(load, outcomes)
            self._report(load, outcomes)
            if self._at_work.pop(load, None) is None:
                return  # it was abandoned, or the worker has left


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
        self._owner: asyncio.Task[Any] | None = None
        self._closing = threading.Event()
        self._inbox: deque[Load] = deque()
        self._running: dict[asyncio.Task[None], Load | None] = {}
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
        self._thread = self._loop = self._owner = None

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
        for _ in range(min(len(self._inbox), self._concurrency - len(self._running))):
            task = asyncio.get_running_loop().create_task(self._work())
            self._running[task] = None
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
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
