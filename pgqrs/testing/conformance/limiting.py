"""Limits of a queue: exact, changeable at any time, and nobody else's business."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pgqrs import InvalidArgument, Rate
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE


@pytest.fixture
def admin(store: Any) -> Any:
    return store.admin()


def queue_with(admin: Any, **limits: Any) -> None:
    admin.create_queue(QUEUE, lease=30, max_read_ct=3, **limits)


def test_limits_are_settings(admin: Any) -> None:
    queue_with(admin, max_in_flight=5, rate=Rate(100, per=60))
    queue = admin.get_queue(QUEUE)
    assert (queue.max_in_flight, queue.max_in_flight_per_key) == (5, None)
    assert queue.rate == Rate(100, per=60.0)
    queue = admin.configure_queue(QUEUE, max_in_flight=None, max_in_flight_per_key=2, rate=None)
    assert (queue.max_in_flight, queue.max_in_flight_per_key, queue.rate) == (None, 2, None)


@pytest.mark.parametrize(
    "limits",
    [{"max_in_flight": 0}, {"max_in_flight_per_key": -1}, {"max_in_flight": True}, {"rate": 5}],
)
def test_bad_limits_are_refused(admin: Any, limits: Any) -> None:
    (name,) = limits
    with pytest.raises(InvalidArgument, match=name):
        queue_with(admin, **limits)
    queue_with(admin)
    with pytest.raises(InvalidArgument, match=name):
        admin.configure_queue(QUEUE, **limits)
    for limit, per in ((0, 1), (1, 0), (1, -1)):
        with pytest.raises(InvalidArgument):
            Rate(limit, per=per)


def test_no_more_in_flight_than_allowed(store: Any, admin: Any, clock: ManualClock) -> None:
    queue_with(admin, max_in_flight=3)
    store.producer(QUEUE).enqueue_many(range(10))
    with store.consumer(QUEUE) as one, store.consumer(QUEUE) as two:
        held = one.dequeue(2)
        more = two.dequeue(10)
        assert [message.payload for message in held + more] == [0, 1, 2]
        assert one.dequeue(10) == two.dequeue(10) == []
        one.ack(held[0])
        one.release(held[1])
        assert [message.payload for message in two.dequeue(10)] == [1, 3]
        clock.advance(29)
        two.extend(more[0], 30)
        clock.advance(2)  # two leases have lapsed, one goes on
        assert [message.payload for message in one.dequeue(10)] == [1, 3]
        assert two.dequeue(10) == []


@pytest.mark.parametrize("end", ["ack", "release", "delete", "fail", "dead"])
def test_every_end_makes_room(store: Any, admin: Any, end: str) -> None:
    queue_with(admin, max_in_flight=1)
    store.producer(QUEUE).enqueue_many([1, 2])
    with store.consumer(QUEUE) as consumer:
        (held,) = consumer.dequeue(10)
        assert consumer.dequeue(10) == []
        if end == "dead":
            consumer.fail(held, dead=True)
        else:
            getattr(consumer, end)(held)
        assert len(consumer.dequeue(10)) == 1
        assert consumer.dequeue(10) == []


def test_no_more_of_a_key_than_allowed(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=2)
    keys = ["a"] * 5 + ["b", None, None, None]
    store.producer(QUEUE).enqueue_many(range(9), keys=keys, unique=None)
    with store.consumer(QUEUE) as consumer:
        held = consumer.dequeue(10)
        assert [message.payload for message in held] == [0, 1, 5, 6, 7, 8]
        assert consumer.dequeue(10) == []
        assert admin.queue_stats(QUEUE).blocked == 3
        consumer.ack(held[0])
        assert [message.payload for message in consumer.dequeue(10)] == [2]
        consumer.ack_many(held[1:3])
        assert [message.payload for message in consumer.dequeue(10)] == [3]
        assert consumer.dequeue(10) == []


def test_a_key_with_a_long_backlog_blocks_nobody(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue_many(range(500), keys=["busy"] * 500, unique=None)
    producer.enqueue("other", key="other", unique=None)
    with store.consumer(QUEUE) as consumer:
        found = [message.payload for _ in range(5) for message in consumer.dequeue(10)]
        assert found == [0, "other"]


def test_a_message_of_a_group_can_have_a_key_with_a_limit(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    store.producer(QUEUE).enqueue_many(
        range(4), keys=["k"] * 4, groups=["a", "b", "a", "b"], unique=None
    )
    with store.consumer(QUEUE) as consumer:
        order = []
        for _ in range(4):
            (message,) = consumer.dequeue(10)
            order.append(message.payload)
            assert consumer.dequeue(10) == []
            consumer.ack(message)
    assert sorted(order) == [0, 1, 2, 3]
    assert order.index(0) < order.index(2)
    assert order.index(1) < order.index(3)


def test_no_more_in_a_period_than_allowed(store: Any, admin: Any, clock: ManualClock) -> None:
    queue_with(admin, rate=Rate(5, per=60))
    store.producer(QUEUE).enqueue_many(range(30))
    with store.consumer(QUEUE) as consumer:
        consumer.ack_many(consumer.dequeue(2))
        clock.advance(30)
        held = consumer.dequeue(10)
        assert len(held) == 3
        assert consumer.dequeue(10) == []
        consumer.ack_many(held)  # what has started counts, also when it is over
        assert consumer.dequeue(10) == []
        clock.advance(30.5)
        assert len(consumer.dequeue(10)) == 2
        clock.advance(30)
        assert len(consumer.dequeue(10)) == 3


def test_messages_that_are_not_there_use_nothing_up(store: Any, admin: Any) -> None:
    queue_with(admin, rate=Rate(3, per=60))
    with store.consumer(QUEUE) as consumer:
        for _ in range(5):
            assert consumer.dequeue(10) == []
        store.producer(QUEUE).enqueue_many(range(5))
        assert len(consumer.dequeue(10)) == 3


def test_limits_change_while_messages_are_in_flight(store: Any, admin: Any) -> None:
    queue_with(admin)
    store.producer(QUEUE).enqueue_many(range(10))
    with store.consumer(QUEUE) as consumer:
        held = consumer.dequeue(4)
        admin.configure_queue(QUEUE, max_in_flight=3)
        assert consumer.dequeue(10) == []
        consumer.ack_many(held[:2])
        assert len(consumer.dequeue(10)) == 1
        admin.configure_queue(QUEUE, max_in_flight=5)
        assert len(consumer.dequeue(10)) == 2
        admin.configure_queue(QUEUE, max_in_flight=None)
        assert len(consumer.dequeue(10)) == 3


def test_a_limit_of_keys_that_goes_away_leaves_nothing_behind(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    store.producer(QUEUE).enqueue_many(range(6), keys=["k"] * 6, unique=None)
    with store.consumer(QUEUE) as consumer:
        assert len(consumer.dequeue(10)) == 1
        admin.configure_queue(QUEUE, max_in_flight_per_key=3)
        assert len(consumer.dequeue(10)) == 2
        admin.configure_queue(QUEUE, max_in_flight_per_key=None)
        assert len(consumer.dequeue(10)) == 3


def test_delayed_expired_and_paused_are_as_without_limits(
    store: Any, admin: Any, clock: ManualClock
) -> None:
    queue_with(admin, max_in_flight=5)
    producer = store.producer(QUEUE)
    producer.enqueue("late", delay=10)
    producer.enqueue("gone", ttl=5)
    producer.enqueue("urgent", priority=9, delay=10)
    with store.consumer(QUEUE) as consumer:
        clock.advance(10)
        admin.pause_queue(QUEUE)
        assert consumer.dequeue(10) == []
        admin.resume_queue(QUEUE)
        assert [message.payload for message in consumer.dequeue(10)] == ["urgent", "late"]
        assert [found.payload for found in admin.list_archive(QUEUE)] == ["gone"]


def test_threads_never_exceed_the_limits(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight=4, max_in_flight_per_key=2)
    total = 120
    store.producer(QUEUE).enqueue_many(
        range(total), keys=[f"key {n % 3}" for n in range(total)], unique=None
    )
    lock, in_flight, most, done = threading.Lock(), Counter[str](), Counter[str](), [0]

    def consume(_: int) -> None:
        with store.consumer(QUEUE, lease=600) as consumer:
            while done[0] < total:
                claimed = consumer.dequeue(3)
                with lock:
                    for message in claimed:
                        in_flight[message.key] += 1
                        most[message.key] = max(most[message.key], in_flight[message.key])
                    most["all"] = max(most["all"], in_flight.total())
                    in_flight.subtract(message.key for message in claimed)
                    done[0] += len(claimed)
                consumer.ack_many(claimed)

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(consume, range(5)))
    assert done[0] == total
    assert most.pop("all") <= 4
    assert max(most.values()) <= 2
