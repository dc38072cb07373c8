"""Bounds of queues: how long a lease may be, how often a message may be given back. Whose messages are
refused, and giving back what a worker holds.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import pgqrs
from pgqrs import (
    ForeignMessage,
    InvalidArgument,
    LeaseLost,
    LeaseTooLong,
    NotClaimed,
    WorkerNotFound,
)
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, RUNS, Drain, Harness

# The longest lease


def test_a_queue_keeps_its_bounds(admin: Any) -> None:
    made = admin.create_queue("short", max_lease=10, max_releases=2)
    assert (made.lease, made.max_lease, made.max_releases) == (10.0, 10.0, 2)
    changed = admin.configure_queue("short", max_lease=timedelta(minutes=1), lease=20)
    assert (changed.lease, changed.max_lease, changed.max_releases) == (20.0, 60.0, 2)
    changed = admin.configure_queue("short", max_lease=None, max_releases=None)
    assert (changed.max_lease, changed.max_releases) == (None, None)
    assert admin.get_queue(QUEUE).max_lease is None


@pytest.mark.parametrize(
    "settings", [{"max_lease": 0}, {"max_lease": -1}, {"max_releases": 0}, {"max_releases": 1.5}]
)
def test_bounds_that_make_no_sense_are_refused(admin: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        admin.create_queue("other", **settings)
    with pytest.raises(InvalidArgument):
        admin.configure_queue(QUEUE, **settings)


def test_the_lease_of_a_queue_is_no_longer_than_its_longest(admin: Any) -> None:
    with pytest.raises(InvalidArgument):
        admin.create_queue("other", lease=11, max_lease=10)
    with pytest.raises(LeaseTooLong):
        admin.configure_queue(QUEUE, max_lease=29)
    admin.configure_queue(QUEUE, max_lease=30)
    with pytest.raises(LeaseTooLong):
        admin.configure_queue(QUEUE, lease=31)
    assert (admin.get_queue(QUEUE).lease, admin.get_queue(QUEUE).max_lease) == (30.0, 30.0)


@pytest.mark.parametrize("limits", [{}, {"max_in_flight": 5}], ids=["free", "limited"])
def test_a_longer_lease_is_refused_by_a_dequeue(
    store: Any, admin: Any, producer: Any, consumer: Any, limits: dict[str, Any]
) -> None:
    admin.configure_queue(QUEUE, max_lease=60, **limits)
    producer.enqueue_many([1, 2, 3])
    for _ in range(2):
        with pytest.raises(LeaseTooLong) as caught:
            consumer.dequeue(lease=61)
        assert (caught.value.queue, caught.value.lease) == (QUEUE, 61.0)
        assert caught.value.max_lease == 60.0
        assert len(consumer.dequeue(lease=60)) == 1
    with store.consumer(QUEUE, lease=3600) as patient, pytest.raises(LeaseTooLong):
        patient.dequeue(wait=5)
    admin.pause_queue(QUEUE)
    assert consumer.dequeue(lease=60) == []
    assert admin.queue_stats(QUEUE).leased == 2


def test_a_longer_lease_is_refused_by_extending(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    admin.configure_queue(QUEUE, max_lease=60)
    producer.enqueue_many([1, 2])
    held = consumer.dequeue(2)
    for one in (held[0], held[0].id):
        with pytest.raises(LeaseTooLong, match=r"61 s .* 60 s"):
            consumer.extend(one, 61)
    with pytest.raises(LeaseTooLong, match=r"61 s .* 60 s"):
        consumer.extend_many(held, 61)
    consumer.extend(held[0], 60)
    clock.advance(59)
    assert [message.id for message in consumer.dequeue(2)] == [held[1].id]
    consumer.ack(held[0])
    with pytest.raises(LeaseLost):
        consumer.extend(held[0], 61)


# Giving back


@pytest.mark.parametrize("group", [None, "group"])
def test_a_message_that_is_given_back_too_often_is_archived_as_failed(
    admin: Any, producer: Any, consumer: Any, group: str | None
) -> None:
    admin.configure_queue(QUEUE, max_releases=2)
    id = producer.enqueue("unwanted", group=group)
    producer.enqueue("next", group=group)
    for _ in range(2):
        (message,) = consumer.dequeue()
        assert message.id == id
        consumer.release(message)
    (message,) = consumer.dequeue()
    consumer.release(message, delay=5)
    ended = admin.get_archived(id)
    assert ended.archive_reason == "failed"
    assert "max_releases" in ended.error
    assert ended.released_ct == 2
    with pytest.raises(LeaseLost):
        consumer.release(message)
    (following,) = consumer.dequeue()
    assert following.payload == "next"
    assert admin.replay(id)


def test_of_many_that_are_given_back_only_those_end_that_were_it_too_often(
    admin: Any, producer: Any, consumer: Any
) -> None:
    admin.configure_queue(QUEUE, max_releases=1)
    producer.enqueue("old")
    consumer.release_many(consumer.dequeue())
    producer.enqueue("new")
    old, new = consumer.dequeue(2)
    consumer.release_many([old, new])
    assert [dead.original_message_id for dead in admin.dead_letters(QUEUE)] == [old.id]
    assert [message.id for message in consumer.dequeue(2)] == [new.id]


def test_without_a_bound_a_message_is_given_back_for_ever(
    admin: Any, producer: Any, consumer: Any
) -> None:
    producer.enqueue(1)
    for _ in range(20):
        consumer.release_many(consumer.dequeue())
    (message,) = consumer.dequeue()
    assert (message.read_ct, message.attempt) == (21, 1)


def test_a_run_may_sleep_more_often_than_messages_are_given_back(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    def sleeper() -> int:
        for _ in range(4):
            pgqrs.sleep(10)
        return 4

    store.admin().configure_queue(RUNS, max_releases=1)
    run = sleeper.start(store=store)
    for _ in range(5):
        with store.consumer(RUNS) as consumer:  # as a worker that stops before it has begun
            consumer.release_many(consumer.dequeue(10))
        drain(sleeper)
        clock.advance(11)
    assert run.result(timeout=0) == 4


# What a worker holds


def test_what_a_worker_holds_is_given_back(
    store: Any, admin: Any, producer: Any, consumer: Any, rival: Any
) -> None:
    producer.enqueue_many([1, 2, 3], groups=["a", "a", None])
    lost = rival.dequeue(5, lease=86400)
    assert len(lost) == 2
    assert admin.release_worker(rival.worker_id) == 2
    for change in (rival.ack, rival.release, lambda held: rival.extend(held, 5)):
        with pytest.raises(LeaseLost):
            change(lost[0])
    found = consumer.dequeue(5)
    assert [message.id for message in found] == [message.id for message in lost]
    assert [message.attempt for message in found] == [1, 1]
    assert admin.release_worker(rival.worker_id) == 0
    assert admin.queue_stats(QUEUE).leased == 2


def test_what_a_worker_holds_is_given_back_though_its_row_is_gone(
    admin: Any, producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue_many(range(2500))
    worker = rival.open().worker_id
    assert len(rival.dequeue(2500, lease=86400)) == 2500
    clock.advance(600)
    assert admin.purge_workers() >= 1
    assert admin.release_worker(worker) == 2500
    assert len(consumer.dequeue(2500)) == 2500
    with pytest.raises(WorkerNotFound) as caught:
        admin.release_worker(worker)
    assert caught.value.id == worker


def test_giving_back_for_a_worker_makes_room_and_is_bounded_too(
    admin: Any, producer: Any, consumer: Any, rival: Any
) -> None:
    admin.configure_queue(QUEUE, max_in_flight=1, max_releases=1)
    producer.enqueue(1)
    for _ in range(2):
        assert len(rival.dequeue(lease=3600)) == 1
        assert consumer.dequeue() == []
        assert admin.release_worker(rival.worker_id) == 1
    assert len(admin.dead_letters(QUEUE)) == 1
    producer.enqueue(2)
    assert [message.payload for message in consumer.dequeue()] == [2]


# Messages that prove nothing


def uses(holder: Any) -> dict[str, Any]:
    """All that can be done with a held message."""
    return {
        "ack": holder.ack,
        "fail": holder.fail,
        "release": holder.release,
        "extend": lambda message: holder.extend(message, 5),
        "delete": holder.delete,
    }


@pytest.mark.parametrize("use", ["ack", "fail", "release", "extend", "delete"])
def test_a_message_that_was_only_looked_at_is_refused(
    admin: Any, producer: Any, consumer: Any, rival: Any, use: str
) -> None:
    id = producer.enqueue(1)
    with pytest.raises(NotClaimed) as never:
        uses(rival)[use](admin.get_message(id))
    assert (never.value.id, never.value.consumer_worker_id) == (id, None)
    (held,) = consumer.dequeue()
    for looked_at in (admin.get_message(id), admin.peek(QUEUE)[0]):
        assert looked_at == held
        with pytest.raises(NotClaimed) as caught:
            uses(rival)[use](looked_at)
        assert caught.value.consumer_worker_id == consumer.worker_id
    consumer.ack(held)


@pytest.mark.parametrize("use", ["ack", "fail", "release", "extend", "delete"])
def test_a_message_of_another_store_is_refused(
    harness: Harness, store: Any, producer: Any, consumer: Any, use: str
) -> None:
    producer.enqueue(1)
    (held,) = consumer.dequeue()
    stranger = pgqrs.Store("sqlite::memory:", upgrade=True)
    stranger.admin().create_queue(QUEUE)
    stranger.producer(QUEUE).enqueue(1)
    foreign = stranger.consumer(QUEUE).dequeue()[0]
    with pytest.raises(ForeignMessage) as caught:
        uses(consumer)[use](foreign)
    assert (caught.value.id, caught.value.queue) == (foreign.id, QUEUE)
    assert caught.value.claimed_from != caught.value.store_id
    with harness.transaction(store) as transaction, pytest.raises(ForeignMessage):
        uses(transaction.using)[use](foreign)
    stranger.close()
    # Whoever opens the same database has the same store.
    with harness.open(clock=harness.clock).consumer(QUEUE) as other:
        uses(other)[use](held)
