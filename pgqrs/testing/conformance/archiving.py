"""The archive: listing, dead letters, replaying, retention."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pgqrs import InvalidArgument, MessageNotFound
from pgqrs import admin as admin_module
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE


@pytest.fixture
def ended(producer: Any, consumer: Any) -> list[int]:
    """Six messages: 0 and 1 completed, 2 to 5 failed. Returns their ids."""
    ids: list[int] = producer.enqueue_many(range(6))
    held = consumer.dequeue(6)
    consumer.ack_many(held[:2])
    consumer.fail_many(held[2:], "broken", dead=True)
    return ids


def test_the_archive_is_listed_in_pages(admin: Any, ended: list[int]) -> None:
    everything = admin.list_archive(QUEUE)
    assert [found.original_message_id for found in everything] == ended
    first = admin.list_archive(QUEUE, n=4)
    assert first == everything[:4]
    assert admin.list_archive(QUEUE, n=4, after=first[-1].id) == everything[4:]
    completed = admin.list_archive(QUEUE, reason="completed")
    assert [found.payload for found in completed] == [0, 1]
    with pytest.raises(InvalidArgument, match="reason"):
        admin.list_archive(QUEUE, reason="lost")


def test_dead_letters_are_the_failed_ones(admin: Any, ended: list[int]) -> None:
    dead = admin.dead_letters(QUEUE)
    assert [(found.original_message_id, found.error) for found in dead] == [
        (id, "broken") for id in ended[2:]
    ]
    assert admin.dead_letters(QUEUE, n=1, after=dead[0].id) == [dead[1]]


def test_replaying_enqueues_anew_and_keeps_the_history(
    admin: Any, consumer: Any, ended: list[int], clock: ManualClock
) -> None:
    clock.advance(60)
    (new,) = admin.replay(ended[2])
    (message,) = consumer.dequeue(10)
    assert (message.id, message.payload, message.read_ct) == (new, 2, 1)
    assert message.enqueued_at == clock.now()
    assert admin.get_archived(ended[2]).replayed_as == new
    assert [found.payload for found in admin.dead_letters(QUEUE)] == [3, 4, 5]
    assert len(admin.list_archive(QUEUE, reason="failed")) == 4


def test_replaying_many_keeps_their_order_and_pairs(
    admin: Any, consumer: Any, ended: list[int]
) -> None:
    new = admin.replay([ended[5], ended[0], ended[3]])
    by_id = {message.id: message.payload for message in consumer.dequeue(10)}
    assert [by_id[id] for id in new] == [5, 0, 3]
    assert [admin.get_archived(ended[n]).replayed_as for n in (5, 0, 3)] == new


def test_replaying_something_missing_replays_nothing(
    admin: Any, consumer: Any, ended: list[int]
) -> None:
    with pytest.raises(MessageNotFound) as caught:
        admin.replay([ended[2], 999_999])
    assert caught.value.id == 999_999
    assert consumer.dequeue(10) == []
    assert admin.replay([]) == []


def test_all_dead_letters_can_be_replayed(
    admin: Any, consumer: Any, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "BATCH", 3)
    assert admin.replay_dead_letters(QUEUE) == 4
    assert admin.dead_letters(QUEUE) == []
    assert admin.replay_dead_letters(QUEUE) == 0
    assert [message.payload for message in consumer.dequeue(10)] == [2, 3, 4, 5]


def test_old_ones_are_forgotten_in_batches(
    admin: Any,
    producer: Any,
    consumer: Any,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_module, "BATCH", 4)
    producer.enqueue_many(range(10))
    consumer.ack_many(consumer.dequeue(9))
    clock.advance(60)
    consumer.ack_many(consumer.dequeue())
    assert admin.purge_archive(QUEUE, older_than=timedelta(seconds=61)) == 0
    assert admin.purge_archive(QUEUE, older_than=60) == 9
    assert [found.payload for found in admin.list_archive(QUEUE)] == [9]


def test_forgetting_can_be_limited_to_a_reason(admin: Any, ended: list[int]) -> None:
    assert admin.purge_archive(QUEUE, older_than=0, reason="completed") == 2
    assert len(admin.list_archive(QUEUE)) == 4


def test_the_retention_of_the_queue_is_the_default_age(
    admin: Any, ended: list[int], clock: ManualClock
) -> None:
    clock.advance(100)
    assert admin.purge_archive(QUEUE) == 0
    admin.configure_queue(QUEUE, retention=101)
    assert admin.purge_archive(QUEUE) == 0
    admin.configure_queue(QUEUE, retention=100)
    assert admin.purge_archive(QUEUE) == 6


def test_unknown_ids_are_named(admin: Any) -> None:
    for ask in (admin.get_message, admin.get_archived):
        with pytest.raises(MessageNotFound) as caught:
            ask(12345)
        assert caught.value.id == 12345
