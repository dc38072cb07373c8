"""Checked by mypy and pyright, never run: what the types of the public face promise to a user's code."""

from typing import assert_type

import pgqrs


def sync(store: pgqrs.Store) -> None:
    with store.producer("tasks") as producer:
        assert_type(producer, pgqrs.Producer)
        assert_type(producer.enqueue({"a": 1}), pgqrs.MessageId)
        assert_type(producer.enqueue_many([{"a": 1}]), list[pgqrs.MessageId])
    with store.consumer("tasks") as consumer:
        assert_type(consumer.dequeue(10), list[pgqrs.Message])
        assert_type(consumer.fail(1, "error"), bool)
    assert_type(store.read(lambda connection: connection.closed), bool)
    assert_type(store.admin().stats(), list[pgqrs.QueueStats])


@pgqrs.task
def double(n: int) -> int:
    return 2 * n


@pgqrs.task(queue="emails", retry=pgqrs.Retry(max_attempts=5))
async def send(to: str, *, copy: bool = False) -> list[str]:
    return [to]


def tasks() -> None:
    assert_type(double.enqueue(1), pgqrs.Handle[int])
    assert_type(double.enqueue(1).result(timeout=10), int)
    assert_type(send.options(delay=5).enqueue("a@b.c", copy=True).result(), list[str])


async def tasks_with_asyncio() -> None:
    handle = await send.aenqueue("a@b.c")
    assert_type(handle, pgqrs.AsyncHandle[list[str]])
    assert_type(await handle.result(), list[str])
    assert_type(await handle.status(), pgqrs.TaskStatus)


async def asynchronous() -> None:
    store = await pgqrs.connect("sqlite::memory:")
    assert_type(store, pgqrs.AsyncStore)
    async with store.producer("tasks") as producer:
        assert_type(producer, pgqrs.AsyncProducer)
        assert_type(await producer.enqueue({"a": 1}), pgqrs.MessageId)
    assert_type(await store.consumer("tasks"), pgqrs.AsyncConsumer)
    async with store.consumer("tasks") as consumer:
        assert_type(await consumer.dequeue(10), list[pgqrs.Message])
        assert_type(await consumer.fail(1, "error"), bool)
    assert_type(await store.read(lambda connection: connection.closed), bool)
    assert_type(await store.admin().stats(), list[pgqrs.QueueStats])
