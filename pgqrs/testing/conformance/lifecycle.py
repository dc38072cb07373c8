"""Opening, installing, closing."""

from __future__ import annotations

from typing import Any

import pytest

from pgqrs import ConcurrencyModel, StoreClosed
from pgqrs.testing.conformance.harness import QUEUE, Harness


def test_installing_again_is_fine(store: Any, admin: Any, producer: Any, consumer: Any) -> None:
    producer.enqueue(1)
    admin.install()
    admin.verify()
    assert len(consumer.dequeue()) == 1


def test_a_store_tells_what_it_is(store: Any) -> None:
    assert store.concurrency_model in set(ConcurrencyModel)
    assert store.backend_name in repr(store)
    assert isinstance(store.supports_skip_locked, bool)


def test_a_closed_store_says_so(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=harness.clock)
    producer = store.producer(QUEUE)
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        producer.enqueue(1)
    assert admin.peek(QUEUE) == []


def test_facades_are_context_managers(store: Any, admin: Any) -> None:
    with store.admin() as inner:
        assert inner.get_queue(QUEUE)
    with store.producer(QUEUE) as producer:
        producer.enqueue(1)


def test_works_run_in_one_transaction(store: Any, admin: Any) -> None:
    def half_done(connection: Any) -> None:
        connection.exec_driver_sql("UPDATE pgqrs_queues SET max_read_ct = 99")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.shard(QUEUE).write(half_done)
    assert admin.get_queue(QUEUE).max_read_ct == 3
