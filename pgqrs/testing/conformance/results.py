"""Results: what was made of a message is kept with it in the archive."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pgqrs import InvalidArgument, InvalidPayload, LeaseLost, PayloadTooLarge
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import Harness

RESULTS = [
    {"deep": [1, {"er": None}], "text": "ä\u2028'\"\\"},
    12345678901234567890123,
    1e16,
    "text",
    False,
    0,
    [],
]


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_a_result_comes_back_unchanged(
    admin: Any, producer: Any, consumer: Any, result: Any
) -> None:
    producer.enqueue("work")
    (message,) = consumer.dequeue()
    consumer.ack(message, result=result)
    kept = admin.get_archived(message.id).result
    assert (kept, type(kept)) == (result, type(result))


def test_many_results_reach_their_own_messages(admin: Any, producer: Any, consumer: Any) -> None:
    ids = producer.enqueue_many(range(len(RESULTS) + 1))
    consumer.ack_many(consumer.dequeue(len(ids)), results=[*RESULTS, None])
    assert [admin.get_archived(id).result for id in ids] == [*RESULTS, None]
    assert [admin.get_archived(id).payload for id in ids] == list(range(len(ids)))


def test_without_a_result_there_is_none(admin: Any, producer: Any, consumer: Any) -> None:
    ids = producer.enqueue_many([1, 2, 3])
    first, *others = consumer.dequeue(3)
    consumer.ack(first)
    consumer.ack_many(others)
    assert [admin.get_archived(id).result for id in ids] == [None, None, None]


def test_a_result_that_cannot_be_kept_changes_nothing(
    admin: Any, producer: Any, consumer: Any
) -> None:
    producer.enqueue("work")
    (message,) = consumer.dequeue()
    with pytest.raises(InvalidPayload, match="result"):
        consumer.ack(message, result={1, 2})
    with pytest.raises(PayloadTooLarge, match="result"):
        consumer.ack(message, result="x" * 2_000_000)
    with pytest.raises(InvalidArgument, match="one for each"):
        consumer.ack_many([message], results=[1, 2])
    consumer.ack(message, result="fine")
    assert admin.get_archived(message.id).result == "fine"


def test_the_first_result_stays(
    admin: Any, producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue("work")
    (lost,) = consumer.dequeue()
    clock.advance(31)
    (message,) = rival.dequeue()
    rival.ack(message, result="right")
    rival.ack(message, result="again")
    with pytest.raises(LeaseLost):
        consumer.ack(lost, result="late")
    assert admin.get_archived(message.id).result == "right"


def test_a_result_is_kept_with_the_transaction(
    harness: Harness, store: Any, admin: Any, producer: Any, consumer: Any
) -> None:
    ids = producer.enqueue_many([1, 2, 3])
    messages = consumer.dequeue(3)
    with pytest.raises(ZeroDivisionError), harness.transaction(store) as transaction:
        transaction.using.ack(messages[0], result="rolled back")
        raise ZeroDivisionError
    with harness.transaction(store) as transaction:
        transaction.using.ack(messages[0], result="one")
        transaction.using.ack_many(messages[1:], results=["two", "three"])
    assert [admin.get_archived(id).result for id in ids] == ["one", "two", "three"]


def test_a_message_can_be_given_back_until_a_time(
    producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue("work")
    (message,) = consumer.dequeue()
    with pytest.raises(InvalidArgument, match="not both"):
        consumer.release(message, delay=1, eta=clock.now())
    consumer.release(message, eta=clock.now() + timedelta(hours=1))
    clock.advance(3599)
    assert consumer.dequeue() == []
    clock.advance(1)
    (message,) = consumer.dequeue()
    assert (message.read_ct, message.attempt) == (2, 1)
