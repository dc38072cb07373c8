"""Buffers: read ahead, acked in batches, and nothing promised is given up for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from pgqrs import InvalidArgument, LeaseLost, QueueNotFound, WorkerStopped
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness

LONG = 100
"""Far longer than any test takes: what happens earlier has another reason."""


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def completed(admin: Any) -> int:
    return int(admin.queue_stats(QUEUE).archived["completed"])


def inner(buffer: Any) -> Any:
    """The sync buffer behind any face of it."""
    return getattr(getattr(buffer, "_wrapped", buffer), "_sync", buffer)


@pytest.fixture
def ten(producer: Any) -> list[int]:
    ids: list[int] = producer.enqueue_many(range(10))
    return ids


@pytest.fixture
def later(consumer: Any) -> Iterator[Any]:
    """A buffer that sends no ack by itself."""
    with consumer.buffer(4, ack_size=1000, ack_every=LONG, wait=0) as buffer:
        yield buffer


def test_everything_is_handed_out_in_order_and_acked(
    admin: Any, producer: Any, consumer: Any
) -> None:
    producer.enqueue_many(range(25))
    with consumer.buffer(10, wait=0) as buffer:
        seen = []
        for message in buffer:
            seen.append(message.payload)
            buffer.ack(message)
    assert seen == list(range(25))
    assert completed(admin) == 25
    assert admin.peek(QUEUE) == []


def test_a_group_comes_through_one_by_one_and_in_order(
    admin: Any, producer: Any, consumer: Any
) -> None:
    for n in range(5):
        producer.enqueue(n, group="one")
    with consumer.buffer(10, ack_every=LONG, wait=0) as buffer:
        seen = []
        for message in buffer:
            assert admin.queue_stats(QUEUE).leased == 1
            seen.append(message.payload)
            buffer.ack(message)
    assert seen == list(range(5))
    assert completed(admin) == 5


def test_acks_wait_for_a_flush(admin: Any, ten: list[int], later: Any) -> None:
    first, second = next(later), next(later)
    later.ack(first)
    later.archive_many([second.id])
    assert completed(admin) == 0
    later.flush()
    assert completed(admin) == 2
    later.flush()


def test_results_go_with_the_acks(
    admin: Any, ten: list[int], later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(inner(later)._database, "ring_of_results", told.append)
    first, second, third = (next(later) for _ in range(3))
    later.ack(first, result={"n": 1})
    later.ack(second)
    later.ack_many([third], results=[3])
    later.flush()
    ended = [admin.get_archived(message.id).result for message in (first, second, third)]
    assert ended == [{"n": 1}, None, 3]
    until(lambda: told == [QUEUE])  # who waits for them hears of it


def test_acks_are_sent_when_there_are_enough(admin: Any, ten: list[int], consumer: Any) -> None:
    with consumer.buffer(4, ack_size=2, ack_every=LONG, wait=0) as buffer:
        buffer.ack(next(buffer))
        buffer.ack(next(buffer))
        until(lambda: completed(admin) == 2)
        buffer.ack(next(buffer))
        assert completed(admin) == 2


def test_acks_are_sent_after_some_time(admin: Any, ten: list[int], consumer: Any) -> None:
    with consumer.buffer(4, ack_size=1000, ack_every=0.02, wait=0) as buffer:
        buffer.ack(next(buffer))
        until(lambda: completed(admin) == 1)


def test_no_more_is_claimed_than_asked_for(admin: Any, ten: list[int], later: Any) -> None:
    until(lambda: admin.queue_stats(QUEUE).leased == 4)
    next(later)
    assert admin.queue_stats(QUEUE).leased <= 4
    next(later)
    until(lambda: admin.queue_stats(QUEUE).leased == 6)  # two out, four ahead


def test_closing_acks_what_is_done_and_gives_back_what_was_not_begun(
    admin: Any, ten: list[int], consumer: Any, rival: Any
) -> None:
    with consumer.buffer(5, ack_every=LONG, wait=0) as buffer:
        done, begun = next(buffer), next(buffer)
        buffer.ack(done)
    assert completed(admin) == 1
    assert [message.id for message in admin.peek(QUEUE)] == ten[1:]
    again = rival.dequeue(10)
    assert [message.id for message in again] == ten[2:]
    assert {message.attempt for message in again} == {1}  # the buffer's claims do not count
    assert admin.get_message(begun.id).consumer_worker_id == consumer.worker_id
    buffer.ack(begun)  # at once, now that nobody is left to do it later
    assert completed(admin) == 2


def test_leases_of_all_that_is_held_are_renewed(
    admin: Any, ten: list[int], consumer: Any, clock: ManualClock
) -> None:
    with consumer.buffer(3, lease=1.5, ack_size=1000, ack_every=LONG, wait=0) as buffer:
        done, begun = next(buffer), next(buffer)
        buffer.ack(done)
        until(lambda: inner(buffer)._ahead)
        ahead = inner(buffer)._ahead[0]
        clock.advance(1)
        until(lambda: are_renewed(admin, [done, begun, ahead]))
    buffer.ack(begun)
    assert completed(admin) == 2


@pytest.mark.parametrize("hanging", ["_look", "_ack"])
def test_leases_are_renewed_while_claiming_or_flushing_hangs(
    admin: Any, ten: list[int], consumer: Any, clock: ManualClock, hanging: str
) -> None:
    with consumer.buffer(4, lease=1.5, ack_size=1000, ack_every=LONG) as buffer:
        done, out = next(buffer), next(buffer)
        until(lambda: len(inner(buffer)._ahead) == 4)
        with hang(inner(buffer), hanging) as begun:
            buffer.ack(done)
            if hanging == "_look":
                next(buffer), next(buffer)
            else:
                inner(buffer)._want_flush()
            until(begun.is_set)
            held = (done, out, inner(buffer)._ahead[0])
            for _ in range(2):
                before = [admin.get_message(message.id) for message in held]
                clock.advance(1)
                until(partial(are_renewed, admin, before))
    assert completed(admin) == 1


def are_renewed(admin: Any, before: list[Any]) -> bool:
    """True if all these messages are held for longer than before."""
    return all(admin.get_message(message.id).vt > message.vt for message in before)


@contextmanager
def hang(buffer: Any, name: str) -> Iterator[threading.Event]:
    """A call of the buffer's consumer hangs meanwhile, without blocking an event loop. Gives what tells
    that it was called.
    """
    begun, go_on = threading.Event(), threading.Event()
    method = getattr(buffer._consumer, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        while not go_on.is_set():
            buffer._database._sleep(0.01)
        return method(*args, **kwargs)

    setattr(buffer._consumer, name, call)
    try:
        yield begun
    finally:
        go_on.set()


def test_a_lost_lease_is_told_by_the_flush(
    admin: Any, ten: list[int], later: Any, consumer: Any
) -> None:
    first, second = next(later), next(later)
    consumer.delete(first)
    later.ack_many([first, second])
    with pytest.raises(LeaseLost) as caught:
        later.flush()
    assert caught.value.ids == (first.id,)
    assert completed(admin) == 1
    later.flush()  # told once


def test_a_lost_lease_is_told_by_the_iteration_which_may_go_on(
    admin: Any, ten: list[int], consumer: Any
) -> None:
    with consumer.buffer(2, ack_size=1, wait=0) as buffer:
        first = next(buffer)
        consumer.delete(first)
        buffer.ack(first)
        until(lambda: inner(buffer)._lost)
        with pytest.raises(LeaseLost) as caught:
            next(buffer)
        assert caught.value.ids == (first.id,)
        for message in buffer:
            buffer.ack(message)
    assert completed(admin) == 9


def test_a_lost_lease_is_told_by_closing(ten: list[int], consumer: Any) -> None:
    buffer = consumer.buffer(2, ack_every=LONG, wait=0)
    first = next(buffer)
    consumer.delete(first)
    buffer.ack(first)
    with pytest.raises(LeaseLost) as caught:
        buffer.close()
    assert caught.value.ids == (first.id,)
    buffer.close()


def test_an_error_of_the_application_comes_before_a_lost_lease(
    ten: list[int], consumer: Any
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        consumer.buffer(2, ack_every=LONG, wait=0) as buffer,
    ):
        first = next(buffer)
        consumer.delete(first)
        buffer.ack(first)
        raise ZeroDivisionError


def test_what_was_lost_before_it_was_begun_is_not_handed_out(
    ten: list[int], consumer: Any, rival: Any, clock: ManualClock
) -> None:
    with consumer.buffer(4, lease=0.9, wait=0) as buffer:
        until(lambda: len(inner(buffer)._ahead) == 4)
        stolen: list[Any] = []
        while len(stolen) < 10:  # the buffer may renew just in between
            clock.advance(1)
            stolen += rival.dequeue(10, lease=1000 * LONG)
        until(lambda: not inner(buffer)._ahead)
        assert list(buffer) == []
        rival.ack_many(stolen)


def has_looked_again(buffer: Any) -> bool:
    """True if the buffer has seen that there is no more: no claim is under way with the time of now."""
    begun, ended = inner(buffer)._looks_begun, inner(buffer)._looks_ended
    return bool(begun == ended >= 2)


def test_what_lapsed_and_was_claimed_again_is_handed_out_once(
    producer: Any, consumer: Any, clock: ManualClock
) -> None:
    """The process stood still for longer than the lease, and claims before it renews."""
    producer.enqueue("again")
    with consumer.buffer(10, lease=LONG, wait=0) as buffer:
        until(lambda: len(inner(buffer)._ahead) == 1)
        until(lambda: has_looked_again(buffer))
        clock.advance(LONG + 1)
        producer.enqueue("new")
        until(lambda: {hold.message.payload for hold in inner(buffer)._holds.values()} >= {"new"})
        seen = []
        for message in buffer:
            seen.append((message.payload, message.read_ct))
            buffer.ack(message)
    assert sorted(seen) == [("again", 2), ("new", 1)]


def test_an_ack_of_a_claim_before_the_last_is_lost_also_beside_that_of_the_last(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue("again")
    with consumer.buffer(10, lease=LONG, ack_size=1000, ack_every=LONG, wait=0) as buffer:
        before = next(buffer)
        until(lambda: has_looked_again(buffer))
        clock.advance(LONG + 1)
        producer.enqueue("new")
        again = next(message for message in buffer if message.payload == "again")
        for message in (again, before):
            buffer.ack(message)
        with pytest.raises(LeaseLost) as caught:
            buffer.flush()
        assert caught.value.ids == (again.id,)
    assert admin.get_archived(again.id).read_ct == 2


def test_other_endings_are_at_once(admin: Any, ten: list[int], later: Any, consumer: Any) -> None:
    one, two, three, four = (next(later) for _ in range(4))
    later.delete(one)
    assert later.fail(two, "no", dead=True) is False
    assert later.fail(three, "not yet", delay=LONG) is True
    later.extend(four, 2 * LONG)
    stats = admin.queue_stats(QUEUE)
    assert (stats.archived["failed"], stats.delayed) == (1, 1)
    later.release(four, delay=LONG)
    assert admin.queue_stats(QUEUE).delayed == 2
    with pytest.raises(LeaseLost):
        later.extend(one, 5)


def test_the_iteration_ends_when_nothing_came_for_a_while(
    harness: Harness, admin: Any, producer: Any
) -> None:
    with harness.open(clock=None).consumer(QUEUE) as consumer:
        with consumer.buffer(wait=0) as buffer:
            assert list(buffer) == []
            producer.enqueue(1)
            assert [message.payload for message in buffer] == [1]
        began = time.monotonic()
        with consumer.buffer(wait=0.2) as buffer:
            assert list(buffer) == []
        assert time.monotonic() - began >= 0.2


def test_a_message_that_comes_later_is_handed_out(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None)
    with store.consumer(QUEUE) as consumer, consumer.buffer() as buffer:
        late = threading.Timer(0.1, lambda: store.producer(QUEUE).enqueue("late"))
        late.start()
        message = next(buffer)
        assert message.payload == "late"
        buffer.ack(message)
        late.join()
    assert completed(admin) == 1


def test_closing_ends_the_iteration(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None)
    with store.consumer(QUEUE) as consumer:
        buffer = consumer.buffer()
        closing = threading.Timer(0.1, buffer.close)
        closing.start()
        assert list(buffer) == []
        closing.join()
        assert list(buffer) == []


def test_closing_the_consumer_closes_its_buffers(
    store: Any, admin: Any, ten: list[int], rival: Any
) -> None:
    consumer = store.consumer(QUEUE)
    buffer = consumer.buffer(5, wait=0)
    buffer.ack(next(buffer))
    consumer.close()
    assert completed(admin) == 1
    assert len(rival.dequeue(10)) == 9
    assert list(buffer) == []
    assert len(admin.list_workers()) == 1


def test_several_readers_share_a_buffer(admin: Any, producer: Any, consumer: Any) -> None:
    producer.enqueue_many(range(60))
    seen: list[int] = []

    def read() -> None:
        for message in buffer:
            seen.append(message.payload)
            buffer.ack(message)

    with consumer.buffer(8, wait=0) as buffer:
        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert sorted(seen) == list(range(60))
    assert completed(admin) == 60


def test_what_hinders_claiming_is_told_by_the_iteration(store: Any, admin: Any) -> None:
    with pytest.raises(QueueNotFound):
        next(store.consumer("no such").buffer())
    with store.consumer(QUEUE) as consumer, consumer.buffer() as buffer:
        until(lambda: consumer.worker_id is not None)
        admin.stop_worker(consumer.worker_id)
        inner(buffer)._ring()
        with pytest.raises(WorkerStopped):
            next(buffer)


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"n": True},
        {"lease": 0},
        {"lease": -1},
        {"ack_size": 0},
        {"ack_every": -1},
        {"wait": "soon"},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(consumer: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        consumer.buffer(**bad)


def test_what_was_not_dequeued_is_refused_at_once(admin: Any, ten: list[int], later: Any) -> None:
    with pytest.raises(InvalidArgument, match="was not dequeued"):
        later.ack(admin.peek(QUEUE, 10)[-1])


def test_what_expires_ahead_is_not_handed_out(
    admin: Any, producer: Any, consumer: Any, clock: ManualClock
) -> None:
    producer.enqueue("first")
    expiring = producer.enqueue_many(["a", "b"], ttl=10)
    producer.enqueue("last")
    with consumer.buffer(10, wait=0) as buffer:
        seen = [next(buffer).payload]
        until(lambda: len(inner(buffer)._ahead) == 3)
        clock.advance(11)
        seen += [message.payload for message in buffer]
    assert seen == ["first", "last"]
    consumer.dequeue(10)
    reasons = [admin.get_archived(id).archive_reason for id in expiring]
    assert reasons == ["expired", "expired"]


def test_what_expires_ahead_by_real_time_is_not_handed_out(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None)
    expiring = store.producer(QUEUE).enqueue("stale", ttl=1)
    with store.consumer(QUEUE) as consumer, consumer.buffer(10, wait=0) as buffer:
        until(lambda: inner(buffer)._looks_ended)
        time.sleep(1.1)
        assert list(buffer) == []
        consumer.dequeue()
    assert store.admin().get_archived(expiring).archive_reason == "expired"


def test_a_buffer_that_was_not_opened_acks_at_once(
    admin: Any, ten: list[int], consumer: Any
) -> None:
    message, other = consumer.dequeue(2)
    buffer = consumer.buffer(ack_every=LONG)
    buffer.flush()
    buffer.ack(message, result=7)
    assert admin.get_archived(message.id).result == 7
    buffer.ack_many([other])
    buffer.flush()
    assert completed(admin) == 2
    buffer.close()
    assert admin.queue_stats(QUEUE).leased == 0


def test_a_lease_is_what_was_asked_for(admin: Any, ten: list[int], consumer: Any) -> None:
    """Also if the times in the rows say otherwise, since a clock went back while the claim waited."""
    with consumer.buffer(4, lease=7, wait=0) as buffer:
        message = next(buffer)
        backwards = replace(message, dequeued_at=message.vt + timedelta(seconds=1))
        assert inner(buffer)._granted(message) == 7
        assert inner(buffer)._granted(backwards) == 7
    with consumer.buffer(4, wait=0) as buffer:
        assert inner(buffer)._granted(next(buffer)) == 30
        assert inner(buffer)._granted(backwards) > 0
