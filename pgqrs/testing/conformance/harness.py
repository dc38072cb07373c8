"""What a backend provides to be tested, and the fixtures the tests are written with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pytest

from pgqrs.clock import Clock
from pgqrs.outcomes import Settled
from pgqrs.tasks import Task
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.portal import Synced
from pgqrs.worker import Worker

QUEUE = "tasks"
RUNS = "workflows"
BESIDE = "newer"
"""A queue that is not there. One transaction covers these three also in a store of two shards."""
Drain = Callable[..., int]


def worker(store: Any, **options: Any) -> Any:
    """A worker on a store, sync or async as the store is."""
    if isinstance(store, Synced):
        return store._portal.worker(store, **options)
    return Worker(store, **options)


def enqueue(task: Task[Any, Any], store: Any, *args: Any, **kwargs: Any) -> Any:
    """Enqueue a task, sync or async as the store is. Returns its handle."""
    if isinstance(store, Synced):
        bound = task.options(store=store._wrapped)
        handle = store._portal.run(lambda: bound.aenqueue(*args, **kwargs))
        return Synced(store._portal, handle)
    return task.options(store=store).enqueue(*args, **kwargs)


def enqueue_many(task: Task[Any, Any], store: Any, calls: Any, **options: Any) -> Any:
    """Enqueue many calls of a task, sync or async as the store is. Returns their handles."""
    if isinstance(store, Synced):
        bound = task.options(store=store._wrapped)
        handles = store._portal.run(lambda: bound.aenqueue_many(calls, **options))
        return [Synced(store._portal, handle) for handle in handles]
    return task.options(store=store).enqueue_many(calls, **options)


def handle(task: Task[Any, Any], store: Any, id: int) -> Any:
    """The handle of a task that was enqueued before, sync or async as the store is."""
    if isinstance(store, Synced):
        made = store._portal.run(lambda: _returned(task.ahandle(id, store=store._wrapped)))
        return Synced(store._portal, made)
    return task.handle(id, store=store)


async def _returned(value: Any) -> Any:
    return value


class OpenTransaction(Protocol):
    """A transaction of the application's own, as a context manager gave it."""

    using: Any

    def execute(self, sql: str) -> None:
        """Run a statement of the application's in it."""


class Harness(ABC):
    """One empty database with the schema installed, and stores on it."""

    clock: ManualClock

    @abstractmethod
    def open(self, *, clock: Clock | None, **settings: Any) -> Any:
        """A store on this database; closed by the harness."""

    @abstractmethod
    def transaction(self, store: Any) -> AbstractContextManager[OpenTransaction]:
        """A transaction: committed at the end of the block, rolled back by an exception."""

    @abstractmethod
    def corrupt(self, message_id: int) -> bool:
        """Replace a stored payload by text that is not JSON; False where the database cannot hold
        such.
        """


@pytest.fixture
def clock(harness: Harness) -> ManualClock:
    return harness.clock


@pytest.fixture
def store(harness: Harness) -> Any:
    """A store whose time stands still until the test moves `clock`."""
    return harness.open(clock=harness.clock)


@pytest.fixture
def admin(store: Any) -> Any:
    admin = store.admin()
    admin.create_queue(QUEUE, lease=30, max_read_ct=3)
    return admin


@pytest.fixture
def producer(store: Any, admin: Any) -> Any:
    return store.producer(QUEUE)


@pytest.fixture
def consumer(store: Any, admin: Any) -> Iterator[Any]:
    with store.consumer(QUEUE) as consumer:
        yield consumer


@pytest.fixture
def rival(store: Any, admin: Any) -> Iterator[Any]:
    """A second consumer of the same queue."""
    with store.consumer(QUEUE) as consumer:
        yield consumer


class Crash(BaseException):
    """As if the process had died here: nothing of it is recorded."""


@pytest.fixture
def drain(store: Any) -> Drain:
    """Run what is ready, and what that makes ready, until nothing is. Returns how many were run."""
    store.admin().create_queue(RUNS, lease=30, max_read_ct=3, if_not_exists=True)

    def drained(*known: Any) -> int:
        count = 0
        with store.consumer(RUNS) as consumer:
            while found := consumer.dequeue(10):
                for message in found:
                    count += 1
                    outcome = store.workflows.execute(message, known)
                    assert outcome == Settled()
        return count

    return drained


@pytest.fixture
def crash_once(store: Any, clock: ManualClock) -> Drain:
    """Run what is ready with a worker that dies of a `Crash`; then its leases lapse."""

    def crashed(*known: Any) -> int:
        with store.consumer(RUNS) as consumer:
            for message in consumer.dequeue(10):
                with pytest.raises(Crash):
                    store.workflows.execute(message, known)
        clock.advance(31)
        return 1

    return crashed
