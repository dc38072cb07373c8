"""A small task queue over a small backend: enqueue, reserve, mark as done or failed, get the result.

`TaskQueue` needs of its backend only what `Backend` says. `StoreBackend` is that on a store, on every
database: at least once, and safe with any number of worker processes. Its tasks are those of
`pgqrs.tasks`, so a `Worker` on the same queue runs them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, Self, TypeVar

from pgqrs.aio.consumer import AsyncConsumer
from pgqrs.aio.store import AsyncStore
from pgqrs.codecs import Call
from pgqrs.errors import (
    InvalidArgument,
    ResultTimedOut,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
)
from pgqrs.handles import AsyncHandle, Reach
from pgqrs.repositories import archive
from pgqrs.tasks import QUEUE, as_task, declare
from pgqrs.types import ArchivedMessage, ArchiveReason, Duration, Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReservedTask:
    """A task that is ours to run, until the lease of its queue is over."""

    task_id: int
    payload: Any
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a task ended."""

    task_id: int
    status: str
    value: Any
    error: str | None
    enqueued_at: datetime
    finished_at: datetime

    @property
    def is_success(self) -> bool:
        return self.status == "success"


class Backend(Protocol):
    """What a task queue needs of its storage."""

    async def connect(self) -> None:
        """Make it ready for use."""

    async def enqueue(self, payload: Any, *, available_at: datetime | None = None) -> int:
        """Store a task, to be run from then on. Returns its id."""

    async def reserve(self, max_items: int = 1) -> Sequence[ReservedTask]:
        """Take up to so many tasks; nobody else gets them meanwhile."""

    async def mark_success(self, task_id: int, value: Any = None) -> None:
        """A reserved task is done, with this result."""

    async def mark_failure(self, task_id: int, error: str | BaseException) -> None:
        """A reserved task failed for good."""

    async def get_result(self, task_id: int, timeout: Duration | None = None) -> TaskResult | None:
        """How a task ended; None if it has not within this time."""

    async def close(self) -> None:
        """Let go of what it holds."""


class StoreBackend:
    """A backend on a store. The tables and the queue are created when it connects."""

    def __init__(
        self, store: AsyncStore | str, *, queue: str = QUEUE, lease: Duration | None = None
    ) -> None:
        self._owned = isinstance(store, str)
        self.store = AsyncStore(store) if isinstance(store, str) else store
        self.queue = queue
        self._lease = lease
        self._consumer: AsyncConsumer | None = None
        self._reserved: dict[int, Message] = {}

    async def connect(self) -> None:
        await self.store.open()
        await self.store.admin().install()
        await self.store.admin().create_queue(self.queue, if_not_exists=True)

    async def enqueue(self, payload: Any, *, available_at: datetime | None = None) -> int:
        return await self.store.producer(self.queue).enqueue(payload, eta=available_at)

    async def reserve(self, max_items: int = 1) -> list[ReservedTask]:
        if self._consumer is None:
            self._consumer = self.store.consumer(self.queue, lease=self._lease)
        messages = await self._consumer.dequeue(max_items)
        self._reserved |= {message.id: message for message in messages}
        return [ReservedTask(m.id, m.payload, m.attempt) for m in messages]

    async def mark_success(self, task_id: int, value: Any = None) -> None:
        await self._held().ack(self._of(task_id), result=value)
        self._reserved.pop(task_id, None)

    async def mark_failure(self, task_id: int, error: str | BaseException) -> None:
        await self._held().fail(self._of(task_id), error, dead=True)
        self._reserved.pop(task_id, None)

    async def get_result(self, task_id: int, timeout: Duration | None = None) -> TaskResult | None:
        if timeout is not None:
            handle: AsyncHandle[TaskResult] = AsyncHandle(
                Reach(self.store), self.queue, task_id, lambda ended: ended
            )
            try:
                await handle.result(timeout)
            except ResultTimedOut:
                return None
            except (TaskFailed, TaskCancelled, TaskExpired):
                pass  # it is over: how, the archive says
        reach = Reach(self.store).of_queue(self.queue)
        ended = await reach.run(reach.database.read, lambda c: archive.outcome(c, task_id))
        return None if ended is None else _result(ended)

    async def close(self) -> None:
        if self._consumer is not None:
            await self._consumer.close()
        if self._owned:
            await self.store.close()

    def _held(self) -> AsyncConsumer:
        if self._consumer is None:
            raise InvalidArgument("task_id", "nothing was reserved here")
        return self._consumer

    def _of(self, task_id: int) -> Message:
        try:
            return self._reserved[task_id]
        except KeyError:
            raise InvalidArgument("task_id", f"task {task_id} was not reserved here") from None


def _result(ended: ArchivedMessage) -> TaskResult:
    completed = ended.archive_reason is ArchiveReason.COMPLETED
    return TaskResult(
        ended.original_message_id,
        "success" if completed else "failed",
        ended.result,
        ended.error if ended.error or completed else str(ended.archive_reason),
        ended.enqueued_at,
        ended.archived_at,
    )


class TaskQueue:
    """Enqueue functions, get their results."""

    def __init__(self, backend: Backend | AsyncStore | str, *, queue: str = QUEUE) -> None:
        """On a backend, or on a store or a URL: then on a `StoreBackend`."""
        if isinstance(backend, AsyncStore | str):
            backend = StoreBackend(backend, queue=queue)
        self.backend: Backend = backend

    async def connect(self) -> Self:
        await self.backend.connect()
        return self

    async def enqueue(
        self, func: Callable[..., Any], *args: Any, eta: datetime | None = None, **kwargs: Any
    ) -> int:
        """Have this function called by a worker. Returns the id of the task.

        A task, or a function that other processes find by its import path; anything else is refused.
        Workers run it that were given it (`Worker(tasks=[function])`), and those of this process.
        """
        return await self.backend.enqueue(_payload(func, Call(args, kwargs)), available_at=eta)

    async def get_result(self, task_id: int, timeout: Duration | None = None) -> TaskResult | None:
        """How a task ended; None if it has not, within this time if one is given."""
        return await self.backend.get_result(task_id, timeout)

    async def close(self) -> None:
        await self.backend.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _payload(func: Callable[..., Any], call: Call) -> dict[str, Any]:
    task = as_task(func)
    return (task if task is func else declare(task)).encode(call)


class SyncTaskQueue:
    """A `TaskQueue` for code that does not await: an event loop in a thread of its own."""

    def __init__(self, backend: Backend | str, *, queue: str = QUEUE) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="pgqrs-taskqueue", daemon=True
        )
        self._thread.start()

        async def made() -> TaskQueue:
            return TaskQueue(backend, queue=queue)

        self._queue = self._run(made())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def connect(self) -> Self:
        self._run(self._queue.connect())
        return self

    def enqueue(
        self, func: Callable[..., Any], *args: Any, eta: datetime | None = None, **kwargs: Any
    ) -> int:
        """Have this function called by a worker. Returns the id of the task."""
        return self._run(self._queue.enqueue(func, *args, eta=eta, **kwargs))

    def get_result(self, task_id: int, timeout: Duration | None = None) -> TaskResult | None:
        """How a task ended; None if it has not, within this time if one is given."""
        return self._run(self._queue.get_result(task_id, timeout))

    def close(self) -> None:
        self._run(self._queue.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()
