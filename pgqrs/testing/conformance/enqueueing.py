"""Enqueueing: ids, order, delays, priorities, headers, batches."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from pgqrs import InvalidArgument, InvalidPayload
from pgqrs.repositories import dequeue, messages
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness


def payloads_of(found: list[Any]) -> list[Any]:
    return [message.payload for message in found]


def test_a_message_arrives_as_it_was_sent(producer: Any, consumer: Any, clock: ManualClock) -> None:
    id = producer.enqueue({"job": "hello"})
    (message,) = consumer.dequeue()
    assert message.id == id
    assert message.queue == QUEUE
    assert message.payload == {"job": "hello"}
    assert message.enqueued_at == message.dequeued_at == clock.now()
    assert message.vt == clock.now() + timedelta(seconds=30)
    assert (message.read_ct, message.attempt, message.priority) == (1, 1, 0)
    assert message.consumer_worker_id == consumer.worker_id


def test_batches_keep_their_order(producer: Any, consumer: Any) -> None:
    ids = producer.enqueue_many(range(1500))
    assert ids == sorted(ids)
    assert len(set(ids)) == 1500
    claimed = consumer.dequeue(1500)
    assert payloads_of(claimed) == list(range(1500))
    assert [message.id for message in claimed] == ids


def test_an_empty_batch_is_fine(producer: Any, consumer: Any) -> None:
    assert producer.enqueue_many([]) == []
    assert consumer.dequeue() == []


def test_a_batch_may_be_any_iterable(producer: Any, consumer: Any) -> None:
    producer.enqueue_many({"n": n} for n in range(3))
    assert payloads_of(consumer.dequeue(9)) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_batch_too_large_for_one_statement_is_still_one_batch(
    producer: Any, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "CHUNK_BYTES", 100)
    ids = producer.enqueue_many([f"payload number {n}" for n in range(50)])
    assert [message.id for message in consumer.dequeue(50)] == ids
    with pytest.raises(InvalidPayload):
        producer.enqueue_many(["x" * 60, "y" * 60, b"no"])
    assert consumer.dequeue() == []


def test_first_in_first_out(producer: Any, consumer: Any) -> None:
    for n in range(5):
        producer.enqueue(n)
    assert [payloads_of(consumer.dequeue()) for _ in range(6)] == [[0], [1], [2], [3], [4], []]


def test_higher_priorities_first_then_in_order(producer: Any, consumer: Any) -> None:
    producer.enqueue_many(["c", "d"])
    producer.enqueue_many(["a", "b"], priority=9)
    producer.enqueue_many(["e", "f"], priority=-9)
    assert payloads_of(consumer.dequeue(3)) == ["a", "b", "c"]
    assert payloads_of(consumer.dequeue(3)) == ["d", "e", "f"]


@pytest.mark.parametrize("priority", [40_000, -40_000, 1.5, "high", True])
def test_a_bad_priority_is_refused(producer: Any, priority: Any) -> None:
    with pytest.raises(InvalidArgument, match="priority"):
        producer.enqueue(1, priority=priority)


@pytest.mark.parametrize("delay", [10, 10.0, timedelta(seconds=10)])
def test_a_delayed_message_waits(
    producer: Any, consumer: Any, clock: ManualClock, delay: Any
) -> None:
    producer.enqueue("later", delay=delay)
    clock.advance(9.999)
    assert consumer.dequeue() == []
    clock.advance(0.001)
    assert payloads_of(consumer.dequeue()) == ["later"]


def test_an_eta_is_a_time_of_any_zone(producer: Any, consumer: Any, clock: ManualClock) -> None:
    eta = (clock.now() + timedelta(seconds=10)).astimezone(timezone(timedelta(hours=-7)))
    producer.enqueue_many(["later"], eta=eta)
    assert consumer.dequeue() == []
    clock.advance(10)
    assert payloads_of(consumer.dequeue()) == ["later"]


def test_an_eta_in_the_past_is_now(producer: Any, consumer: Any) -> None:
    producer.enqueue("now", eta=datetime(2001, 1, 1, tzinfo=UTC))
    assert payloads_of(consumer.dequeue()) == ["now"]


@pytest.mark.parametrize(
    "options",
    [
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": float("inf")},
        {"delay": "5"},
        {"delay": True},
        {"delay": timedelta(days=-1)},
        {"eta": datetime(2030, 1, 1)},
        {"eta": "2030-01-01"},
        {"eta": 5},
        {"delay": 1, "eta": datetime(2030, 1, 1, tzinfo=UTC)},
    ],
)
def test_a_bad_time_is_refused(producer: Any, consumer: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        producer.enqueue(1, **options)
    with pytest.raises(InvalidArgument):
        producer.enqueue_many([1, 2], **options)
    assert consumer.dequeue() == []


def test_delayed_messages_take_their_place_by_priority_and_id(
    producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue("first, delayed", delay=5)
    producer.enqueue("second")
    producer.enqueue("urgent, delayed", delay=5, priority=1)
    clock.advance(5)
    assert payloads_of(consumer.dequeue(2)) == ["urgent, delayed", "first, delayed"]
    assert payloads_of(consumer.dequeue(2)) == ["second"]


def test_any_number_may_come_due_at_once(
    producer: Any, consumer: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequeue, "AT_ONCE", 7)
    producer.enqueue_many(range(30), delay=5)
    clock.advance(5)
    found = [message.payload for _ in range(30) for message in consumer.dequeue(1)]
    assert found == list(range(30))


def test_headers_travel_with_the_message(admin: Any, producer: Any, consumer: Any) -> None:
    producer.enqueue(1, headers={"trace": "abc", "n": 5})
    producer.enqueue_many([2, 3], headers={"batch": True})
    first, second, third = consumer.dequeue(3)
    assert first.headers == {"trace": "abc", "n": 5}
    assert second.headers == third.headers == {"batch": True}
    consumer.ack(first)
    assert admin.get_archived(first.id).headers == {"trace": "abc", "n": 5}


@pytest.mark.parametrize("headers", ["text", ["a"], {1: "a"}, {"a": b"x"}, {"a": "x" * 20_000}])
def test_bad_headers_are_refused(producer: Any, consumer: Any, headers: Any) -> None:
    with pytest.raises(InvalidPayload):
        producer.enqueue(1, headers=headers)
    assert consumer.dequeue() == []


def test_peeking_claims_nothing(admin: Any, producer: Any, consumer: Any) -> None:
    ids = producer.enqueue_many(range(5))
    assert [message.id for message in admin.peek(QUEUE, 3)] == ids[:3]
    assert [message.id for message in admin.peek(QUEUE, 3, after=ids[2])] == ids[3:]
    assert admin.peek(QUEUE)[0].read_ct == 0
    assert admin.get_message(ids[4]).payload == 4
    assert len(consumer.dequeue(10)) == 5


def test_without_a_clock_the_database_tells_the_time(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None)
    before = datetime.now(UTC) - timedelta(seconds=30)
    store.producer(QUEUE).enqueue("now")
    store.producer(QUEUE).enqueue("in an hour", delay=3600)
    with store.consumer(QUEUE) as consumer:
        (message,) = consumer.dequeue(10)
    assert message.payload == "now"
    assert before < message.enqueued_at <= message.dequeued_at < before + timedelta(minutes=5)
    assert message.vt - message.dequeued_at == timedelta(seconds=30)
    (_, later) = admin.peek(QUEUE)
    assert later.vt - later.enqueued_at == timedelta(seconds=3600)
