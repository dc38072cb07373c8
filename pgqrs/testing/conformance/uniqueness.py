"""Unique keys: a duplicate is an answer, not an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func, select

from pgqrs import InvalidArgument, InvalidPayload
from pgqrs.models import keys as key_rows
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness


def is_new(producer: Any, key: str = "order-17", **options: Any) -> bool:
    created: bool = producer.enqueue("again", key=key, **options).created
    return created


def test_a_duplicate_is_the_message_that_is_there(producer: Any, consumer: Any, admin: Any) -> None:
    first = producer.enqueue("first", key="order-17")
    second = producer.enqueue("second", key="order-17")
    assert (first.created, second.created) == (True, False)
    assert first == second
    (message,) = consumer.dequeue(10)
    assert (message.id, message.payload, message.key) == (first, "first", "order-17")
    consumer.ack(message)
    assert admin.get_archived(first).key == "order-17"


def test_other_keys_and_messages_without_one_are_not_concerned(
    store: Any, producer: Any, admin: Any
) -> None:
    admin.create_queue("other")
    assert is_new(producer, "a")
    assert is_new(producer, "b")
    assert is_new(store.producer("other"), "a")
    assert producer.enqueue("none").created
    assert producer.enqueue("none").created


def test_until_it_is_finished(producer: Any, consumer: Any) -> None:
    assert is_new(producer)
    (message,) = consumer.dequeue()
    assert not is_new(producer)
    consumer.fail(message, "once more")
    assert not is_new(producer)
    (message,) = consumer.dequeue()
    consumer.ack(message)
    assert is_new(producer)


@pytest.mark.parametrize("end", ["delete", "ack", "dead"])
def test_every_end_frees_the_key(producer: Any, consumer: Any, end: str) -> None:
    producer.enqueue(1, key="k")
    (message,) = consumer.dequeue()
    if end == "dead":
        consumer.fail(message, dead=True)
    else:
        getattr(consumer, end)(message)
    assert is_new(producer, "k")


def test_while_it_is_queued(producer: Any, consumer: Any, clock: ManualClock) -> None:
    assert is_new(producer, unique="queued")
    assert not is_new(producer, unique="queued")
    (message,) = consumer.dequeue(lease=30)
    assert is_new(producer, unique="queued")  # the first is at work, the second waits
    assert not is_new(producer, unique="queued")
    consumer.ack(message)
    assert not is_new(producer, unique="queued")


def test_a_delayed_message_is_queued(producer: Any) -> None:
    assert is_new(producer, unique="queued", delay=60)
    assert not is_new(producer, unique="queued")


def test_for_a_while_after_its_end(producer: Any, consumer: Any, clock: ManualClock) -> None:
    first = producer.enqueue(1, key="k", unique=60)
    clock.advance(100)
    again = producer.enqueue(2, key="k")
    assert (again, again.created) == (first, False)  # not finished: the window has not begun
    consumer.ack(consumer.dequeue()[0])
    clock.advance(59)
    again = producer.enqueue(2, key="k")
    assert (again, again.created) == (first, False)
    clock.advance(2)
    assert is_new(producer, "k")


def test_an_expired_message_keeps_nobody_out(producer: Any, clock: ManualClock) -> None:
    assert is_new(producer, ttl=10)
    clock.advance(11)
    assert is_new(producer)


def test_not_unique_at_all(producer: Any, consumer: Any) -> None:
    assert is_new(producer, unique=None)
    assert is_new(producer, unique=None)
    assert [message.key for message in consumer.dequeue(10)] == ["order-17"] * 2


def test_batches(producer: Any, consumer: Any) -> None:
    (a,) = producer.enqueue_many(["a"], keys=["a"])
    ids = producer.enqueue_many(
        ["b", "a", "c", "b", "none", "none"], keys=["b", "a", "c", "b", None, None]
    )
    assert [id.created for id in ids] == [True, False, True, False, True, True]
    assert ids[1] == a
    assert ids[3] == ids[0]
    found = consumer.dequeue(10)
    assert [message.payload for message in found] == ["a", "b", "c", "none", "none"]
    assert [message.id for message in found] == [a, ids[0], ids[2], ids[4], ids[5]]
    assert all(not id.created for id in producer.enqueue_many([1, 2], keys=["a", "b"]))
    assert producer.enqueue_many([], keys=[]) == []


def test_payloads_are_the_same_with_keys(producer: Any, consumer: Any) -> None:
    payloads: list[Any] = [None, 17, 2**70, 1.5, 'text " \\ é 🙂', ["a", {"b": [True]}], {}, 1e300]
    producer.enqueue_many(payloads, keys=[str(n) for n in range(len(payloads))])
    assert [message.payload for message in consumer.dequeue(20)] == payloads


def test_one_bad_payload_takes_no_key(producer: Any) -> None:
    with pytest.raises(InvalidPayload):
        producer.enqueue_many([1, {1, 2}], keys=["a", "b"])
    assert is_new(producer, "a")


def test_in_a_transaction(harness: Harness, store: Any, admin: Any, consumer: Any) -> None:
    with pytest.raises(ZeroDivisionError), harness.transaction(store) as transaction:
        assert transaction.using.enqueue(QUEUE, 1, key="k").created
        assert not transaction.using.enqueue(QUEUE, 1, key="k").created
        raise ZeroDivisionError
    with harness.transaction(store) as transaction:
        assert transaction.using.enqueue(QUEUE, 2, key="k").created
        ids = transaction.using.enqueue_many(QUEUE, [3, 4], keys=["k", "l"])
        assert [id.created for id in ids] == [False, True]
    assert not is_new(store.producer(QUEUE), "k")
    assert [message.payload for message in consumer.dequeue(10)] == [2, 4]


@pytest.mark.parametrize("unique", ["unfinished", "queued", 60])
def test_of_many_at_once_one_is_first(store: Any, admin: Any, unique: Any) -> None:
    def enqueue(number: int) -> list[Any]:
        producer = store.producer(QUEUE)
        return [
            *producer.enqueue_many([number] * 2, keys=["b", "a"], unique=unique),
            *producer.enqueue_many([number] * 2, keys=["a", "b"], unique=unique),
            producer.enqueue(number, key="a", unique=unique),
        ]

    with ThreadPoolExecutor(6) as threads:
        ids = [id for found in threads.map(enqueue, range(12)) for id in found]
    assert sum(id.created for id in ids) == 2
    assert len(set(ids)) == 2


def test_rows_of_free_keys_are_deleted_in_passing(
    store: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    def count() -> int:
        found: int = store.shard(QUEUE).read(
            lambda connection: connection.execute(
                select(func.count()).select_from(key_rows)
            ).scalar_one()
        )
        return found

    producer.enqueue_many(range(20), keys=[str(n) for n in range(20)])
    consumer.ack_many(consumer.dequeue(15))
    assert count() == 20
    clock.advance(3600)
    producer.enqueue(1, key="new")
    assert count() == 6


@pytest.mark.parametrize("key", ["", 17, "x" * 513, "nul\0", "two\nlines"])
def test_a_bad_key_is_refused(producer: Any, key: Any) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        producer.enqueue(1, key=key)
    with pytest.raises(InvalidArgument, match="key"):
        producer.enqueue_many([1], keys=[key])
    with pytest.raises(InvalidArgument, match="group"):
        producer.enqueue(1, group=key)


def test_bad_scopes_and_numbers_of_keys_are_refused(producer: Any) -> None:
    for unique in ("for ever", -1, True):
        with pytest.raises(InvalidArgument, match="unique"):
            producer.enqueue(1, key="k", unique=unique)
    with pytest.raises(InvalidArgument, match="keys"):
        producer.enqueue_many([1, 2], keys=["a"])
    with pytest.raises(InvalidArgument, match="groups"):
        producer.enqueue_many([1, 2], groups=["a", "b", "c"])


def test_deleting_the_queue_frees_its_keys(store: Any, producer: Any, admin: Any) -> None:
    assert is_new(producer)
    admin.delete_queue(QUEUE, force=True)
    admin.create_queue(QUEUE)
    assert is_new(producer)
