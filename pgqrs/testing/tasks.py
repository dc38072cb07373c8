"""Testing an application's tasks: run them off, look at what was enqueued, or run them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pgqrs.codecs import Call
from pgqrs.handles import Handle
from pgqrs.store import Store
from pgqrs.tasks import Task, _intercept
from pgqrs.types import Message, TaskStatus
from pgqrs.worker import Worker


def drain(store: Store, *queues: str, **options: Any) -> int:
    """Handle what the queues hold now, all of them if none is named. Returns how many ended.

    `options` are those of `Worker`.
    """
    names = queues or tuple(queue.queue_name for queue in store.admin().list_queues())
    if not names:
        return 0
    before = _ended(store)
    Worker(store, queues=names, **options).run(until_empty=True, signals=False)
    return _ended(store) - before


def _ended(store: Store) -> int:
    return sum(sum(stats.archived.values()) for stats in store.admin().stats())


def enqueued(store: Store, queue: str) -> list[Message]:
    """What a queue holds."""
    return store.admin().peek(queue, 100_000)


def assert_enqueued(
    store: Store,
    what: Task[Any, Any] | str,
    *args: Any,
    count: int | None = None,
    matching: Callable[[Message], bool] | None = None,
    **kwargs: Any,
) -> list[Message]:
    """Assert that a task, with these arguments if there are any, or a message in a queue of this name
    was enqueued: at least once, or `count` times. Returns the messages.
    """
    if isinstance(what, Task):
        wanted = what.encode(Call(args, kwargs)) if args or kwargs else None
        found = [
            message
            for message in enqueued(store, what.queue)
            if message.payload == wanted or (wanted is None and _names(message, what))
        ]
    else:
        found = enqueued(store, what)
    found = [message for message in found if matching is None or matching(message)]
    right = bool(found) if count is None else len(found) == count
    expected = "at least one" if count is None else count
    assert right, f"expected {expected} of {what!r}, found {len(found)}"
    return found


def _names(message: Message, task: Task[Any, Any]) -> bool:
    return isinstance(message.payload, dict) and message.payload.get("task") == task.name


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


@contextmanager
def inline() -> Iterator[list[tuple[Task[Any, Any], Call]]]:
    """In this block `enqueue` runs the task in place, after sending its arguments through JSON and back.

    What a task raises is raised by `handle.result()`. Gives the list of calls.
    """
    calls: list[tuple[Task[Any, Any], Call]] = []

    def run(task: Task[Any, Any], call: Call) -> InlineHandle:
        received = task._signature.decode(task._signature.encode(call)) if not task.codec else call
        calls.append((task, received))
        try:
            return InlineHandle(task.queue, task(*received.args, **received.kwargs), None)
        except Exception as exc:
            return InlineHandle(task.queue, None, exc)

    token = _intercept.set(run)
    try:
        yield calls
    finally:
        _intercept.reset(token)
