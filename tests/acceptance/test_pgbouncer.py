"""Behind PgBouncer in transaction mode: every statement may meet another session of the server."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

import pgqrs
from pgqrs.stores import wakeups
from tests.acceptance import bouncer
from tests.acceptance.test_wakeups import LONG, until

pytestmark = pytest.mark.skipif(
    bouncer.find() is None, reason="pgbouncer is not installed: apt-get install pgbouncer"
)
CLIENTS = 6
MESSAGES = 120


@pytest.fixture(scope="module")
def pooler(postgres: str) -> Iterator[str]:
    # Not one of pytest's directories: those are for the user only, and the pooler is another.
    with (
        tempfile.TemporaryDirectory(prefix="pgqrs-pgbouncer-") as directory,
        bouncer.in_front_of(postgres, Path(directory)) as url,
    ):
        yield url


@pytest.fixture
def pooled(pooler: str, postgres_database: str) -> str:
    """The URL of an installed database through the pooler."""
    url = make_url(pooler).set(database=make_url(postgres_database).database)
    pooled = url.render_as_string(hide_password=False)
    with pgqrs.Store(pooled, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=300)
    return pooled


def sessions(pooled: str, question: str) -> set[Any]:
    """What the sessions behind the pooler answer: each transaction gets any of them."""
    found = set()
    with ThreadPoolExecutor(8) as pool:

        def ask(_: int) -> Any:
            with psycopg.connect(pooled, prepare_threshold=None) as connection:
                answer = connection.execute(question.encode()).fetchone()
                connection.execute("SELECT pg_sleep(0.01)")
                return answer and answer[0]

        found.update(pool.map(ask, range(24)))
    return found


def work_through(url: str) -> Counter[int]:
    """As a client of its own: enqueue, then take and end whatever comes."""
    seen: Counter[int] = Counter()
    with pgqrs.Store(url) as store, store.consumer("tasks") as consumer:
        producer = store.producer("tasks")
        for n in range(MESSAGES):
            if n % 3:
                producer.enqueue(n)
            else:
                producer.enqueue_many([n, n])
            for message in consumer.dequeue(2):
                consumer.extend(message, 600)
                if message.attempt == 1 and message.id % 7 == 0:
                    consumer.release(message)
                else:
                    consumer.ack(message)
                    seen[message.id] += 1
        while messages := consumer.dequeue(10):
            consumer.ack_many(messages)
            seen.update(message.id for message in messages)
    return seen


def test_many_clients_on_few_sessions(pooled: str) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        seen = sum(pool.map(work_through, [pooled] * CLIENTS), Counter())
    enqueued = CLIENTS * (MESSAGES + MESSAGES // 3)
    assert set(seen.values()) == {1}
    assert len(seen) == enqueued
    with pgqrs.Store(pooled) as store:
        stats = store.admin().queue_stats("tasks")
        assert (stats.archived["completed"], stats.ready, stats.leased) == (enqueued, 0, 0)
    assert sessions(pooled, "SELECT count(*) FROM pg_prepared_statements") == {0}


def test_many_async_clients_on_few_sessions(pooled: str) -> None:
    async def client() -> int:
        async with pgqrs.AsyncStore(pooled) as store, store.consumer("tasks") as consumer:
            producer = store.producer("tasks")
            done = 0
            for n in range(MESSAGES // 2):
                await producer.enqueue(n)
                for message in await consumer.dequeue(2):
                    await consumer.ack(message)
                    done += 1
            return done

    async def main() -> int:
        return sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))

    done = asyncio.run(main())
    with pgqrs.Store(pooled) as store:
        assert store.admin().queue_stats("tasks").archived["completed"] == done
    assert sessions(pooled, "SELECT count(*) FROM pg_prepared_statements") == {0}


def test_who_waits_looks_instead_of_listening(pooled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "SELDOM", 10 * LONG)  # who believes that he hears finds nothing
    with pgqrs.Store(pooled) as store, pgqrs.Store(pooled) as other:
        consumer = store.consumer("tasks").open()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(consumer.dequeue(wait=LONG)))
        thread.start()
        until(lambda: bool(store._database.wakeups._doorbells))
        other.producer("tasks").enqueue("found by looking")
        thread.join()
        assert [message.payload for message in found] == ["found by looking"]
        assert not store._database.wakeups.hears
    assert sessions(pooled, "SELECT count(*) FROM pg_listening_channels()") == {0}


def test_listening_may_go_past_the_pooler(pooled: str, postgres_database: str) -> None:
    with pgqrs.Store(pooled, listen_dsn=postgres_database) as store:
        consumer = store.consumer("tasks").open()
        thread = threading.Thread(target=lambda: consumer.dequeue(wait=LONG), daemon=True)
        thread.start()
        until(lambda: store._database.wakeups.hears)
        with pgqrs.Store(pooled) as other:
            other.producer("tasks").enqueue("heard")
        thread.join()


def test_no_setting_is_left_to_the_next_client(pooled: str) -> None:
    names = ("TimeZone", "synchronous_commit", "search_path", "default_transaction_isolation")
    before = {name: sessions(pooled, f"SHOW {name}") for name in names}
    with pgqrs.Store(pooled) as store, store.consumer("tasks") as consumer:
        for n in range(20):
            store.producer("tasks").enqueue(n, delay=0.001)
            store.admin().stats()
            consumer.ack_many(consumer.dequeue(5, wait=0.01))
    assert {name: sessions(pooled, f"SHOW {name}") for name in names} == before


def test_the_outbox(pooled: str) -> None:
    with pgqrs.Store(pooled) as store:
        for n in range(20):
            with store.engine.begin() as connection:
                store.using(connection).enqueue("tasks", n)
        assert store.admin().queue_stats("tasks").ready == 20


def test_waiting_for_locks_is_bounded_and_the_bound_leaks_to_nobody(
    pooled: str, postgres_database: str
) -> None:
    with pgqrs.Store(pooled, retry_for=0.5) as store:
        with psycopg.connect(postgres_database) as frozen:
            frozen.execute("SELECT 1 FROM pgqrs_queues FOR UPDATE")
            for more in ({}, {"key": "a"}):
                with pytest.raises(pgqrs.StoreUnavailable, match="lock timeout"):
                    store.producer("tasks").enqueue(1, **more)
        for n in range(20):
            store.producer("tasks").enqueue(n)
            store.producer("tasks").enqueue(n, key=str(n))
        store.admin().list_queues()
        assert sessions(pooled, "SHOW lock_timeout") == {"0"}
