"""A consumer has one row among the workers, however many of its calls come first."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pgqrs

CALLS = 8


def test_calls_at_the_same_time_register_one_worker(database: str) -> None:
    with pgqrs.Store(database, upgrade=True) as store:
        admin = store.admin()
        admin.create_queue("q")
        store.producer("q").enqueue_many(range(CALLS))
        consumer = store.consumer("q")
        with ThreadPoolExecutor(CALLS) as threads:
            found = list(threads.map(lambda _: consumer.dequeue(), range(CALLS)))
        holders = {message.consumer_worker_id for messages in found for message in messages}
        assert holders == {consumer.worker_id}
        assert [worker.id for worker in admin.list_workers()] == [consumer.worker_id]
        admin.purge_workers(silent_for=0)
        with ThreadPoolExecutor(CALLS) as threads:
            list(threads.map(lambda _: consumer.heartbeat(), range(CALLS)))
        assert [worker.id for worker in admin.list_workers()] == [consumer.worker_id]
        consumer.close()
        assert admin.list_workers() == []


def test_async_calls_at_the_same_time_register_one_worker(database: str) -> None:
    async def call() -> int:
        async with await pgqrs.connect(database, upgrade=True) as store:
            await store.admin().create_queue("q")
            await store.producer("q").enqueue_many(range(CALLS))
            consumer = store.consumer("q")
            found = await asyncio.gather(*(consumer.dequeue() for _ in range(CALLS)))
            holders = {message.consumer_worker_id for messages in found for message in messages}
            assert holders == {consumer.worker_id}
            await consumer.close()
            return len(await store.admin().list_workers())

    assert asyncio.run(call()) == 0
