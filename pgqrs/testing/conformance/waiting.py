"""Waiting for messages: woken at once, by whoever makes one available, and never by polling hard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pgqrs import InvalidArgument, Rate
from pgqrs.repositories import dequeue
from pgqrs.stores import wakeups
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness

LONG = 100
"""Far longer than any test takes: who returns earlier was woken."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by himself: what arrives was heard of."""
    monkeypatch.setattr(wakeups, "SELDOM", LONG)
    monkeypatch.setattr(wakeups, "OFTEN", LONG)
    monkeypatch.setattr("pgqrs.consumer.SELDOM", LONG)  # so long producers know that he waits


@contextmanager
def waiting(consumer: Any, n: int = 1) -> Iterator[Callable[[], list[Any]]]:
    """A dequeue that waits in another thread; the result of it when it is done."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(consumer.dequeue(n, wait=LONG)))
    thread.start()
    until_it_waits(consumer)

    def result() -> list[Any]:
        thread.join()
        return found

    yield result
    thread.join()


def until_it_waits(consumer: Any) -> None:
    sync = getattr(getattr(consumer, "_wrapped", consumer), "_sync", consumer)
    deadline = time.monotonic() + LONG
    while not sync._database.wakeups._doorbells:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.05)  # it looks once more before it waits


@pytest.fixture
def real_time(harness: Harness, admin: Any) -> Any:
    """A store in real time: waiting is about that."""
    return harness.open(clock=None)


def test_what_is_there_needs_no_waiting(real_time: Any) -> None:
    real_time.producer(QUEUE).enqueue_many([1, 2])
    with real_time.consumer(QUEUE) as consumer:
        assert len(consumer.dequeue(10, wait=LONG)) == 2


def test_after_the_time_there_is_nothing(real_time: Any) -> None:
    with real_time.consumer(QUEUE) as consumer:
        assert consumer.dequeue(wait=0.05) == []
        assert consumer.dequeue(wait=0) == []
        for wait in (-1, "x", True):
            with pytest.raises(InvalidArgument, match="wait"):
                consumer.dequeue(wait=wait)


def test_an_enqueue_wakes_who_waits(real_time: Any) -> None:
    with real_time.consumer(QUEUE) as consumer, waiting(consumer) as result:
        real_time.producer(QUEUE).enqueue("hello")
        assert [message.payload for message in result()] == ["hello"]


def test_a_batch_wakes_who_waits(real_time: Any) -> None:
    with real_time.consumer(QUEUE) as consumer, waiting(consumer, 5) as result:
        real_time.producer(QUEUE).enqueue_many([1, 2, 3])
        assert [message.payload for message in result()] == [1, 2, 3]


def test_a_delayed_message_wakes_who_waits_when_it_is_due(real_time: Any) -> None:
    with real_time.consumer(QUEUE) as consumer, waiting(consumer) as result:
        real_time.producer(QUEUE).enqueue("soon", delay=0.2)
        (message,) = result()
        assert (message.dequeued_at - message.enqueued_at).total_seconds() >= 0.2


def test_a_released_message_wakes_who_waits(real_time: Any) -> None:
    real_time.producer(QUEUE).enqueue("back")
    with real_time.consumer(QUEUE) as holder, real_time.consumer(QUEUE) as other:
        (message,) = holder.dequeue(lease=LONG)
        with waiting(other) as result:
            holder.release(message)
            (again,) = result()
            assert again.id == message.id


def test_a_failed_message_wakes_who_waits(real_time: Any) -> None:
    real_time.producer(QUEUE).enqueue("again")
    with real_time.consumer(QUEUE) as holder, real_time.consumer(QUEUE) as other:
        (message,) = holder.dequeue(lease=LONG)
        with waiting(other) as result:
            holder.fail(message, "no")
            assert [again.id for again in result()] == [message.id]


def test_a_replayed_message_wakes_who_waits(real_time: Any) -> None:
    real_time.producer(QUEUE).enqueue("again")
    with real_time.consumer(QUEUE) as holder, real_time.consumer(QUEUE) as other:
        (message,) = holder.dequeue(lease=LONG)
        holder.fail(message, "no", dead=True)
        with waiting(other) as result:
            real_time.admin().replay(message.id)
            (again,) = result()
            other.fail(again, "no", dead=True)
        with waiting(other) as result:
            real_time.admin().replay_all(QUEUE)
            assert len(result()) == 1


def test_a_resumed_queue_wakes_who_waits(real_time: Any) -> None:
    real_time.producer(QUEUE).enqueue("paused")
    real_time.admin().pause_queue(QUEUE)
    with real_time.consumer(QUEUE) as consumer, waiting(consumer) as result:
        real_time.admin().resume_queue(QUEUE)
        assert [message.payload for message in result()] == ["paused"]


def test_a_lapsed_lease_wakes_who_waits(real_time: Any) -> None:
    real_time.producer(QUEUE).enqueue("left")
    with real_time.consumer(QUEUE) as holder, real_time.consumer(QUEUE) as other:
        (message,) = holder.dequeue(lease=0.2)
        assert [again.id for again in other.dequeue(wait=LONG)] == [message.id]


def test_closing_ends_the_wait(real_time: Any) -> None:
    consumer = real_time.consumer(QUEUE)
    with waiting(consumer) as result:
        consumer.close()
        assert result() == []
    assert real_time.admin().list_workers() == []


def test_only_one_of_many_gets_it(real_time: Any) -> None:
    consumers = [real_time.consumer(QUEUE) for _ in range(3)]
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda c=consumer: found.extend(c.dequeue(wait=LONG)))
        for consumer in consumers
    ]
    for thread in threads:
        thread.start()
    until_it_waits(consumers[0])
    producer = real_time.producer(QUEUE)
    for n in range(3):
        producer.enqueue(n)
    for thread in threads:
        thread.join()
    assert sorted(message.payload for message in found) == [0, 1, 2]
    for consumer in consumers:
        consumer.close()


def test_the_next_of_a_group_wakes_who_waits(real_time: Any) -> None:
    real_time.producer(QUEUE).enqueue_many([1, 2], groups=["g", "g"])
    with real_time.consumer(QUEUE) as holder, real_time.consumer(QUEUE) as other:
        (first,) = holder.dequeue(lease=LONG)
        with waiting(other) as result:
            holder.ack(first)
            assert [message.payload for message in result()] == [2]


def test_room_below_a_limit_wakes_who_waits(real_time: Any) -> None:
    real_time.admin().configure_queue(QUEUE, max_in_flight=1)
    real_time.producer(QUEUE).enqueue_many([1, 2])
    with real_time.consumer(QUEUE) as holder, real_time.consumer(QUEUE) as other:
        (first,) = holder.dequeue(lease=LONG)
        with waiting(other) as result:
            holder.ack(first)
            assert [message.payload for message in result()] == [2]


def test_the_rate_wakes_who_waits(real_time: Any) -> None:
    real_time.admin().configure_queue(QUEUE, rate=Rate(1, per=0.2))
    real_time.producer(QUEUE).enqueue_many([1, 2])
    with real_time.consumer(QUEUE) as consumer:
        assert [message.payload for message in consumer.dequeue(5)] == [1]
        assert [message.payload for message in consumer.dequeue(5, wait=LONG)] == [2]


def test_a_waiting_consumer_gets_past_any_number_of_expired_messages(
    producer: Any, consumer: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequeue, "AT_ONCE", 2)
    producer.enqueue_many(range(50), ttl=10, priority=5)
    producer.enqueue("valid")
    clock.advance(10)
    began = time.monotonic()
    assert [message.payload for message in consumer.dequeue(wait=LONG)] == ["valid"]
    assert time.monotonic() - began < LONG


def test_cancelling_the_first_of_a_group_wakes_for_the_next(
    admin: Any, producer: Any, consumer: Any, rival: Any
) -> None:
    first, _ = producer.enqueue_many([1, 2], groups=["one", "one"])
    rival.dequeue(lease=10 * LONG)
    began = time.monotonic()
    with waiting(consumer) as result:
        admin.cancel(first)
        assert [message.payload for message in result()] == [2]
    assert time.monotonic() - began < LONG
