"""Groups: strict order, one in flight, and no group blocks another."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness


def payloads(messages: list[Any]) -> list[Any]:
    return [message.payload for message in messages]


def test_one_at_a_time_and_in_order(producer: Any, consumer: Any, rival: Any) -> None:
    for n in range(3):
        producer.enqueue(n, group="g")
    for n in range(3):
        (message,) = consumer.dequeue(10)
        assert (message.payload, message.group) == (n, "g")
        assert rival.dequeue(10) == []
        consumer.ack(message)
    assert consumer.dequeue(10) == []


def test_a_group_does_not_block_others(producer: Any, consumer: Any) -> None:
    producer.enqueue_many(["a1", "a2", "b1", "none", "b2"], groups=["a", "a", "b", None, "b"])
    held = consumer.dequeue(10)
    assert payloads(held) == ["a1", "b1", "none"]
    assert consumer.dequeue(10) == []
    consumer.ack(held[1])
    assert payloads(consumer.dequeue(10)) == ["b2"]


def test_a_message_that_comes_back_is_still_the_first(
    producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue_many([1, 2], groups=["g", "g"])
    (first,) = consumer.dequeue(10)
    consumer.release(first)
    (first,) = consumer.dequeue(10)
    consumer.fail(first, "later", delay=20)
    assert consumer.dequeue(10) == []  # strict: nobody overtakes
    clock.advance(20)
    (first,) = consumer.dequeue(10, lease=5)
    assert first.payload == 1
    clock.advance(6)
    (first,) = consumer.dequeue(10)  # after its lease has lapsed
    assert first.payload == 1
    consumer.ack(first)
    assert payloads(consumer.dequeue(10)) == [2]


@pytest.mark.parametrize("end", ["ack", "archive", "delete", "dead", "ack by id", "ack_many"])
def test_however_the_first_ends_the_next_goes_ahead(
    producer: Any, consumer: Any, admin: Any, end: str
) -> None:
    producer.enqueue_many([1, 2], groups=["g", "g"])
    (first,) = consumer.dequeue(10)
    if end == "dead":
        consumer.fail(first, dead=True)
    elif end == "ack by id":
        consumer.ack(first.id)
    elif end == "ack_many":
        consumer.ack_many([first])
    else:
        getattr(consumer, end)(first)
    assert payloads(consumer.dequeue(10)) == [2]


def test_the_first_expires_or_lapses_for_good(
    producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue(1, group="g", ttl=5)
    producer.enqueue(2, group="g", ttl=5)
    producer.enqueue(3, group="g")
    clock.advance(6)
    (message,) = consumer.dequeue(10)
    assert message.payload == 3
    producer.enqueue(4, group="g")
    for _ in range(2):  # three attempts are allowed
        clock.advance(31)
        assert payloads(consumer.dequeue(10)) == [3]
    clock.advance(31)
    assert payloads(consumer.dequeue(10)) == [4]


def test_delayed_messages_of_a_group(producer: Any, consumer: Any, clock: ManualClock) -> None:
    producer.enqueue("late", group="g", delay=60)
    producer.enqueue("early", group="g")
    assert consumer.dequeue(10) == []  # in order of enqueueing
    clock.advance(60)
    (late,) = consumer.dequeue(10)
    assert late.payload == "late"
    producer.enqueue("delayed again", group="g", delay=30)
    consumer.ack(late)
    (early,) = consumer.dequeue(10)
    consumer.ack(early)
    assert consumer.dequeue(10) == []
    clock.advance(30)
    assert payloads(consumer.dequeue(10)) == ["delayed again"]


def test_priorities_are_between_groups(producer: Any, consumer: Any) -> None:
    producer.enqueue("a1", group="a")
    producer.enqueue("a2", group="a", priority=9)
    producer.enqueue("b1", group="b", priority=5)
    (b1, a1) = consumer.dequeue(10)
    assert payloads([b1, a1]) == ["b1", "a1"]


def test_blocked_messages_are_counted_apart(producer: Any, consumer: Any, admin: Any) -> None:
    producer.enqueue_many(range(5), groups=["g"] * 5)
    consumer.dequeue(10)
    stats = admin.queue_stats(QUEUE)
    assert (stats.ready, stats.delayed, stats.leased, stats.blocked) == (0, 0, 1, 4)


def test_purging_leaves_a_group_that_works(producer: Any, consumer: Any, admin: Any) -> None:
    producer.enqueue_many(range(5), groups=["g"] * 5)
    consumer.dequeue()
    assert admin.purge_queue(QUEUE) == 5
    producer.enqueue_many(["a", "b"], groups=["g", "g"])
    (a,) = consumer.dequeue(10)
    assert a.payload == "a"
    consumer.ack(a)
    assert payloads(consumer.dequeue(10)) == ["b"]


def test_replayed_messages_go_to_the_end_of_their_group(
    producer: Any, consumer: Any, admin: Any
) -> None:
    producer.enqueue_many([1, 2, 3], groups=["g"] * 3)
    for _ in range(2):
        (message,) = consumer.dequeue(10)
        consumer.fail(message, "no", dead=True)
    (third,) = consumer.dequeue(10)
    assert admin.replay_dead_letters(QUEUE) == 2
    assert consumer.dequeue(10) == []
    consumer.ack(third)
    for n in (1, 2):
        (message,) = consumer.dequeue(10)
        assert (message.payload, message.group) == (n, "g")
        consumer.ack(message)


def test_in_a_transaction(harness: Harness, store: Any, admin: Any, consumer: Any) -> None:
    with harness.transaction(store) as transaction:
        transaction.using.enqueue(QUEUE, 1, group="g")
        transaction.using.enqueue_many(QUEUE, [2, 3], groups=["g", "g"])
    (first,) = consumer.dequeue(10)
    with pytest.raises(ZeroDivisionError), harness.transaction(store) as transaction:
        transaction.using.ack(first)
        raise ZeroDivisionError
    assert consumer.dequeue(10) == []
    with harness.transaction(store) as transaction:
        transaction.using.ack(first)
    assert payloads(consumer.dequeue(10)) == [2]


def test_what_is_not_json_lets_the_next_go_ahead(
    harness: Harness, producer: Any, consumer: Any
) -> None:
    broken = producer.enqueue("fine", group="g")
    producer.enqueue("next", group="g")
    if not harness.corrupt(broken):
        consumer.delete(consumer.dequeue()[0])  # this database holds nothing but JSON
    found = [message.payload for _ in range(2) for message in consumer.dequeue(10)]
    assert found == ["next"]


def test_threads_keep_the_order_of_every_group(store: Any, admin: Any) -> None:
    groups, each, workers = 8, 25, 6

    def produce(name: int) -> None:
        producer = store.producer(QUEUE)
        for n in range(each):
            producer.enqueue(n, group=f"group {name}")

    lock, in_flight, order = threading.Lock(), Counter[str](), dict[str, list[int]]()
    done = threading.Event()

    def consume(_: int) -> None:
        with store.consumer(QUEUE, lease=600) as consumer:
            while not done.is_set():
                claimed = consumer.dequeue(3)
                with lock:
                    for message in claimed:
                        in_flight[message.group] += 1
                        assert in_flight[message.group] == 1
                        order.setdefault(message.group, []).append(message.payload)
                    if sum(map(len, order.values())) == groups * each:
                        done.set()
                    in_flight.subtract(message.group for message in claimed)
                consumer.ack_many(claimed)

    with ThreadPoolExecutor(2 * workers) as threads:
        consumers = [threads.submit(consume, n) for n in range(workers)]
        list(threads.map(produce, range(groups)))
        for future in consumers:
            future.result()
    assert order == {f"group {name}": list(range(each)) for name in range(groups)}
