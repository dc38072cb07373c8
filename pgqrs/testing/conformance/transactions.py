"""The transactional outbox: pgqrs inside a transaction of the application's own."""

from __future__ import annotations

from typing import Any

import pytest

from pgqrs import InvalidArgument, InvalidPayload, LeaseLost, QueueNotFound
from pgqrs.testing.conformance.harness import BESIDE, QUEUE, Harness


class Undo(Exception):
    pass


@pytest.fixture(autouse=True)
def orders(harness: Harness, store: Any) -> Any:
    """A table of the application's own, and what it holds."""
    with harness.transaction(store) as transaction:
        transaction.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER)")
        transaction.execute("DELETE FROM orders")

    def count(connection: Any) -> int:
        found: int = connection.exec_driver_sql("SELECT count(*) FROM orders").scalar_one()
        return found

    return lambda: store.shard(QUEUE).read(count)


def test_what_is_committed_is_there(
    harness: Harness, store: Any, admin: Any, consumer: Any, orders: Any
) -> None:
    with harness.transaction(store) as transaction:
        transaction.execute("INSERT INTO orders VALUES (1)")
        one = transaction.using.enqueue(QUEUE, {"n": 1}, priority=2)
        more = transaction.using.enqueue_many(QUEUE, [{"n": 2}, {"n": 3}], headers={"a": "b"})
    assert orders() == 1
    assert [message.id for message in consumer.dequeue(10)] == [one, *more]


def test_what_is_refused_leaves_the_transaction_as_it_was(
    harness: Harness, store: Any, admin: Any, consumer: Any
) -> None:
    with harness.transaction(store) as transaction:
        with pytest.raises(QueueNotFound):
            transaction.using.enqueue("not there", 1)
        transaction.using.enqueue(QUEUE, 2)
    assert [message.payload for message in consumer.dequeue(10)] == [2]


def test_a_lone_enqueue_is_rolled_back_too(
    harness: Harness, store: Any, admin: Any, producer: Any, consumer: Any
) -> None:
    with pytest.raises(Undo), harness.transaction(store) as transaction:
        transaction.using.enqueue(QUEUE, 1)
        raise Undo
    with pytest.raises(Undo), harness.transaction(store) as transaction:
        transaction.using.enqueue_many(QUEUE, [2, 3])
        raise Undo
    assert consumer.dequeue(10) == []
    producer.enqueue("real")
    (held,) = consumer.dequeue()
    for end in ("ack", "release", "delete", "fail"):
        with pytest.raises(Undo), harness.transaction(store) as transaction:
            getattr(transaction.using, end)(held)
            raise Undo
        assert admin.get_message(held.id) == held


def test_what_is_rolled_back_never_was(
    harness: Harness, store: Any, admin: Any, consumer: Any, orders: Any
) -> None:
    with pytest.raises(Undo), harness.transaction(store) as transaction:
        transaction.execute("INSERT INTO orders VALUES (1)")
        transaction.using.enqueue(QUEUE, 1)
        transaction.using.enqueue_many(QUEUE, [2, 3])
        raise Undo
    assert orders() == 0
    assert consumer.dequeue(10) == []


def test_acks_are_part_of_it_too(
    harness: Harness, store: Any, admin: Any, producer: Any, consumer: Any, orders: Any
) -> None:
    producer.enqueue_many(range(6))
    a, b, c, d, e, f = consumer.dequeue(6)
    with pytest.raises(Undo), harness.transaction(store) as transaction:
        transaction.using.ack(a)
        raise Undo
    assert admin.get_message(a.id) == a
    with harness.transaction(store) as transaction:
        transaction.execute("INSERT INTO orders VALUES (1)")
        transaction.using.ack_many([a, b])
        assert transaction.using.fail(c, "no", dead=True) is False
        transaction.using.release(d)
        transaction.using.extend(e, 100)
        transaction.using.delete(f)
    assert orders() == 1
    assert [found.payload for found in admin.list_archive(QUEUE)] == [0, 1, 2]
    assert [message.payload for message in consumer.dequeue(10)] == [3]


def test_a_refusal_does_not_spoil_the_transaction(
    harness: Harness, store: Any, producer: Any, consumer: Any, rival: Any, orders: Any
) -> None:
    producer.enqueue(1)
    (held,) = consumer.dequeue()
    consumer.ack(held)
    with harness.transaction(store) as transaction:
        with pytest.raises(QueueNotFound):
            transaction.using.enqueue(BESIDE, 1)
        with pytest.raises(InvalidPayload):
            transaction.using.enqueue(QUEUE, b"no")
        with pytest.raises(LeaseLost):
            transaction.using.release(held)
        with pytest.raises(InvalidArgument, match="pass the message"):
            transaction.using.ack(held.id)
        transaction.execute("INSERT INTO orders VALUES (1)")
        transaction.using.enqueue(QUEUE, "after all")
    assert orders() == 1
    assert [message.payload for message in consumer.dequeue(10)] == ["after all"]


def test_something_else_than_a_transaction_is_refused(store: Any) -> None:
    with pytest.raises(InvalidArgument, match="using"):
        store.using("a string")
