"""A process that opens a store, uses it, and forks: run by test_forks."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import threading
from typing import Any

import pgqrs

CHILDREN, EACH = 3, 8
SETTINGS: dict[str, Any] = {"upgrade": True, "s3_retry_conflicts": True, "retry_for": 120}


def session(connection: Any) -> int:
    """What identifies a connection to the server; 0 where there is none."""
    if connection.dialect.name != "postgresql":
        return 0
    found: int = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    return found


def sync_child(store: pgqrs.Store, consumer: pgqrs.Consumer, answers: Any) -> None:
    producer = store.producer("q")
    for n in range(EACH):
        producer.enqueue(n, key=f"{os.getpid()}-{n}" if n % 2 else None)
    answer = {"session": store.read(session), "worker": consumer.open().worker_id}
    taken = consumer.dequeue(2, wait=100)  # a consumer that was opened before the fork
    consumer.ack_many(taken)
    with store.consumer("calls") as called:
        answer["called"] = len(called.dequeue(1, wait=100))
    store.close()
    answers.put(answer | {"taken": len(taken)})


def sync_parent(url: str) -> None:
    store = pgqrs.Store(url, **SETTINGS)
    for queue in ("q", "calls", "quiet"):
        store.admin().create_queue(queue)
    producer = store.producer("q")
    consumer = store.consumer("q").open()
    producer.enqueue("before")
    waiting = threading.Thread(
        target=lambda: store.consumer("quiet").dequeue(1, wait=600), daemon=True
    )
    waiting.start()  # so that there is a thread that listens, or watches the file
    mine = {"session": store.read(session), "worker": consumer.worker_id}
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [
        context.Process(target=sync_child, args=(store, consumer, answers)) for _ in range(CHILDREN)
    ]
    for child in children:
        child.start()
        for n in range(EACH):
            producer.enqueue(n)
    store.producer("calls").enqueue_many(range(CHILDREN))
    found = [answers.get(timeout=150) for _ in children]
    report(store.admin().queue_stats("q"), children, mine, found)
    producer.enqueue("after")
    assert waiting.is_alive()
    store.producer("quiet").enqueue("now it ends")
    waiting.join(100)
    assert not waiting.is_alive()
    store.close()


async def async_child(store: pgqrs.AsyncStore, answers: Any) -> None:
    producer = store.producer("q")
    for n in range(EACH):
        await producer.enqueue(n)
    async with store.consumer("q") as consumer:
        taken = await consumer.dequeue(2, wait=100)
        await consumer.ack_many(taken)
        answer = {"session": await store.read(session), "worker": consumer.worker_id}
    async with store.consumer("calls") as called:
        answer["called"] = len(await called.dequeue(1, wait=100))
    await store.close()
    answers.put(answer | {"taken": len(taken)})


async def opened(store: pgqrs.AsyncStore) -> int:
    await store.open()
    for queue in ("q", "calls"):
        await store.admin().create_queue(queue)
    await store.producer("q").enqueue("before")
    return await store.read(session)


def async_parent(url: str) -> None:
    store = pgqrs.AsyncStore(url, **SETTINGS)
    mine = {"session": asyncio.run(opened(store)), "worker": None}
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [
        context.Process(target=lambda: asyncio.run(async_child(store, answers)))
        for _ in range(CHILDREN)
    ]
    [child.start() for child in children]
    with pgqrs.Store(url, **SETTINGS) as other:
        for _ in range(CHILDREN):
            [other.producer("q").enqueue(n) for n in range(EACH)]
        other.producer("calls").enqueue_many(range(CHILDREN))
        found = [answers.get(timeout=150) for _ in children]
        report(other.admin().queue_stats("q"), children, mine, found)


def report(stats: pgqrs.QueueStats, children: list[Any], mine: Any, found: list[Any]) -> None:
    [child.join(150) for child in children]
    assert [child.exitcode for child in children] == [0] * CHILDREN
    completed = stats.archived.get("completed", 0)
    print(json.dumps({"mine": mine, "found": found, "ready": stats.ready, "completed": completed}))


if __name__ == "__main__":
    {"sync": sync_parent, "async": async_parent}[sys.argv[1]](sys.argv[2])
