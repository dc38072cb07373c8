"""Tasks and runs in place: in a block of `inline()` nothing reaches a store of the application.

A task is called when it is enqueued, with its arguments as they would arrive. A run is a real run, with
history and replay, in a store in memory that belongs to the block. It goes on as far as it can when it
is started and when it is told something. Asking for its result lets time pass for it: sleeps and
timeouts are over at once, as far as the run sees.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from typing import Any

from pgqrs.aio.bridge import ThreadBridge
from pgqrs.aio.workflows import AsyncRun
from pgqrs.codecs import PICKLE, Call, unpickled
from pgqrs.config import Config
from pgqrs.errors import EventTimedOut, ResultTimedOut, TaskFailed
from pgqrs.handles import AsyncHandle, Handle
from pgqrs.handling import CurrentMessage, handling
from pgqrs.intercepting import intercepting
from pgqrs.outcomes import Done, Failed
from pgqrs.payloads import encode
from pgqrs.store import Store
from pgqrs.tasks import Task, as_kept
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.tasks import drain
from pgqrs.types import MAX_SECONDS, Duration, RunInfo, RunStatus, TaskStatus
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.flows import NOTHING
from pgqrs.workflows.routing import route as run_route
from pgqrs.workflows.runs import Run, result_of

NEVER = timedelta(seconds=MAX_SECONDS / 2)
"""What is due later than this waits for something else than time."""
LIMITS = Config()


@contextmanager
def inline() -> Iterator[list[tuple[Any, Call]]]:
    """In this block, and in all threads of the process, tasks run in place when they are enqueued, and
    runs when they are started, also from asyncio; no store is used, whichever was named.

    What a task raises is raised by `result()` of its handle. A run is the same as ever, and `result()`
    lets time pass for it; one that waits for something else than time has no result: `ResultTimedOut`
    at once. Gives the list of calls: of tasks and of workflows.
    """
    inlined = _Inline()
    try:
        with intercepting(inlined):
            yield inlined.calls
    finally:
        inlined.close()


class InlineHandle(Handle[Any]):
    """The handle of a task that ran in place."""

    def __init__(self, queue: str, value: Any, error: BaseException | None) -> None:
        self.queue, self.id = queue, 0
        self._value, self._error = value, error

    def result(self, timeout: Any = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def status(self) -> TaskStatus:
        return TaskStatus.COMPLETED if self._error is None else TaskStatus.FAILED

    def cancel(self) -> bool:
        return False


class InlineAsyncHandle(AsyncHandle[Any]):
    """The same for asyncio."""

    def __init__(self, handle: InlineHandle) -> None:
        self.queue, self.id = handle.queue, handle.id
        self._handle = handle

    async def result(self, timeout: Any = None) -> Any:
        return self._handle.result()

    async def status(self) -> TaskStatus:
        return self._handle.status()

    async def cancel(self) -> bool:
        return False


class InlineRun(Run[Any]):
    """A run in the store of the block. Awaited, it is an async one."""

    def __init__(self, runs: _Runs, run: Run[Any]) -> None:
        super().__init__(run._database, run.id, run._decode)
        self._runs = runs

    def result(self, timeout: Duration | None = None) -> Any:
        self._runs.go_on(until=self._ended)
        ended = self._ended()
        if ended is None:
            raise ResultTimedOut(f"run {self.id}", 0.0)
        return result_of(ended, self._decode)

    def get_event(
        self, name: str, timeout: Duration | None = None, *, default: Any = NOTHING
    ) -> Any:
        if timeout is not None:
            self._runs.go_on(until=lambda: self._last_event(name))
        found = self._last_event(name)
        if found is None and default is NOTHING:
            raise EventTimedOut(name)
        return default if found is None else found.payload

    def signal(self, name: str, payload: Any = None) -> None:
        super().signal(name, payload)
        self._runs.go_on()

    def cancel(self) -> RunStatus:
        super().cancel()
        self._runs.go_on()
        return self.status()

    def resume(self) -> None:
        super().resume()
        self._runs.go_on()

    def retry(self) -> None:
        super().retry()
        self._runs.go_on()

    def __await__(self) -> Generator[Any, None, InlineAsyncRun]:
        async def awaited() -> InlineAsyncRun:
            return InlineAsyncRun(self._runs.bridge, self)

        return awaited().__await__()


class InlineAsyncRun(AsyncRun[Any]):
    """The same for asyncio."""

    async def result(self, timeout: Duration | None = None) -> Any:
        return await self._bridge.run(self._sync.result)

    async def get_event(
        self, name: str, timeout: Duration | None = None, *, default: Any = NOTHING
    ) -> Any:
        return await self._bridge.run(self._sync.get_event, name, timeout, default=default)


class InlineRuns(list[InlineRun]):
    """Runs that were started together. Awaited, they are async ones."""

    def __await__(self) -> Generator[Any, None, list[InlineAsyncRun]]:
        async def awaited() -> list[InlineAsyncRun]:
            return [await run for run in self]

        return awaited().__await__()


class _Runs:
    """The store that runs are in, and its time."""

    def __init__(self) -> None:
        self.clock = ManualClock(datetime.now(UTC))
        self.store = Store("sqlite::memory:", clock=self.clock, upgrade=True)
        self.bridge = ThreadBridge(1)
        self._known: dict[str, Workflow[..., Any]] = {}

    def start(
        self, workflow: Workflow[..., Any], calls: Sequence[Call], keys: Sequence[str | None]
    ) -> list[InlineRun]:
        self._known[workflow.name] = workflow
        plain = workflow.options(key=None, store=None)
        started = self.store.workflows.start_many(plain, calls, keys=keys)
        self.go_on()
        return [InlineRun(self, run) for run in started]

    def go_on(self, *, until: Callable[[], RunInfo | Any | None] | None = None) -> None:
        """Do what is due; if there is something to wait `until`, let time pass for it."""
        while True:
            known = run_route(self._known.values())
            drain(self.store, raise_errors=False, routes=[known])
            if until is None or until() is not None:
                return
            due = self._next_due()
            if due is None:
                return
            self.clock.advance(max(0.0, (due - self.clock.now()).total_seconds()))

    def _next_due(self) -> datetime | None:
        now, admin = self.clock.now(), self.store.admin()
        waiting = [
            m.vt for queue in admin.list_queues() for m in admin.peek(queue.queue_name, 1000)
        ]
        return min((vt for vt in waiting if now < vt < now + NEVER), default=None)

    def close(self) -> None:
        self.bridge.close()
        self.store.close()


class _Inline:
    """Takes what would be sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Call]] = []
        self._runs: _Runs | None = None

    def enqueue(self, task: Task[Any, Any], calls: Sequence[Call]) -> list[Any]:
        return [self._run(task, received) for received in _received(task, calls)]

    async def aenqueue(self, task: Task[Any, Any], calls: Sequence[Call]) -> list[Any]:
        return [
            InlineAsyncHandle(await self._run_async(task, received))
            for received in _received(task, calls)
        ]

    def start(
        self, workflow: Workflow[..., Any], calls: Sequence[Call], keys: Sequence[str | None]
    ) -> list[Any]:
        if self._runs is None:
            self._runs = _Runs()
        self.calls += [(workflow, call) for call in calls]
        return InlineRuns(self._runs.start(workflow, calls, keys))

    def run_inline(self, workflow: Workflow[..., Any], call: Call) -> Any:
        (run,) = self.start(workflow, [call], [workflow._options.key])
        is_async_store = hasattr(workflow._options.store, "_bridge")
        return _Result(run) if is_async_store else run.result()

    def close(self) -> None:
        if self._runs is not None:
            self._runs.close()

    def _run(self, task: Task[Any, Any], call: Call) -> InlineHandle:
        self.calls.append((task, call))
        try:
            with handling(_message(task)):
                value = task.function(*call.args, **call.kwargs)
                if task.is_async:
                    value = _completed(value)
            return _handle(task, value)
        except Exception as exc:
            return InlineHandle(task.queue, None, exc)

    async def _run_async(self, task: Task[Any, Any], call: Call) -> InlineHandle:
        self.calls.append((task, call))
        try:
            with handling(_message(task)):
                value = task.function(*call.args, **call.kwargs)
                value = await value if task.is_async else value
            return _handle(task, value)
        except Exception as exc:
            return InlineHandle(task.queue, None, exc)


class _Result:
    """What to await for the result of a run."""

    def __init__(self, run: InlineRun) -> None:
        self._run = run

    def __await__(self) -> Generator[Any, None, Any]:
        async def awaited() -> Any:
            return await (await self._run).result()

        return awaited().__await__()


def _message(task: Task[Any, Any]) -> CurrentMessage:
    """The message that would have been sent, in its first attempt."""
    now, options = datetime.now(UTC), task._options
    return CurrentMessage(
        id=0,
        queue=task.queue,
        task=task.name,
        attempt=1,
        headers=dict(options.get("headers") or {}),
        key=options.get("key"),
        group=options.get("group"),
        enqueued_at=now,
        deadline=None if task.timeout is None else now + timedelta(seconds=task.timeout),
    )


def _received(task: Task[Any, Any], calls: Sequence[Call]) -> list[Call]:
    """The calls as a worker would get them. All are looked at before one is made."""
    payloads = [_through_json(task.encode(call)) for call in calls]
    if task.codec == PICKLE:
        return [Call(*unpickled(payload["pickle"])) for payload in payloads]
    return [task._signature.decode(payload) for payload in payloads]


def _handle(task: Task[Any, Any], value: Any) -> InlineHandle:
    """The result as it would come back."""
    outcome = as_kept(task, value)
    if isinstance(outcome, Failed):
        error = outcome.error
        kept = error if isinstance(error, BaseException) else TaskFailed(0, error)
        return InlineHandle(task.queue, None, kept)
    result = _through_json(outcome.result) if isinstance(outcome, Done) else None
    if task.codec == PICKLE:
        return InlineHandle(task.queue, None if result is None else unpickled(result), None)
    return InlineHandle(task.queue, task._signature.decode_result(result), None)


def _through_json(value: Any) -> Any:
    text = encode(value, max_bytes=LIMITS.max_payload_bytes, max_depth=LIMITS.max_payload_depth)
    return json.loads(text)


def _completed(coroutine: Any) -> Any:
    """The result of a coroutine for a caller that does not await, even inside an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="pgqrs-inline") as thread:
        return thread.submit(copy_context().run, asyncio.run, coroutine).result()
