"""Processes that wait announce it: what they are told, and what is committed just before that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import create_engine

import pgqrs
from pgqrs.config import parse_dsn
from pgqrs.repositories import announcements
from pgqrs.stores import wakeups

LONG = 100.0
MESSAGE_AWAITED = "SELECT count(*) FROM pgqrs_waiting WHERE waiting_until > now()"
RESULT_AWAITED = "SELECT count(*) FROM pgqrs_waiting WHERE results_wanted_until > now()"
BLOCKED = "SELECT count(*) FROM pg_locks WHERE NOT granted"


@pytest.fixture
def store(postgres_database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[pgqrs.Store]:
    monkeypatch.setattr(wakeups, "SELDOM", 100 * LONG)  # nobody looks just because time passes
    monkeypatch.setattr("pgqrs.consumer.SELDOM", LONG)
    monkeypatch.setattr("pgqrs.stores.results.SELDOM", 100 * LONG)
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=LONG)
        yield store


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_message_that_was_being_enqueued_is_found(
    store: pgqrs.Store, postgres_database: str
) -> None:
    with (
        psycopg.connect(postgres_database) as other,
        psycopg.connect(postgres_database, autocommit=True) as watching,
        pgqrs.Store(postgres_database) as elsewhere,
        ThreadPoolExecutor(2) as threads,
        store.consumer("tasks") as consumer,
    ):
        other.execute("SELECT * FROM pgqrs_queues FOR UPDATE")
        sent = threads.submit(elsewhere.producer("tasks").enqueue, "x")
        wait_until(lambda: watching.execute(BLOCKED).fetchone() != (0,))  # it has its snapshot
        got = threads.submit(consumer.dequeue, wait=LONG)
        wait_until(lambda: watching.execute(MESSAGE_AWAITED).fetchone() == (1,))
        other.rollback()
        assert sent.result(LONG)
        assert [message.payload for message in got.result(2 * LONG)] == ["x"]


@pgqrs.task(queue="tasks")
def double(n: int) -> int:
    return 2 * n


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_result_that_was_being_stored_is_found(
    store: pgqrs.Store, postgres_database: str, kind: str
) -> None:
    async def wait_in_a_loop(id: int) -> int:
        async with pgqrs.AsyncStore(postgres_database) as opened:
            handle = double.ahandle(id, store=opened)
            found: int = await handle.result(LONG)
            return found

    handle = double.options(store=store).enqueue(2)
    with (
        psycopg.connect(postgres_database) as other,
        psycopg.connect(postgres_database, autocommit=True) as watching,
        pgqrs.Store(postgres_database) as elsewhere,
        ThreadPoolExecutor(2) as threads,
        elsewhere.consumer("tasks") as consumer,
    ):
        (message,) = consumer.dequeue()
        other.execute("SELECT * FROM pgqrs_messages FOR UPDATE")
        stored = threads.submit(consumer.ack, message, result=4)
        wait_until(lambda: watching.execute(BLOCKED).fetchone() != (0,))
        if kind == "sync":
            got = threads.submit(handle.result, LONG)
        else:
            got = threads.submit(asyncio.run, wait_in_a_loop(handle.id))
        wait_until(lambda: watching.execute(RESULT_AWAITED).fetchone() == (1,))
        other.rollback()
        stored.result(LONG)
        assert got.result(2 * LONG) == 4


@pytest.fixture
def only_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that wait do not look by themselves: what they find they were told of."""
    monkeypatch.setattr("pgqrs.consumer.FOLLOW_UP", 100 * LONG)
    monkeypatch.setattr("pgqrs.stores.results.FOLLOW_UP", 100 * LONG)


@pytest.mark.usefixtures("only_told")
def test_who_is_known_to_wait_is_told_by_the_statement_itself(
    store: pgqrs.Store, postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        psycopg.connect(postgres_database, autocommit=True) as watching,
        pgqrs.Store(postgres_database) as elsewhere,
        ThreadPoolExecutor(2) as threads,
        store.consumer("tasks") as consumer,
    ):
        monkeypatch.setattr(announcements, "tell", None)  # no statement apart does it
        monkeypatch.setattr(announcements, "tell_of_results", None)
        for number in range(3):
            got = threads.submit(consumer.dequeue, wait=LONG)
            wait_until(lambda: watching.execute(MESSAGE_AWAITED).fetchone() == (1,))
            handle = double.options(store=elsewhere).enqueue(number)
            (message,) = got.result(2 * LONG)
            result = threads.submit(handle.result, LONG)
            wait_until(lambda: watching.execute(RESULT_AWAITED).fetchone() == (1,))
            consumer.ack(message, result=number)
            assert result.result(2 * LONG) == number


def test_a_busy_consumer_needs_no_telling(store: pgqrs.Store, postgres_database: str) -> None:
    """And whoever announced itself after it still does."""
    with (
        psycopg.connect(postgres_database, autocommit=True) as watching,
        ThreadPoolExecutor(1) as threads,
        store.consumer("tasks") as consumer,
        store.consumer("tasks") as other,
    ):
        got = threads.submit(consumer.dequeue, wait=LONG)
        wait_until(lambda: watching.execute(MESSAGE_AWAITED).fetchone() == (1,))
        store.producer("tasks").enqueue_many(range(3))
        assert got.result(2 * LONG)
        assert watching.execute(MESSAGE_AWAITED).fetchone() == (1,)  # it may wait again at once
        other._announce()
        assert consumer.dequeue(wait=LONG)
        assert watching.execute(MESSAGE_AWAITED).fetchone() == (1,)
        assert other.dequeue(wait=LONG)
        store.producer("tasks").enqueue_many(range(2))
        assert other.dequeue(wait=LONG)
        assert watching.execute(MESSAGE_AWAITED).fetchone() == (0,)


@pytest.mark.usefixtures("store")
def test_a_process_that_stands_still_with_an_announcement_delays_nobody_for_long(
    postgres_database: str,
) -> None:
    engine = create_engine(parse_dsn(postgres_database))
    with (
        psycopg.connect(postgres_database) as frozen,
        pgqrs.Store(postgres_database, retry_for=LONG) as other,
        pgqrs.Store(engine, retry_for=LONG) as shared,
    ):
        frozen.execute(
            "INSERT INTO pgqrs_waiting (queue_id, waiting_until, results_wanted_until) "
            "SELECT id, now() + interval '1 hour', now() + interval '1 hour' FROM pgqrs_queues"
        )
        frozen.commit()
        frozen.execute("SELECT * FROM pgqrs_waiting FOR UPDATE")
        began = time.monotonic()
        for each in (other, shared):
            each.producer("tasks").enqueue("x", key="k", unique="queued")
            with each.consumer("tasks") as quick:
                (message,) = quick.dequeue()
                quick.ack(message, result=1)
                assert quick.dequeue(wait=0.001) == []
        assert time.monotonic() - began < LONG
        frozen.rollback()
    engine.dispose()
