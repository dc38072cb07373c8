"""Leases: one holder at a time, fenced, back by themselves when they lapse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from pgqrs import InvalidArgument, LeaseLost, Retry, RetryAfter
from pgqrs.repositories.dequeue import LAPSED
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness

ENDINGS = {
    "ack": lambda consumer, message: consumer.ack(message),
    "archive": lambda consumer, message: consumer.archive(message),
    "fail": lambda consumer, message: consumer.fail(message),
    "release": lambda consumer, message: consumer.release(message),
    "extend": lambda consumer, message: consumer.extend(message, 60),
    "delete": lambda consumer, message: consumer.delete(message),
}
every_ending = pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)


def test_dequeue_gives_a_list(producer: Any, consumer: Any) -> None:
    assert consumer.dequeue() == []
    producer.enqueue_many(range(3))
    assert len(consumer.dequeue()) == 1
    assert len(consumer.dequeue(10)) == 2


@pytest.mark.parametrize("n", [0, -1, 1.5, "3", 10**9, True])
def test_a_bad_number_is_refused(consumer: Any, n: Any) -> None:
    with pytest.raises(InvalidArgument):
        consumer.dequeue(n)


def test_a_held_message_is_nobody_elses(producer: Any, consumer: Any, rival: Any) -> None:
    producer.enqueue(1)
    assert len(consumer.dequeue(10)) == 1
    assert consumer.dequeue(10) == rival.dequeue(10) == []


def test_the_lease_is_the_calls_or_the_consumers_or_the_queues(
    store: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue_many(range(3))
    (by_queue,) = consumer.dequeue()
    (by_call,) = consumer.dequeue(lease=timedelta(minutes=1))
    with store.consumer(QUEUE, lease=7) as patient:
        (by_consumer,) = patient.dequeue()
    held_for = [
        (message.vt - clock.now()).total_seconds() for message in (by_queue, by_call, by_consumer)
    ]
    assert held_for == [30, 60, 7]


def test_a_lapsed_lease_brings_the_message_back(
    producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue(1)
    (first,) = consumer.dequeue()
    clock.advance(29.999)
    assert rival.dequeue() == []
    clock.advance(0.001)
    (second,) = rival.dequeue()
    assert (second.id, second.read_ct, second.attempt) == (first.id, 2, 2)


@every_ending
def test_who_lost_the_lease_changes_nothing(
    admin: Any, producer: Any, consumer: Any, rival: Any, clock: ManualClock, ending: Any
) -> None:
    producer.enqueue(1)
    (late,) = consumer.dequeue()
    clock.advance(30)
    (current,) = rival.dequeue()
    for handle in (late, late.id):
        with pytest.raises(LeaseLost) as caught:
            ending(consumer, handle)
        assert caught.value.id == late.id
    assert admin.get_message(current.id) == current
    rival.ack(current)
    with pytest.raises(LeaseLost):
        ending(consumer, late)
    assert admin.get_archived(current.id).consumer_worker_id == rival.worker_id


@every_ending
def test_the_token_fences_a_consumer_from_its_own_earlier_claim(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock, ending: Any
) -> None:
    producer.enqueue(1)
    (first,) = consumer.dequeue()
    clock.advance(30)
    (second,) = consumer.dequeue()
    assert second.consumer_worker_id == first.consumer_worker_id
    with pytest.raises(LeaseLost):
        ending(consumer, first)
    assert admin.get_message(second.id) == second


@every_ending
def test_a_lapsed_lease_that_nobody_took_still_counts(
    producer: Any, consumer: Any, clock: ManualClock, ending: Any
) -> None:
    producer.enqueue(1)
    (message,) = consumer.dequeue()
    clock.advance(3600)
    ending(consumer, message)


def test_a_lapsed_message_that_became_ready_again_can_still_be_finished(
    admin: Any, producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    first, second = producer.enqueue_many([1, 2])
    held = consumer.dequeue(2)
    clock.advance(30)
    assert [message.id for message in rival.dequeue(1)] == [first]
    consumer.ack(held[1])
    assert admin.get_archived(second).archive_reason == "completed"


def test_ack_archives_as_completed(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    id = producer.enqueue({"a": 1}, priority=4)
    (message,) = consumer.dequeue()
    clock.advance(2)
    consumer.ack(message)
    archived = admin.get_archived(id)
    assert archived.archive_reason == "completed"
    assert archived.original_message_id == id
    assert (archived.payload, archived.priority, archived.read_ct) == ({"a": 1}, 4, 1)
    assert archived.dequeued_at == message.dequeued_at
    assert archived.archived_at == clock.now()
    assert archived.error is None
    clock.advance(3600)
    assert consumer.dequeue() == []


def test_ack_is_safe_to_repeat(producer: Any, consumer: Any, rival: Any) -> None:
    producer.enqueue_many([1, 2])
    message, other = consumer.dequeue(2)
    consumer.ack(message)
    for claim in (message, message.id):
        consumer.ack(claim)
    with pytest.raises(LeaseLost):
        rival.ack(message.id)
    consumer.fail(other, dead=True)
    with pytest.raises(LeaseLost):
        consumer.ack(other.id)


def test_an_id_is_enough(producer: Any, consumer: Any, rival: Any) -> None:
    producer.enqueue_many(range(5))
    a, b, c, d, e = (message.id for message in consumer.dequeue(5))
    with pytest.raises(LeaseLost):
        rival.ack(a)
    consumer.ack(a)
    assert consumer.fail(b) is True
    consumer.release(c)
    consumer.extend(d, 60)
    consumer.delete(e)


@pytest.mark.parametrize("message", ["1", None, 0, -5, 2**63, 1.0])
def test_something_else_than_a_message_is_refused(consumer: Any, message: Any) -> None:
    with pytest.raises(InvalidArgument):
        consumer.ack(message)


def test_a_message_that_was_not_dequeued_is_refused(
    admin: Any, producer: Any, consumer: Any
) -> None:
    producer.enqueue(1)
    with pytest.raises(InvalidArgument, match="not dequeued"):
        consumer.ack(admin.peek(QUEUE)[0])


def test_extend_moves_the_end_of_the_lease(
    producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue(1)
    (message,) = consumer.dequeue()
    clock.advance(20)
    consumer.extend(message, 30)
    clock.advance(29)
    assert rival.dequeue() == []
    clock.advance(1)
    assert len(rival.dequeue()) == 1


def test_extend_brings_back_a_lapsed_lease(
    producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue_many([1, 2])
    held = consumer.dequeue(2)
    clock.advance(30)
    rival.dequeue(1)  # in passing this makes the second one ready
    consumer.extend(held[1], 30)
    assert rival.dequeue() == []


def test_release_gives_back_and_does_not_count(
    producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue(1)
    for _ in range(10):  # far more than max_read_ct
        (message,) = consumer.dequeue()
        assert message.attempt == 1
        consumer.release(message)
    (message,) = rival.dequeue()
    rival.release(message, delay=5)
    assert rival.dequeue() == []
    clock.advance(5)
    assert [message.attempt for message in rival.dequeue()] == [1]


def test_delete_leaves_no_trace(admin: Any, producer: Any, consumer: Any) -> None:
    producer.enqueue(1)
    consumer.delete(*consumer.dequeue())
    assert consumer.dequeue() == admin.list_archive(QUEUE) == []


def test_fail_delivers_again_until_the_last_attempt(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    id = producer.enqueue(1)
    assert consumer.fail(*consumer.dequeue(), "first") is True
    assert consumer.fail(*consumer.dequeue(), "second", delay=10) is True
    assert consumer.dequeue() == []
    clock.advance(10)
    assert consumer.fail(*consumer.dequeue(), "third") is False
    assert consumer.dequeue() == []
    dead = admin.get_archived(id)
    assert (dead.archive_reason, dead.error, dead.read_ct) == ("failed", "third", 3)


def test_a_policy_says_when_to_try_again(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    id = producer.enqueue(1)
    retry = Retry(delay=10, max_attempts=2)
    (message,) = consumer.dequeue()
    assert consumer.fail(message, ValueError("first"), retry=retry) is True
    clock.advance(9)
    assert consumer.dequeue() == []
    clock.advance(1)
    (message,) = consumer.dequeue()
    assert consumer.fail(message, ValueError("second"), retry=retry) is False
    assert "second" in admin.get_archived(id).error


def test_a_policy_decides_for_each_message_by_itself(
    producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue(0)
    consumer.fail(*consumer.dequeue())
    producer.enqueue_many([1, 2])
    retry = Retry(delay=10, factor=3)
    assert all(consumer.fail_many(consumer.dequeue(3), RuntimeError(), retry=retry).values())
    clock.advance(10)
    assert [message.payload for message in consumer.dequeue(9)] == [1, 2]
    clock.advance(20)
    assert [message.payload for message in consumer.dequeue(1)] == [0]


def test_an_error_may_say_when_to_try_again(
    producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue(1)
    (message,) = consumer.dequeue()
    assert consumer.fail(message, RetryAfter(77), retry=Retry()) is True
    clock.advance(76)
    assert consumer.dequeue() == []
    clock.advance(1)
    assert len(consumer.dequeue()) == 1


def test_a_policy_needs_the_message(producer: Any, consumer: Any) -> None:
    producer.enqueue(1)
    (message,) = consumer.dequeue()
    with pytest.raises(InvalidArgument, match="pass the message"):
        consumer.fail(message.id, retry=Retry())


def test_a_dead_message_is_not_tried_again(admin: Any, producer: Any, consumer: Any) -> None:
    id = producer.enqueue(1)
    assert consumer.fail(*consumer.dequeue(), "poison", dead=True) is False
    assert admin.get_archived(id).error == "poison"


def test_an_exception_is_kept_with_its_traceback(admin: Any, producer: Any, consumer: Any) -> None:
    id = producer.enqueue(1)
    try:
        dict[str, int]()["nul \0 and half a pair \ud800"]
    except KeyError as exc:
        consumer.fail(*consumer.dequeue(), exc, dead=True)
    error = admin.get_archived(id).error
    assert "Traceback" in error
    assert "KeyError" in error
    assert "\0" not in error


def test_a_lease_that_lapses_on_the_last_attempt_ends_in_the_archive(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    id = producer.enqueue(1)
    for _ in range(3):
        assert len(consumer.dequeue()) == 1
        clock.advance(30)
    assert consumer.dequeue() == []
    dead = admin.get_archived(id)
    assert (dead.archive_reason, dead.error, dead.read_ct) == ("failed", LAPSED, 3)


def test_of_many_the_lost_ones_do_not_hinder_the_others(
    admin: Any, producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue_many(range(4))
    held = consumer.dequeue(4)
    clock.advance(30)
    taken = rival.dequeue(2)
    with pytest.raises(LeaseLost) as caught:
        consumer.ack_many(held)
    assert caught.value.ids == tuple(message.id for message in taken)
    assert [found.original_message_id for found in admin.list_archive(QUEUE)] == [
        message.id for message in held[2:]
    ]


def test_everything_works_on_many(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue_many(range(12))
    held = consumer.dequeue(12)
    consumer.ack_many(held[:2])
    consumer.archive_many(held[2:4])
    assert consumer.fail_many(held[4:6], "x") == {message.id: True for message in held[4:6]}
    assert not any(consumer.fail_many(held[6:8], "y", dead=True).values())
    consumer.release_many(held[8:10])
    consumer.extend_many(held[10:], 100)
    consumer.delete_many(held[10:11])
    assert [message.payload for message in consumer.dequeue(12)] == [4, 5, 8, 9]
    assert [found.payload for found in admin.list_archive(QUEUE, reason="completed")] == [
        0,
        1,
        2,
        3,
    ]
    assert [found.payload for found in admin.dead_letters(QUEUE)] == [6, 7]


def test_nothing_is_fine_for_many(consumer: Any) -> None:
    consumer.ack_many([])
    assert consumer.fail_many([]) == {}
    consumer.release_many([])
    consumer.extend_many([], 1)
    consumer.delete_many([])


def test_what_is_not_json_in_the_database_ends_in_the_archive(
    harness: Harness, admin: Any, producer: Any, consumer: Any
) -> None:
    broken, good = producer.enqueue_many(["soon broken", "good"])
    if not harness.corrupt(broken):
        return  # this database cannot hold what is not JSON
    assert [message.id for message in consumer.dequeue(10)] == [good]
    (dead,) = admin.dead_letters(QUEUE)
    assert dead.original_message_id == broken
    assert "not JSON" in dead.error


def test_threads_never_share_a_message(store: Any, producer: Any) -> None:
    ids = producer.enqueue_many(range(300))

    def drain(_: int) -> list[int]:
        mine: list[int] = []
        with store.consumer(QUEUE) as consumer:
            while claimed := consumer.dequeue(7):
                consumer.ack_many(claimed)
                mine += [message.id for message in claimed]
        return mine

    with ThreadPoolExecutor(8) as threads:
        found = [id for part in threads.map(drain, range(8)) for id in part]
    assert sorted(found) == ids


def test_threads_enqueue_side_by_side(store: Any, admin: Any, consumer: Any) -> None:
    producer = store.producer(QUEUE)
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(producer.enqueue, range(200)))
    assert len(set(ids)) == 200
    assert sorted(message.payload for message in consumer.dequeue(500)) == list(range(200))
