"""Threads that nothing has to wait for.

The threads of a `ThreadPoolExecutor` are waited for when the process ends, and those of the event
loop's own executor are few and shared with the application: a call that hangs there keeps the process
from ending, and enough of them keep everybody else from going on. The threads here are daemons, each
executor has its own, and one that had nothing to do for a while ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from pgqrs.current import outside, part_of_run
from pgqrs.stores.forks import Forking, watch

P = ParamSpec("P")
T = TypeVar("T")
LINGER = 10.0
"""Seconds that a thread without work stays."""


class DaemonThreads(ThreadPoolExecutor, Forking):
    """An executor with daemon threads: `limit` of them, or as many as there are calls.

    A `ThreadPoolExecutor` by name only, since event loops take nothing else as their default.
    """

    def __init__(self, name: str, *, limit: int | None = None) -> None:
        super().__init__(1)
        self._name = name
        self._limit = limit
        self._start_anew()
        watch(self)

    def _start_anew(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._count = self._idle = 0
        self._closed = False

    def after_fork_in_child(self) -> None:
        """The threads, and what they do, are the parent's."""
        self._start_anew()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call this in a thread."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append((future, partial(part_of_run(fn), *args, **kwargs)))
            if self._idle >= len(self._calls):
                self._changed.notify()
            elif self._limit is None or self._count < self._limit:
                self._count += 1
                with outside():  # it will work for others, too
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. Waits for nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `asyncio.to_thread` does, in these threads."""
        loop, context = asyncio.get_running_loop(), copy_context()
        return await loop.run_in_executor(self, partial(context.run, call, *args, **kwargs))

    def _work(self) -> None:
        while (found := self._next()) is not None:
            future, call = found
            if future.set_running_or_notify_cancel():
                _answer(future, call)
            del found, future, call  # they may hold much, and the next may be long in coming

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._calls or self._closed, LINGER)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._count -= 1
            return None


def _answer(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        value = call()
    except StopIteration as exc:  # one that a future of asyncio refuses: it would never be done
        error = RuntimeError("the call raised StopIteration")
        error.__cause__ = exc
        future.set_exception(error)
    except BaseException as exc:
        future.set_exception(exc)
    else:
        future.set_result(value)
