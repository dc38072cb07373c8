"""Threads that the body of a workflow starts: code in them is still the run's.

Python does not tell who started a thread. But a durable call from such a thread has no place in the
history of the run, and made as a plain call it would be made again with every replay, without a word. So
threads, and what is handed to a pool of threads, inherit the run of whoever started them; `Context.take`
then refuses the call. A thread that a step starts inherits nothing: a step is no part of the body.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pgqrs.current import outside, part_of_run, run_here

_lock = threading.Lock()
_is_watching = False


def watch_threads() -> None:
    """From now on threads inherit the run of who starts them. There is no way back: others may have
    wrapped the same functions meanwhile.
    """
    global _is_watching
    with _lock:
        if _is_watching:
            return
        _is_watching = True
        threading.Thread.start = _inheriting_start(threading.Thread.start)  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = _inheriting_submit(ThreadPoolExecutor.submit)  # type: ignore[method-assign]


def _inheriting_start(start: Callable[[threading.Thread], None]) -> Any:
    def inheriting(self: threading.Thread) -> None:
        if run_here.get() is not None:
            self.run = part_of_run(self.run)  # type: ignore[method-assign]
        start(self)

    return inheriting


def _inheriting_submit(submit: Callable[..., Future[Any]]) -> Any:
    def inheriting(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if run_here.get() is None:
            return submit(self, fn, *args, **kwargs)
        call = part_of_run(fn)
        with outside():  # a thread of a pool works for others, too
            return submit(self, call, *args, **kwargs)

    return inheriting
