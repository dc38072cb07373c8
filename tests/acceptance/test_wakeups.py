"""Wake-ups from another process: two stores that share nothing but the database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event

import pgqrs
from pgqrs.stores import wakeups

LONG = 60


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears looks very seldom by himself, and who is deaf too: what arrives was heard of."""
    monkeypatch.setattr(wakeups, "SELDOM", LONG)
    monkeypatch.setattr(wakeups, "OFTEN", LONG)


@pytest.fixture
def here(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        yield store


@pytest.fixture
def elsewhere(database: str, here: pgqrs.Store) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database) as store:
        yield store


def start_waiting(store: pgqrs.Store) -> tuple[threading.Thread, list[pgqrs.Message]]:
    """A dequeue that waits, and whose sentry hears."""
    found: list[pgqrs.Message] = []
    consumer = store.consumer("tasks").open()
    thread = threading.Thread(target=lambda: found.extend(consumer.dequeue(wait=LONG)))
    thread.start()
    until_expected(store, thread)
    return thread, found


def until_expected(store: pgqrs.Store, thread: threading.Thread) -> None:
    """Until producers elsewhere know that somebody waits; or the waiting is over already."""
    deadline = time.monotonic() + 30
    while thread.is_alive() and not is_expected(store):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_expected(store: Any) -> bool:
    doorbells = store._database.wakeups._doorbells
    if not store.supports_notify:
        return bool(doorbells)
    with psycopg.connect(store.config.dsn) as connection:
        found = connection.execute("SELECT waiting_until FROM pgqrs_queues").fetchone()
    return bool(doorbells) and found is not None and found[0] is not None


def test_an_enqueue_elsewhere_wakes_who_waits(here: pgqrs.Store, elsewhere: pgqrs.Store) -> None:
    for n in range(5):
        thread, found = start_waiting(here)
        elsewhere.producer("tasks").enqueue(n)
        thread.join()
        assert [message.payload for message in found] == [n]


def test_a_commit_elsewhere_wakes_who_waits(here: pgqrs.Store, elsewhere: pgqrs.Store) -> None:
    thread, found = start_waiting(here)
    with elsewhere.engine.begin() as connection:
        elsewhere.using(connection).enqueue_many("tasks", ["in a transaction"])
        assert found == []
    thread.join()
    assert [message.payload for message in found] == ["in a transaction"]


def test_a_release_elsewhere_wakes_who_waits(here: pgqrs.Store, elsewhere: pgqrs.Store) -> None:
    elsewhere.producer("tasks").enqueue("back")
    with elsewhere.consumer("tasks") as holder:
        (held,) = holder.dequeue(lease=LONG)
        thread, found = start_waiting(here)
        holder.release(held)
        thread.join()
    assert [message.id for message in found] == [held.id]


def test_async_consumers_are_woken_from_elsewhere(
    database: str, here: pgqrs.Store, elsewhere: pgqrs.Store
) -> None:
    async def main() -> list[Any]:
        async with pgqrs.AsyncStore(database) as store, store.consumer("tasks") as consumer:
            got: list[Any] = []
            threads = threading.active_count()

            async def collect() -> None:
                async for message in consumer:
                    got.append(message.payload)
                    await consumer.ack(message)
                    if len(got) == 3:
                        await consumer.close()

            task = asyncio.create_task(collect())
            for n in range(3):
                while not is_expected(store):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(elsewhere.producer("tasks").enqueue, n)
                while len(got) <= n:
                    await asyncio.sleep(0.01)
            await task
            assert threading.active_count() <= threads + 40
            return got

    assert asyncio.run(main()) == [0, 1, 2]


def test_nothing_is_notified_while_nobody_waits(postgres_database: str) -> None:
    with (
        pgqrs.Store(postgres_database, upgrade=True) as store,
        psycopg.connect(postgres_database, autocommit=True) as listener,
    ):
        store.admin().create_queue("tasks")
        listener.execute("LISTEN pgqrs")
        for n in range(20):
            store.producer("tasks").enqueue(n)
        assert list(listener.notifies(timeout=0.3)) == []
        thread, _ = start_waiting(store)  # finds the first at once, and waits no more
        thread.join()
        with store.consumer("tasks") as consumer:
            consumer.ack_many(consumer.dequeue(50))
        thread, _ = start_waiting(store)
        store.producer("tasks").enqueue_many(range(100))
        thread.join()
        heard = [n.payload for n in listener.notifies(timeout=0.3) if n.payload[0] != "?"]
        assert heard == ["tasks"]  # one for a hundred, and for all who wait


def test_a_deaf_listener_is_noticed_and_made_up_for(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "OFTEN", 0.05)
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        sentry = store._database.wakeups._sentry
        # As behind a pooler: it listens, and hears nothing.
        monkeypatch.setattr(sentry, "_channel", "nobody calls here")
        monkeypatch.setattr(sentry, "_call_out", lambda: "?unheard")
        consumer = store.consumer("tasks").open()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(consumer.dequeue(wait=LONG)))
        thread.start()
        time.sleep(0.3)
        assert not store._database.wakeups.hears
        with pgqrs.Store(postgres_database) as other:
            other.producer("tasks").enqueue("found by looking")
        thread.join()
        assert [message.payload for message in found] == ["found by looking"]


def test_a_lost_listener_comes_back(postgres_database: str) -> None:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        thread, found = start_waiting(store)
        with psycopg.connect(postgres_database, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'pgqrs-listener' AND datname = current_database()"
            )
        deadline = time.monotonic() + 30
        while store._database.wakeups.hears:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while not store._database.wakeups.hears:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        until_expected(store, thread)
        with pgqrs.Store(postgres_database) as other:
            other.producer("tasks").enqueue("heard again")
        thread.join()
        assert [message.payload for message in found] == ["heard again"]


def test_who_waits_hardly_asks(
    database: str, here: pgqrs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # as patient as it really is
    statements: list[str] = []

    def listen(_c: Any, _k: Any, statement: str, _p: Any, _x: Any, _m: Any) -> None:
        statements.append(statement)

    with here.consumer("tasks") as consumer:
        event.listen(Engine, "before_cursor_execute", listen)
        assert consumer.dequeue(wait=3) == []
        event.remove(Engine, "before_cursor_execute", listen)
    asked = [sql for sql in statements if not sql.startswith(("BEGIN", "PRAGMA"))]
    assert 0 < len(asked) <= 15
