"""The asyncio tasks of an async run: all of them, and what each of them waits for.

A run may go on here, or wait elsewhere without a thread, only if it is known what each of its tasks
waits for. So whatever the code of a run starts is a `RunTask`, which the loop's task factory makes
while runs go on there.

*Time.* `asyncio.timeout` counts seconds of this process. When history is replayed, no time passes: a
timeout that comes to its end then has no effect until the run is past its history (`missed`). And a
call that a timeout cut short before must be cut short again, at the same place and at once: `expire`
does. A task learns of its timeouts since each asks the task how often it was cancelled when it
begins, and cancels the task when it is over. Where Python does that otherwise one day, timeouts still
work; they take their time on each replay then. The timeouts of Python 3.11.0 to 3.11.2 do not ask, so
there entering one is told to its task (`_tell_tasks`).

*Order.* Tasks begin, and are found in sets, in an order that is the same in every life of a run, and
not that of their addresses (`__hash__`, `_in_order`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import CodeType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pgqrs.workflows.context import current


def _code(name: str) -> CodeType | None:
    return getattr(getattr(asyncio.Timeout, name, None), "__code__", None)


_ENTERS, _IS_OVER = _code("__aenter__"), _code("_on_timeout")


class Owner(Protocol):
    """The run of a task."""

    is_replaying: bool

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """This task is one of its own."""

    def next_task(self) -> int:
        """The number of a task that is made now."""

    def is_call(self, coro: Any) -> bool:
        """True if a coroutine is a durable call, which got its identity when it was made."""

    def lost_order(self) -> None:
        """Coroutines begin in an order that is another one in each life."""


class RunTask(asyncio.Task[Any]):
    """A task of a run."""

    def __init__(self, coro: Any, *, owner: Owner, **options: Any) -> None:
        self.owner = owner
        self._number = owner.next_task()
        self.level: int | None = None
        """Which of its timeouts cancelled it last, counted from the outermost; None if none did."""
        self._timeouts: list[asyncio.Timeout] = []
        self._missed: int | None = None
        self._is_expiring = False
        super().__init__(coro, **options)
        owner.adopt(self)

    def __hash__(self) -> int:
        return self._number

    def cancelling(self) -> int:
        caller = sys._getframe(1)
        if caller.f_code is _ENTERS:
            self.learn(caller.f_locals["self"])
        return super().cancelling()

    def learn(self, timeout: asyncio.Timeout) -> None:
        """This task is in a timeout from now on."""
        self._timeouts.append(timeout)

    def cancel(self, msg: Any = None) -> bool:
        caller = sys._getframe(1)
        level = None
        if caller.f_code is _IS_OVER:
            level = self._level(caller.f_locals["self"])
            if self.owner.is_replaying and not self._is_expiring:
                self._missed = level
                return False
        self.level, self._is_expiring = level, False
        return super().cancel(msg)

    def timeouts(self) -> list[asyncio.Timeout]:
        """Those that it is in now, the outermost first."""
        self._timeouts = [timeout for timeout in self._timeouts if _is_on(timeout)]
        return self._timeouts

    def _level(self, timeout: asyncio.Timeout) -> int | None:
        active = self.timeouts()
        return active.index(timeout) if timeout in active else None

    def expire(self, level: int) -> bool:
        """Let this timeout be over now; False if there is no such."""
        active = self.timeouts()
        if level >= len(active):
            return False
        if active[level].expired():  # it was missed
            self.level, self._missed = level, None
            return super().cancel()
        self._is_expiring = True
        active[level].reschedule(0.0)
        return True

    def catch_up(self) -> None:
        """Time passes again: what was missed has its effect now."""
        level, self._missed = self._missed, None
        active = self.timeouts()
        if level is not None and level < len(active) and active[level].expired():
            self.level = level
            super().cancel()


def _is_on(timeout: asyncio.Timeout) -> bool:
    return getattr(getattr(timeout, "_state", None), "name", "EXITED") in ("ENTERED", "EXPIRING")


def _tell_tasks(enter: Any) -> Any:
    """Returns an `asyncio.Timeout.__aenter__` that tells the task of a run about the timeout."""

    @wraps(enter)
    async def told(self: asyncio.Timeout) -> asyncio.Timeout:
        entered: asyncio.Timeout = await enter(self)
        task = asyncio.current_task()
        if isinstance(task, RunTask):
            task.learn(self)
        return entered

    return told


if _ENTERS is not None and "cancelling" not in _ENTERS.co_names:  # Python 3.11.0 to 3.11.2
    asyncio.Timeout.__aenter__ = _tell_tasks(asyncio.Timeout.__aenter__)  # type: ignore[method-assign]


# Which tasks there are

_counts: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()


class _Factory:
    """Makes the tasks of a loop, as they were made before, unless the code of a run starts them."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self._begun: dict[Any, asyncio.Future[Any]] = {}
        """Tasks that were made before they were asked for."""

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Future[Any]:
        owner: Any = current()
        is_ours = owner is not None and owner.is_async
        if not is_ours:
            return self._make(loop, coro, None, options)
        if (task := self._begun.pop(coro, None)) is not None:
            return task
        for other in _in_order(owner, coro):
            self._begun[other] = self._make(loop, other, owner, {})
        return self._begun.pop(coro, None) or self._make(loop, coro, owner, options)

    def _make(
        self, loop: asyncio.AbstractEventLoop, coro: Any, owner: Any, options: dict[str, Any]
    ) -> asyncio.Future[Any]:
        if self.before is None:
            if owner is not None:
                return RunTask(coro, owner=owner, loop=loop, **options)
            return asyncio.Task(coro, loop=loop, **options)
        task: asyncio.Future[Any] = self.before(loop, coro, **options)
        if owner is not None and isinstance(task, asyncio.Task):
            owner.adopt(task)
        return task


def _in_order(owner: Owner, coro: Any) -> list[Any]:
    """The coroutines that begin together with this one: `asyncio.as_completed` makes a set of them, and
    would begin them in the order of their addresses.
    """
    given = _given_to_as_completed()
    if given is None or owner.is_call(coro):
        return []
    if isinstance(given, Sequence | dict):
        return [found for found in dict.fromkeys(given) if asyncio.iscoroutine(found)]
    owner.lost_order()
    return []


_AS_COMPLETED = asyncio.as_completed.__code__


def _given_to_as_completed() -> Any:
    """What `asyncio.as_completed` was given, if it makes a task now."""
    frame: Any = sys._getframe(3)  # who asked the loop for a task
    while frame is not None and frame.f_globals.get("__name__", "").startswith("asyncio."):
        if frame.f_code is _AS_COMPLETED:
            return frame.f_locals["fs"]
        frame = frame.f_back
    return None


@contextmanager
def tracked(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Know of all tasks that the code of runs starts meanwhile."""
    before = loop.get_task_factory()
    if not isinstance(before, _Factory):
        loop.set_task_factory(_Factory(before))  # type: ignore[arg-type]
    _counts[loop] = _counts.get(loop, 0) + 1
    try:
        yield
    finally:
        _counts[loop] -= 1
        factory = loop.get_task_factory()
        if not _counts[loop] and isinstance(factory, _Factory):
            loop.set_task_factory(factory.before)


# What they wait for


class DurableWait(asyncio.Future[Any]):
    """A wait of a durable call: it lasts, whatever becomes of this process."""


_BY_OTHERS = ("asyncio.queues", "asyncio.locks", "asyncio.taskgroups")
"""Where a task waits for other tasks."""


def is_blocked(task: asyncio.Task[Any]) -> bool:
    """Whether a task cannot go on at this very moment."""
    waiter = getattr(task, "_fut_waiter", None)
    return waiter is not None and not waiter.done()


def foreign_wait(task: asyncio.Task[Any], others: set[asyncio.Task[Any]]) -> str | None:
    """What a task waits for, if that is neither durable nor another task of the run."""
    if isinstance(task, RunTask) and any(limit.when() is not None for limit in task.timeouts()):
        return "asyncio.timeout; pgqrs.timeout is durable"
    waiter = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, DurableWait) or waiter in others:
        return None
    if type(waiter).__name__ == "_GatheringFuture":
        return None
    frames = _frames(task)
    if not frames:
        return "something unknown"
    module = frames[-1].f_globals.get("__name__", "")
    name = getattr(frames[-1].f_code, "co_qualname", frames[-1].f_code.co_name)
    if any(_is_limited(task, frame) for frame in frames[-2:]):
        return "asyncio.as_completed with a timeout; pgqrs.timeout is durable"
    if module in _BY_OTHERS:
        return None
    if module == "asyncio.tasks" and frames[-1].f_locals.get("timeout_handle", ...) is None:
        return None
    return f"{module}.{name}"


def _is_limited(task: asyncio.Task[Any], frame: Any) -> bool:
    """True if a frame is the wait of an `asyncio.as_completed` that has a timeout."""
    if frame.f_code.co_name != "_wait_for_one":
        return False
    if (iterator := frame.f_locals.get("self")) is not None:  # since Python 3.13
        return getattr(iterator, "_timeout_handle", None) is not None
    queue = frame.f_locals.get("done")
    for timer in getattr(task.get_loop(), "_scheduled", ()):
        callback = timer._callback
        if getattr(callback, "__name__", "") == "_on_timeout" and not timer.cancelled():
            closure = getattr(callback, "__closure__", None) or ()
            if any(cell.cell_contents is queue for cell in closure):
                return True
    return False


def place_of(task: asyncio.Task[Any]) -> str:
    """Where in the workflow's code a task is."""
    frames = [
        frame
        for frame in _frames(task)
        if not frame.f_globals.get("__name__", "").startswith(("asyncio.", "pgqrs.workflows."))
    ]
    if not frames:
        return task.get_name()
    code = frames[-1].f_code
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({code.co_filename}:{frames[-1].f_lineno})"


def _frames(task: asyncio.Task[Any]) -> list[Any]:
    """The frames of a task that waits, the innermost last."""
    found: list[Any] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        frame = frame or getattr(coroutine, "ag_frame", None)
        if frame is None:
            break
        found.append(frame)
        coroutine = next(
            (
                inner
                for name in ("cr_await", "gi_yieldfrom", "ag_await")
                if (inner := getattr(coroutine, name, None)) is not None
            ),
            None,
        )
    return found
