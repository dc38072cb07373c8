"""A lease, a delay or a rate counts from the moment the lock was there, not from when the wait began.

Somebody else has the lock for ten seconds of a clock that the test moves. If the waiting thread has not
come to its wait by then, a test passes without showing anything; it never fails for that.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqrs
from pgqrs.testing import ManualClock

LEASE = 5
A_WHILE = 0.3
Call = Callable[[], Any]


def while_waiting(lock: Any, call: Call, meanwhile: Call) -> Any:
    """What `call` returns, which waits for a lock while something else happens."""
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(call()))
    with lock:
        waiting.start()
        time.sleep(A_WHILE)
        meanwhile()
    waiting.join(60)
    (result,) = got
    return result


class OnSqlite:
    """A file, whose write lock another program takes."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "test.db"

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def store(self, path: Path, clock: ManualClock) -> Iterator[pgqrs.Store]:
        with pgqrs.Store(f"sqlite:///{path}", clock=clock, upgrade=True) as store:
            yield store

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")
            other.close()


class TestSqlite(OnSqlite):
    @pytest.fixture(autouse=True)
    def queue(self, store: pgqrs.Store) -> None:
        store.admin().create_queue("q", lease=LEASE, max_in_flight=5)

    def test_a_lease(self, store: pgqrs.Store, path: Path, clock: ManualClock) -> None:
        store.producer("q").enqueue_many(["one", "two"])
        consumer = store.consumer("q").open()
        consumer.dequeue()
        (message,) = while_waiting(
            self.locked(path), consumer.dequeue, lambda: clock.advance(2 * LEASE)
        )
        assert message.dequeued_at == clock.now()
        assert message.vt == clock.now() + timedelta(seconds=LEASE)

    @pytest.mark.parametrize("change", ["extend", "release", "fail"])
    def test_what_a_holder_asks_for(
        self, store: pgqrs.Store, path: Path, clock: ManualClock, change: str
    ) -> None:
        store.producer("q").enqueue("one")
        consumer = store.consumer("q", lease=60).open()
        (message,) = consumer.dequeue()
        calls: dict[str, Call] = {
            "extend": lambda: consumer.extend(message, 30),
            "release": lambda: consumer.release(message, delay=30),
            "fail": lambda: consumer.fail(message, "oops", delay=30),
        }
        while_waiting(self.locked(path), calls[change], lambda: clock.advance(10))
        assert store.admin().get_message(message.id).vt == clock.now() + timedelta(seconds=30)

    def test_in_a_commit_of_many(self, store: pgqrs.Store, path: Path, clock: ManualClock) -> None:
        store.producer("q").enqueue_many(range(4))
        consumers = [store.consumer("q").open() for _ in range(3)]
        consumers[0].dequeue()  # the store knows now that the queue has a limit
        got: list[pgqrs.Message] = []
        threads = [
            threading.Thread(target=lambda c=consumer: got.extend(c.dequeue()))
            for consumer in consumers
        ]
        with self.locked(path):
            for thread in threads:
                thread.start()
            time.sleep(A_WHILE)
            clock.advance(2 * LEASE)
        for thread in threads:
            thread.join(60)
        assert [message.dequeued_at for message in got] == [clock.now()] * 3


class TestRate(OnSqlite):
    def test_a_rate(self, store: pgqrs.Store, path: Path, clock: ManualClock) -> None:
        store.admin().create_queue("q", rate=pgqrs.Rate(5, per=2))
        store.producer("q").enqueue_many(range(50))
        first, second = store.consumer("q").open(), store.consumer("q").open()
        assert len(first.dequeue(5)) == 5
        clock.advance(3)
        got = while_waiting(self.locked(path), lambda: first.dequeue(5), lambda: clock.advance(3))
        assert len(got) == 5
        assert second.dequeue(5) == []


class TestPostgres:
    """The server's own clock: nothing here depends on how quick the machine is."""

    @pytest.fixture
    def store(self, postgres_database: str) -> Iterator[pgqrs.Store]:
        with pgqrs.Store(postgres_database, upgrade=True, retry_for=60) as store:
            store.admin().create_queue("q", lease=LEASE)
            yield store

    @pytest.fixture
    def other(self, postgres_database: str) -> Iterator[psycopg.Connection]:
        with psycopg.connect(postgres_database) as connection:
            yield connection

    def waited(self, other: psycopg.Connection, lock: str, call: Call) -> tuple[Any, datetime]:
        """What a call returns that waits for this lock, and a time before the lock was given up."""
        given_up: list[datetime] = []

        def give_up() -> None:
            (row,) = other.execute("SELECT clock_timestamp()").fetchall()
            given_up.append(row[0])

        @contextmanager
        def locked() -> Iterator[None]:
            other.execute(lock.encode())
            yield
            other.rollback()

        return while_waiting(locked(), call, give_up), given_up[0]

    @pytest.mark.parametrize("limits", [{}, {"max_in_flight": 5}], ids=["no limits", "limits"])
    def test_a_lease(
        self, store: pgqrs.Store, other: psycopg.Connection, limits: dict[str, int]
    ) -> None:
        store.admin().configure_queue("q", **limits)
        consumer = store.consumer("q").open()
        consumer.dequeue()
        store.producer("q").enqueue("one")
        table = "pgqrs_limits" if limits else "pgqrs_messages"
        (message,), since = self.waited(other, f"LOCK TABLE {table}", consumer.dequeue)
        assert message.dequeued_at is not None
        assert message.dequeued_at >= since
        assert message.vt == message.dequeued_at + timedelta(seconds=LEASE)

    @pytest.mark.parametrize("change", ["extend", "release", "fail"])
    def test_what_a_holder_asks_for(
        self, store: pgqrs.Store, other: psycopg.Connection, change: str
    ) -> None:
        first, second = store.producer("q").enqueue_many(["one", "two"])
        consumer = store.consumer("q", lease=600).open()
        held = consumer.dequeue(2)
        calls: dict[str, Call] = {
            "extend": lambda: consumer.extend_many(held, 300),
            "release": lambda: consumer.release_many(held, delay=300),
            "fail": lambda: consumer.fail_many(held, "oops", delay=300),
        }
        # The last of them: the others are locked, and changed, before the wait.
        lock = f"SELECT 1 FROM pgqrs_messages WHERE id = {second} FOR UPDATE"
        _, since = self.waited(other, lock, calls[change])
        for id in (first, second):
            assert store.admin().get_message(id).vt >= since + timedelta(seconds=300)

    def test_a_rate(self, store: pgqrs.Store, other: psycopg.Connection) -> None:
        store.admin().configure_queue("q", rate=pgqrs.Rate(5, per=60))
        consumer = store.consumer("q").open()
        consumer.dequeue()
        store.producer("q").enqueue_many(range(9))
        lock = "SELECT 1 FROM pgqrs_limits FOR UPDATE"
        claimed, since = self.waited(other, lock, lambda: consumer.dequeue(9))
        assert len(claimed) == 5
        ((log,),) = other.execute("SELECT rate_taken FROM pgqrs_limits").fetchall()
        ((started, _, number),) = log
        assert started >= since.timestamp()
        assert number == 5
