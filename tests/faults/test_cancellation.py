"""A cancelled dequeue gives its messages back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text

import pgqrs
from pgqrs.config import parse_dsn


@contextmanager
def statements() -> Iterator[list[str]]:
    """What is sent to databases meanwhile."""
    sent: list[str] = []

    def listen(_c: Any, _k: Any, statement: str, _p: Any, _x: Any, _m: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", listen)


async def cancelled_dequeue(database: str) -> list[pgqrs.Message]:
    """Cancel a dequeue that waits for a lock. Returns what the next one gets."""
    async with pgqrs.AsyncStore(database) as store:
        async with store.admin() as admin:
            await admin.install()
            await admin.create_queue("tasks", max_read_ct=1)
        await (await store.producer("tasks")).enqueue("precious")
        consumer = await store.consumer("tasks", lease=600)
        blocker = create_engine(parse_dsn(database))
        lock = blocker.connect()
        if lock.dialect.name == "sqlite":
            lock.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            lock.execute(text("LOCK TABLE pgqrs_messages IN ACCESS EXCLUSIVE MODE"))
        with statements() as sent:
            waiting = asyncio.create_task(consumer.dequeue())
            while not sent:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        lock.rollback()
        lock.close()
        blocker.dispose()
        await store._bridge.settle()
        return await consumer.dequeue()


def test_a_cancelled_dequeue_gives_back_what_it_got(database: str) -> None:
    (message,) = asyncio.run(cancelled_dequeue(database))
    # Claimed, given back uncounted, claimed again: with one attempt allowed it is still there.
    assert (message.payload, message.read_ct, message.attempt) == ("precious", 2, 1)


def test_a_timeout_is_kept_though_the_database_is_slow(database: str) -> None:
    async def main() -> None:
        async with pgqrs.AsyncStore(database, upgrade=True) as store:
            async with store.admin() as admin:
                await admin.create_queue("tasks")
            consumer = await store.consumer("tasks")
            await asyncio.wait_for(consumer.dequeue(), timeout=100)

    asyncio.run(main())


def test_closing_waits_for_what_is_given_back(sqlite_database: str) -> None:
    async def main() -> None:
        store = await pgqrs.connect(sqlite_database, upgrade=True)
        await store.admin().create_queue("tasks")
        await store.producer("tasks").enqueue(1)
        consumer = await store.consumer("tasks", lease=600)
        task = asyncio.create_task(consumer.dequeue())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.close()

    asyncio.run(main())
    with pgqrs.Store(sqlite_database) as store:
        assert store.admin().queue_stats("tasks").leased == 0
