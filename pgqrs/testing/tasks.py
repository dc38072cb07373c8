"""Testing an application's tasks and runs: run them off, and look at what was enqueued.

All of it takes a `Store`, and returns; or an `AsyncStore`, and returns what to await.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, overload

from pgqrs.aio.store import AsyncStore
from pgqrs.aio.worker import AsyncWorker
from pgqrs.codecs import Call
from pgqrs.errors import InvalidArgument, QueueNotFound, RunFailed, TaskFailed
from pgqrs.handlers import Delivery
from pgqrs.hooks import Hook
from pgqrs.outcomes import Failed, Outcome, Settled
from pgqrs.store import Store
from pgqrs.tasks import Task
from pgqrs.types import Message, Queue, QueueStats, RunStatus
from pgqrs.worker import Worker
from pgqrs.workflows.decorators import declared
from pgqrs.workflows.routing import route as run_route

MOST = 100_000
"""Messages of a queue that are looked at."""


@overload
def drain(store: Store, *queues: str, raise_errors: bool = True, **options: Any) -> int: ...
@overload
def drain(
    store: AsyncStore, *queues: str, raise_errors: bool = True, **options: Any
) -> Awaitable[int]: ...
def drain(store: Any, *queues: str, raise_errors: bool = True, **options: Any) -> Any:
    """Run the tasks and runs that are due in these queues, all queues if none is named, and what these
    enqueue, until nothing is due. Returns how many messages ended; with an `AsyncStore` what to await.

    If tasks fail, the error of the first is raised once nothing is due any more; with
    `raise_errors=False` they end as in a worker. All tasks and workflows that are declared in this
    process are known; `options` are those of `Worker`. A run that waits has not ended.
    """
    if isinstance(store, AsyncStore):
        return _drain_async(store, queues, raise_errors, options)
    if not isinstance(store, Store):
        raise InvalidArgument("store", f"expected a store, got {type(store).__name__}")
    drained, admin = _Drained(queues, options), store.admin()
    before = _ended(admin.stats())
    while names := drained.names(admin.list_queues(), admin.stats()):
        Worker(store, queues=names, **drained.options()).run(until_empty=True, signals=False)
    if raise_errors:
        drained.raise_first()
    return _ended(admin.stats()) - before + drained.runs


async def _drain_async(
    store: AsyncStore, queues: Sequence[str], raise_errors: bool, options: dict[str, Any]
) -> int:
    drained, admin = _Drained(queues, options), store.admin()
    before = _ended(await admin.stats())
    while names := drained.names(await admin.list_queues(), await admin.stats()):
        worker = AsyncWorker(store, queues=names, **drained.options())
        await worker.run(until_empty=True, signals=False)
    if raise_errors:
        drained.raise_first()
    return _ended(await admin.stats()) - before + drained.runs


class _Drained(Hook):
    """What a drain has to do, and what came of it."""

    def __init__(self, queues: Sequence[str], options: dict[str, Any]) -> None:
        self.runs = 0
        self._queues = queues
        self._options = dict(options)
        self._hooks = tuple(self._options.pop("hooks", ()))
        self._routes = tuple(self._options.pop("routes", ()))
        self._handled, self._handled_before = 0, -1
        self._errors: list[tuple[Delivery, str, BaseException]] = []

    def names(self, queues: Iterable[Queue], stats: Iterable[QueueStats]) -> list[str]:
        """The queues to look into now; none if the last look found nothing, or left nothing."""
        existing = [queue.queue_name for queue in queues]
        wanted = [name for name in self._queues or existing if name in existing]
        is_first = self._handled_before < 0
        found_nothing = self._handled == self._handled_before
        left = any(one.ready for one in stats if one.queue in wanted)
        self._handled_before = self._handled
        return wanted if is_first or (left and not found_nothing) else []

    def options(self) -> dict[str, Any]:
        """Options of the worker. Workflows are given as a route: that adds no queues."""
        known = run_route(declared())
        return {**self._options, "hooks": (*self._hooks, self), "routes": (*self._routes, known)}

    def after(self, delivery: Delivery, name: str, outcome: Outcome) -> None:
        self._handled += 1
        if isinstance(outcome, Settled) and outcome.ending is not None:
            self.runs += 1  # the messages of runs leave no trace in the archive
        error = _error_of(delivery, outcome)
        if error is not None:
            self._errors.append((delivery, name, error))

    def raise_first(self) -> None:
        """Raise what the first that failed raised."""
        if not self._errors:
            return
        delivery, name, error = self._errors[0]
        message, others = delivery.message, len(self._errors) - 1
        more = f", and {others} more failed" if others else ""
        error.add_note(f"raised by {name}: message {message.id} of {message.queue}{more}")
        raise error


def _error_of(delivery: Delivery, outcome: Outcome) -> BaseException | None:
    if isinstance(outcome, Failed):
        error = outcome.error
        return error if isinstance(error, BaseException) else TaskFailed(delivery.message.id, error)
    ending = outcome.ending if isinstance(outcome, Settled) else None
    if ending is not None and ending.status is RunStatus.FAILED:
        return RunFailed(ending.id, ending.error)
    return None


def _ended(stats: Iterable[QueueStats]) -> int:
    return sum(sum(one.archived.values()) for one in stats)


@overload
def enqueued(store: Store, queue: str) -> list[Message]: ...
@overload
def enqueued(store: AsyncStore, queue: str) -> Awaitable[list[Message]]: ...
def enqueued(store: Any, queue: str) -> Any:
    """What a queue holds: nothing, if there is none of this name yet."""
    if isinstance(store, AsyncStore):
        return _enqueued_async(store, queue)
    try:
        return store.admin().peek(queue, MOST)
    except QueueNotFound:
        return []


async def _enqueued_async(store: AsyncStore, queue: str) -> list[Message]:
    try:
        return await store.admin().peek(queue, MOST)
    except QueueNotFound:
        return []


@overload
def assert_enqueued(
    store: Store,
    what: Task[Any, Any] | str,
    *args: Any,
    count: int | None = None,
    matching: Callable[[Message], bool] | None = None,
    **kwargs: Any,
) -> list[Message]: ...
@overload
def assert_enqueued(
    store: AsyncStore,
    what: Task[Any, Any] | str,
    *args: Any,
    count: int | None = None,
    matching: Callable[[Message], bool] | None = None,
    **kwargs: Any,
) -> Awaitable[list[Message]]: ...
def assert_enqueued(
    store: Any,
    what: Task[Any, Any] | str,
    *args: Any,
    count: int | None = None,
    matching: Callable[[Message], bool] | None = None,
    **kwargs: Any,
) -> Any:
    """Assert that a task, with these arguments if there are any, or a message in a queue of this name
    was enqueued: at least once, or `count` times. Returns the messages; with an `AsyncStore` what to
    await, and nothing is asserted before.
    """
    queue = what.queue if isinstance(what, Task) else what

    def check(found: list[Message]) -> list[Message]:
        return _checked(found, what, Call(args, kwargs), count, matching)

    if isinstance(store, AsyncStore):
        return _then(_enqueued_async(store, queue), check)
    return check(enqueued(store, queue))


async def _then(
    found: Awaitable[list[Message]], check: Callable[[list[Message]], list[Message]]
) -> list[Message]:
    return check(await found)


def _checked(
    found: list[Message],
    what: Task[Any, Any] | str,
    call: Call,
    count: int | None,
    matching: Callable[[Message], bool] | None,
) -> list[Message]:
    if isinstance(what, Task):
        wanted = what.encode(call) if call.args or call.kwargs else None
        found = [
            message
            for message in found
            if message.payload == wanted or (wanted is None and _names(message, what))
        ]
    found = [message for message in found if matching is None or matching(message)]
    right = bool(found) if count is None else len(found) == count
    expected = "at least one" if count is None else count
    assert right, f"expected {expected} of {what!r}, found {len(found)}"
    return found


def _names(message: Message, task: Task[Any, Any]) -> bool:
    return isinstance(message.payload, dict) and message.payload.get("task") == task.name
