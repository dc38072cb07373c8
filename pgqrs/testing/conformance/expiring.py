"""Expiry: what nobody began with in time is never delivered, and ends in the archive."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgqrs import InvalidArgument, QueueNotFound
from pgqrs.repositories import dequeue
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE


def payloads_of(found: list[Any]) -> list[Any]:
    return [message.payload for message in found]


@pytest.mark.parametrize("ttl", [10, timedelta(seconds=10)])
def test_a_message_expires_after_its_ttl(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock, ttl: Any
) -> None:
    expiring = producer.enqueue("expires", ttl=ttl)
    producer.enqueue_many(["stays"])
    assert admin.get_message(expiring).expires_at == clock.now() + timedelta(seconds=10)
    clock.advance(10)
    assert payloads_of(consumer.dequeue(10)) == ["stays"]
    archived = admin.get_archived(expiring)
    assert (archived.archive_reason, archived.read_ct) == ("expired", 0)
    assert archived.archived_at == clock.now()
    assert admin.dead_letters(QUEUE) == []


def test_until_then_it_is_like_any_other(producer: Any, consumer: Any, clock: ManualClock) -> None:
    producer.enqueue("a", ttl=10)
    producer.enqueue("b", expires_at=clock.now() + timedelta(seconds=10))
    clock.advance(9.999)
    assert payloads_of(consumer.dequeue(10)) == ["a", "b"]


def test_a_delayed_message_may_expire_before_its_time(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    id = producer.enqueue("late", delay=100, ttl=10)
    clock.advance(10)
    assert consumer.dequeue() == []
    assert admin.get_archived(id).archive_reason == "expired"


def test_who_has_begun_may_finish(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    id = producer.enqueue("begun", ttl=10)
    (message,) = consumer.dequeue(lease=100)
    clock.advance(50)
    assert consumer.dequeue() == []
    assert admin.expire(QUEUE) == 0
    consumer.ack(message)
    assert admin.get_archived(id).archive_reason == "completed"


def test_a_lapsed_lease_after_the_expiry_ends_it(
    admin: Any, producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    id = producer.enqueue("begun", ttl=10)
    consumer.dequeue()
    clock.advance(30)
    assert rival.dequeue() == []
    assert admin.get_archived(id).archive_reason == "expired"


def test_any_number_of_expired_ones_does_not_hide_the_others(
    admin: Any,
    producer: Any,
    consumer: Any,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dequeue, "AT_ONCE", 20)
    producer.enqueue_many(range(150), ttl=10, priority=5)
    producer.enqueue("valid")
    clock.advance(10)
    assert payloads_of(consumer.dequeue()) == ["valid"]
    assert admin.queue_stats(QUEUE).archived["expired"] == 150


def test_one_dequeue_sweeps_only_so_much(
    admin: Any,
    producer: Any,
    consumer: Any,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dequeue, "AT_ONCE", 10)
    producer.enqueue_many(range(500), ttl=10)
    clock.advance(10)
    assert consumer.dequeue() == []
    assert admin.queue_stats(QUEUE).archived["expired"] == 100
    assert admin.expire(QUEUE) == 400


def test_the_first_to_expire_are_swept_first(admin: Any, producer: Any, clock: ManualClock) -> None:
    late, early = producer.enqueue("late", ttl=20), producer.enqueue("early", ttl=10)
    clock.advance(15)
    assert admin.expire(QUEUE) == 1
    clock.advance(5)
    assert admin.expire(QUEUE) == 1
    assert [found.original_message_id for found in admin.list_archive(QUEUE)] == [early, late]
    with pytest.raises(QueueNotFound):
        admin.expire("missing")


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": -1},
        {"ttl": "5"},
        {"expires_at": datetime(2030, 1, 1)},
        {"ttl": 1, "expires_at": datetime(2030, 1, 1, tzinfo=UTC)},
    ],
)
def test_a_bad_expiry_is_refused(producer: Any, consumer: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        producer.enqueue(1, **options)
    assert consumer.dequeue() == []


def test_an_expiry_in_the_past_is_expired(admin: Any, producer: Any, consumer: Any) -> None:
    id = producer.enqueue(1, expires_at=datetime(2001, 1, 1, tzinfo=UTC))
    assert consumer.dequeue() == []
    assert admin.get_archived(id).archive_reason == "expired"
