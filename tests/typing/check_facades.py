"""Checked by mypy, never run: what the types of the public face promise to a user's code."""

from typing import assert_type

import pgqrs


def sync(store: pgqrs.Store) -> None:
    with store.producer("tasks") as producer:
        assert_type(producer, pgqrs.Producer)
        assert_type(producer.enqueue({"a": 1}), int)
        assert_type(producer.enqueue_many([{"a": 1}]), list[int])
    with store.consumer("tasks") as consumer:
        assert_type(consumer.dequeue(10), list[pgqrs.Message])
        assert_type(consumer.fail(1, "error"), bool)
    assert_type(store.read(lambda connection: connection.closed), bool)
    assert_type(store.admin().stats(), list[pgqrs.QueueStats])


async def asynchronous() -> None:
    store = await pgqrs.connect("sqlite::memory:")
    assert_type(store, pgqrs.AsyncStore)
    async with store.producer("tasks") as producer:
        assert_type(producer, pgqrs.AsyncProducer)
        assert_type(await producer.enqueue({"a": 1}), int)
    assert_type(await store.consumer("tasks"), pgqrs.AsyncConsumer)
    async with store.consumer("tasks") as consumer:
        assert_type(await consumer.dequeue(10), list[pgqrs.Message])
        assert_type(await consumer.fail(1, "error"), bool)
    assert_type(await store.read(lambda connection: connection.closed), bool)
    assert_type(await store.admin().stats(), list[pgqrs.QueueStats])
