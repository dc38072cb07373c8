"""Statistics."""

from __future__ import annotations

from typing import Any

from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE

NONE_ENDED = {"completed": 0, "failed": 0, "expired": 0, "manual": 0}


def test_an_empty_queue_counts_nothing(admin: Any) -> None:
    found = admin.queue_stats(QUEUE)
    assert (found.ready, found.delayed, found.leased, found.oldest_age) == (0, 0, 0, None)
    assert found.archived == NONE_ENDED


def test_every_message_is_counted_once(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue_many(range(10))
    producer.enqueue_many(range(3), delay=500)
    clock.advance(5)
    held = consumer.dequeue(6)
    consumer.ack_many(held[:2])
    consumer.fail(held[2], dead=True)
    consumer.fail(held[3], delay=500)
    found = admin.queue_stats(QUEUE)
    assert (found.ready, found.delayed, found.leased) == (4, 4, 2)
    assert found.oldest_age == 5
    assert found.archived == NONE_ENDED | {"completed": 2, "failed": 1}


def test_a_lapsed_lease_counts_as_ready(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue(1)
    consumer.dequeue()
    assert (admin.queue_stats(QUEUE).ready, admin.queue_stats(QUEUE).leased) == (0, 1)
    clock.advance(30)
    assert (admin.queue_stats(QUEUE).ready, admin.queue_stats(QUEUE).leased) == (1, 0)
    assert admin.queue_stats(QUEUE).oldest_age == 30


def test_all_queues_by_name(store: Any, admin: Any, producer: Any) -> None:
    admin.create_queue("aside")
    admin.pause_queue("aside")
    producer.enqueue(1)
    aside, tasks = admin.stats()
    assert (aside.queue, aside.paused, aside.ready) == ("aside", True, 0)
    assert (tasks.queue, tasks.paused, tasks.ready) == (QUEUE, False, 1)


def test_what_has_expired_is_not_counted(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue("held", ttl=5)
    consumer.dequeue()
    producer.enqueue("ready", ttl=5)
    producer.enqueue("delayed", ttl=5, delay=100)
    producer.enqueue("stays", ttl=100)
    found = admin.queue_stats(QUEUE)
    assert (found.ready, found.delayed, found.leased) == (2, 1, 1)
    clock.advance(5)
    found = admin.queue_stats(QUEUE)
    assert (found.ready, found.delayed, found.leased) == (1, 0, 1)
    assert found.oldest_age == 5
