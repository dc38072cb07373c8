"""What `enqueue` gives back for a task: to ask how it stands, to wait for its result, to cancel it.

Waiting needs no thread of its own: all waits on a store share one, see `stores.results`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime
from typing import Any, Generic, ParamSpec, TypeVar

from pgqrs.admin import Admin
from pgqrs.errors import (
    MessageNotFound,
    ResultTimedOut,
    StoreClosed,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskMismatch,
)
from pgqrs.repositories import archive, messages
from pgqrs.stores import Database
from pgqrs.stores.daemon_threads import DaemonThreads
from pgqrs.stores.results import LONGEST_REST, Answer, ResultWatch, result_watch
from pgqrs.stores.wakeups import RESULTS
from pgqrs.types import (
    ArchivedMessage,
    ArchiveReason,
    Duration,
    Message,
    TaskStatus,
    seconds,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Decode = Callable[[ArchivedMessage], Any]
"""What a result is to its caller."""
BRIEF = 0.1
"""Seconds. A caller that waits for less than this looks for the result itself first: the thread that
looks for all who wait may take longer.
"""
ENDED = {
    ArchiveReason.COMPLETED: TaskStatus.COMPLETED,
    ArchiveReason.FAILED: TaskStatus.FAILED,
    ArchiveReason.EXPIRED: TaskStatus.EXPIRED,
    ArchiveReason.MANUAL: TaskStatus.CANCELLED,
}


class Handle(Generic[R]):
    """A task that was enqueued. `TaskMismatch` is raised by all methods if the message is not of that
    task: its id may have been kept elsewhere, or found by a key.
    """

    def __init__(
        self, database: Database, queue: str, id: int, decode: Decode, *, task: str | None = None
    ) -> None:
        """`task` is the name of the task; None: of any, or of none."""
        self._database = database.of_queue(queue)
        self._decode = decode
        self._task = task
        self.queue = queue
        self.id = id

    def result(self, timeout: Duration | None = None) -> R:
        """What the task returned; waits for it.

        Raises `TaskFailed`, `TaskCancelled` or `TaskExpired` if there will be none, and
        `ResultTimedOut` if it was not done in time.
        """
        limit = None if timeout is None else seconds("timeout", timeout)
        if limit is not None and limit < BRIEF:
            ended = ended_now(self._database, self.id)
            if ended is not None:
                now: R = returned(ended, self._decode, self._task)
                return now
        answers: list[Answer] = []
        answered = threading.Event()

        def hear(answer: Answer) -> None:
            answers.append(answer)
            answered.set()

        watch = result_watch(self._database)
        watch.watch(self.id, self.queue, hear)
        try:
            answered.wait(limit)
        finally:
            watch.forget(self.id, hear)
        if not answers:
            raise ResultTimedOut(f"task {self.id}", limit or 0.0)
        result: R = returned(answers[0], self._decode, self._task)
        return result

    def status(self) -> TaskStatus:
        """Where it stands now."""
        return status_of(self._database, self.id, self._task)

    def cancel(self) -> bool:
        """End it, also while it runs: what comes of that does not count. Whether it was not done."""
        return cancel(self._database, self.id, self._task)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue!r}, {self.id})"


class AsyncHandle(Generic[R]):
    """A task that was enqueued, for asyncio. `TaskMismatch` is raised by all methods if the message is
    not of that task: its id may have been kept elsewhere, or found by a key.
    """

    def __init__(
        self, reach: Reach, queue: str, id: int, decode: Decode, *, task: str | None = None
    ) -> None:
        """`task` is the name of the task; None: of any, or of none."""
        self._reach = reach.of_queue(queue)
        self._decode = decode
        self._task = task
        self.queue = queue
        self.id = id

    async def result(self, timeout: Duration | None = None) -> R:
        """What the task returned; waits for it.

        Raises `TaskFailed`, `TaskCancelled` or `TaskExpired` if there will be none, and
        `ResultTimedOut` if it was not done in time.
        """
        limit = None if timeout is None else seconds("timeout", timeout)
        if limit is not None and limit < BRIEF:
            ended = await self._reach.run(ended_now, self._reach.database, self.id)
            if ended is not None:
                now: R = returned(ended, self._decode, self._task)
                return now
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()

        def hear(answer: Answer) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, answered, answer)

        watch = self._reach.watch()
        watch.watch(self.id, self.queue, hear)
        try:
            async with asyncio.timeout(limit):
                answer = await answered
        except TimeoutError:
            raise ResultTimedOut(f"task {self.id}", limit or 0.0) from None
        finally:
            watch.forget(self.id, hear)
        result: R = returned(answer, self._decode, self._task)
        return result

    async def status(self) -> TaskStatus:
        """Where it stands now."""
        return await self._reach.run(status_of, self._reach.database, self.id, self._task)

    async def cancel(self) -> bool:
        """End it, also while it runs: what comes of that does not count. Whether it was not done."""
        return await self._reach.run(cancel, self._reach.database, self.id, self._task)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue!r}, {self.id})"


def _settle(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)


def returned(answer: Answer, decode: Decode, task: str | None = None) -> Any:
    """The result in an answer, or the error that says why there is none."""
    if isinstance(answer, BaseException):
        raise answer
    id = answer.original_message_id
    _check(id, answer.payload, task)
    if answer.archive_reason is ArchiveReason.FAILED:
        raise TaskFailed(id, answer.error)
    if answer.archive_reason is ArchiveReason.EXPIRED:
        raise TaskExpired(id)
    if answer.archive_reason is ArchiveReason.MANUAL:
        raise TaskCancelled(id)
    return decode(answer)


def ended_now(database: Database, id: int) -> ArchivedMessage | None:
    """How this message ended; None if it has not."""
    return database.read(lambda connection: archive.outcome(connection, id))


def status_of(database: Database, id: int, task: str | None = None) -> TaskStatus:
    """Where the task of this message stands."""
    found = _find(database, id)
    _check(id, found.payload, task)
    if isinstance(found, Message):
        return _status_in_queue(found, database.now() or datetime.now(UTC))
    return ENDED[found.archive_reason]


def cancel(database: Database, id: int, task: str | None) -> bool:
    """End the task of this message. Whether it was not done."""
    if task is not None:
        _check(id, _find(database, id).payload, task)
    return Admin(database).cancel(id)


def _find(database: Database, id: int) -> Message | ArchivedMessage:
    # In this order: messages move to the archive, and never back.
    message = database.read(lambda connection: messages.get(connection, id))
    found = message or database.read(lambda connection: archive.get(connection, id))
    if found is None:
        raise MessageNotFound(id)
    return found


def _check(id: int, payload: Any, task: str | None) -> None:
    """Refuse what is not of this task."""
    if task is None:
        return
    found = payload.get("task") if isinstance(payload, dict) else None
    if found != task:
        raise TaskMismatch(id, task, found if isinstance(found, str) else None)


def _status_in_queue(message: Message, now: datetime) -> TaskStatus:
    if message.consumer_worker_id is not None:
        return TaskStatus.RUNNING
    if message.expires_at is not None and message.expires_at <= now:
        return TaskStatus.EXPIRED
    return TaskStatus.DELAYED if message.vt > now else TaskStatus.QUEUED


_threads = DaemonThreads("pgqrs-handle", limit=32)


class Reach:
    """How async code reaches the database of a store, sync or async."""

    def __init__(self, store: Any) -> None:
        self.database: Database = store._database.lasting
        self._given: Database = store._database
        self._bridge = getattr(store, "_bridge", None)
        self._within = getattr(store, "_within", None)

    def of_queue(self, queue: str) -> Reach:
        """The same for the shard that a queue is on."""
        reach = copy(self)
        reach.database = self.database.of_queue(queue)
        return reach

    async def write(self, call: Callable[[Database], T]) -> T:
        """Call this with the database; if the store is a transaction, inside of it."""
        if self._within is not None:
            within: T = await self._within(call)
            return within
        return await self.run(call, self._given)

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run sync code without blocking the loop."""
        if self._bridge is None:
            return await _threads.run(call, *args, **kwargs)
        answer: T = await self._bridge.run(call, *args, **kwargs)
        return answer

    def watch(self) -> ResultWatch:
        """What watches for results: the thread of a database that threads can use, else a task."""
        if self._bridge is None or self._bridge.has_threads:
            return result_watch(self.database)
        watch = self.database.result_watch
        if not isinstance(watch, LoopResultWatch):
            watch = self.database.result_watch = LoopResultWatch(self.database, self.run)
        return watch


class LoopResultWatch(ResultWatch):
    """A watch of a database that only the event loop can reach: a task instead of a thread."""

    def __init__(self, database: Database, run: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(database)
        self._in_loop = run
        self._news_came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._news_came.set)

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news_came = asyncio.Event()
        self._task = self._loop.create_task(self._attend(), name="pgqrs-results")

    async def end(self) -> None:
        """The store is closed: who still waits is told so."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._answer(dict.fromkeys(self._ids(), StoreClosed()))

    async def _attend(self) -> None:
        with self._database.wakeups.doorbell(RESULTS, self._ring):
            while True:
                self._news_came.clear()
                began = self._loop.time()
                pause = await self._in_loop(self.step)
                if pause is None:
                    return
                ended = self._loop.time()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news_came.wait(), pause)
                    rest = min(LONGEST_REST, ended - began) - (self._loop.time() - ended)
                    await asyncio.sleep(max(0.0, rest))
