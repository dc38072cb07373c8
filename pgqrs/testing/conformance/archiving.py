"""The archive: listing, dead letters, replaying, retention."""

from __future__ import annotations

from datetime import datetime, timedelta
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


@pytest.fixture
def varied(producer: Any, consumer: Any, clock: ManualClock) -> list[int]:
    """Six messages that ended a minute apart, in all ways. Returns their ids."""
    ids: list[int] = []
    for n, (payload, headers) in enumerate(
        [
            ({"customer": 9, "item": "a"}, {"tenant": "x"}),
            ({"customer": 9, "item": "b"}, {"tenant": "y", "trace": "1"}),
            ({"customer": 9.0}, None),
            ({"customer": True}, {"tenant": "x"}),
            (None, None),
            ([1, 2], {"tenant": "x"}),
        ]
    ):
        ids.append(producer.enqueue(payload, headers=headers))
        (message,) = consumer.dequeue()
        clock.advance(60)
        if n == 1:
            consumer.ack(message)
        else:
            consumer.fail(message, f"Timeout_{n}: 100%", dead=True)
    return ids


CHOICES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "everything": ({"reason": None}, [0, 1, 2, 3, 4, 5]),
    "dead letters": ({}, [0, 2, 3, 4, 5]),
    "a reason": ({"reason": "completed"}, [1]),
    "an error": ({"error": "Timeout_4"}, [4]),
    "an error's case": ({"error": "timeout"}, []),
    "no wildcards": ({"error": "0%"}, [0, 2, 3, 4, 5]),
    "no wildcard either": ({"error": "Timeout%"}, []),
    "a header": ({"headers": {"tenant": "x"}}, [0, 3, 5]),
    "headers": ({"headers": {"tenant": "y", "trace": "1"}, "reason": None}, [1]),
    "another header": ({"headers": {"trace": 1}, "reason": None}, []),
    "a member": ({"payload": {"customer": 9}, "reason": None}, [0, 1]),
    "members": ({"payload": {"customer": 9, "item": "a"}}, [0]),
    "a fraction": ({"payload": {"customer": 9.0}}, [2]),
    "a flag": ({"payload": {"customer": True}}, [3]),
    "null": ({"payload": None}, [4]),
    "a list": ({"payload": [1, 2]}, [5]),
    "part of a list": ({"payload": [1]}, []),
    "nothing like it": ({"payload": {"nobody": 1}}, []),
    "both": ({"payload": {"customer": 9}, "headers": {"tenant": "x"}}, [0]),
}
every_choice = pytest.mark.parametrize(("choice", "chosen"), CHOICES.values(), ids=CHOICES)


@every_choice
def test_what_matches_is_listed_and_replayed(
    admin: Any, consumer: Any, varied: list[int], choice: dict[str, Any], chosen: list[int]
) -> None:
    wanted = [varied[n] for n in chosen]
    listed = admin.list_archive(QUEUE, **({"reason": "failed"} | choice))
    assert [found.original_message_id for found in listed] == wanted
    assert admin.replay_all(QUEUE, **choice) == len(wanted)
    replayed = consumer.dequeue(10)
    assert [message.payload for message in replayed] == [found.payload for found in listed]
    assert [message.headers for message in replayed] == [found.headers for found in listed]
    history = [admin.get_archived(id) for id in wanted]
    assert [found.replayed_as for found in history] == [message.id for message in replayed]
    assert admin.replay_all(QUEUE, **choice) == 0  # each of them once


def test_what_ended_at_some_time_is_replayed(
    admin: Any, varied: list[int], clock: ManualClock
) -> None:
    ended = [found.archived_at for found in admin.list_archive(QUEUE)]
    within = admin.list_archive(QUEUE, since=ended[1], until=ended[3])
    assert [found.original_message_id for found in within] == varied[1:3]
    assert admin.replay_all(QUEUE, since=ended[1], until=ended[3]) == 1
    assert admin.replay_all(QUEUE, until=ended[1]) == 1
    assert admin.replay_all(QUEUE, since=ended[5]) == 1
    assert len(admin.dead_letters(QUEUE)) == 2


def test_matching_goes_through_all_pages(
    admin: Any, producer: Any, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "BATCH", 3)
    producer.enqueue_many([n % 5 for n in range(20)])
    consumer.fail_many(consumer.dequeue(20), "no", dead=True)
    first = admin.list_archive(QUEUE, payload=3, n=2)
    assert len(first) == 2
    assert len(admin.list_archive(QUEUE, payload=3, n=9, after=first[-1].id)) == 2
    assert admin.replay_all(QUEUE, payload=3) == 4
    assert [message.payload for message in consumer.dequeue(20)] == [3] * 4


def test_an_expired_message_that_is_replayed_does_not_expire_again(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue("late", ttl=10)
    clock.advance(11)
    assert consumer.dequeue() == []
    assert admin.replay_all(QUEUE, reason="expired") == 1
    (message,) = consumer.dequeue()
    assert (message.payload, message.expires_at) == ("late", None)


def test_replaying_the_same_message_twice_in_one_call_replays_it_once(
    admin: Any, ended: list[int]
) -> None:
    new = admin.replay([ended[2], ended[2]])
    assert new[0] == new[1]
    assert [message.id for message in admin.peek(QUEUE)] == [new[0]]


@pytest.mark.parametrize(
    "bad",
    [
        {"since": "yesterday"},
        {"until": datetime(2030, 1, 1)},
        {"error": 5},
        {"payload": {1, 2}},
        {"payload": float("nan")},
        {"headers": "tenant=x"},
        {"reason": "lost"},
    ],
    ids=str,
)
def test_a_bad_choice_is_refused(admin: Any, bad: dict[str, Any]) -> None:
    (name,) = bad
    for call in (admin.replay_all, admin.list_archive):
        with pytest.raises(InvalidArgument, match=name):
            call(QUEUE, **bad)


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
