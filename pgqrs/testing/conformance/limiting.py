"""Limits of a queue: exact, changeable at any time, and nobody else's business."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from pgqrs import InvalidArgument, LeaseLost, Rate
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness


@pytest.fixture
def admin(store: Any) -> Any:
    return store.admin()


def queue_with(admin: Any, **limits: Any) -> None:
    admin.create_queue(QUEUE, lease=30, max_read_ct=3, **limits)


def test_limits_are_settings(admin: Any) -> None:
    queue_with(admin, max_in_flight=5, rate=Rate(100, per=60))
    queue = admin.get_queue(QUEUE)
    assert (queue.max_in_flight, queue.max_in_flight_per_key) == (5, None)
    assert queue.rate == Rate(100, per=60.0)
    queue = admin.configure_queue(QUEUE, max_in_flight=None, max_in_flight_per_key=2, rate=None)
    assert (queue.max_in_flight, queue.max_in_flight_per_key, queue.rate) == (None, 2, None)


@pytest.mark.parametrize(
    "limits",
    [{"max_in_flight": 0}, {"max_in_flight_per_key": -1}, {"max_in_flight": True}, {"rate": 5}],
)
def test_bad_limits_are_refused(admin: Any, limits: Any) -> None:
    (name,) = limits
    with pytest.raises(InvalidArgument, match=name):
        queue_with(admin, **limits)
    queue_with(admin)
    with pytest.raises(InvalidArgument, match=name):
        admin.configure_queue(QUEUE, **limits)
    for limit, per in ((0, 1), (1, 0), (1, -1)):
        with pytest.raises(InvalidArgument):
            Rate(limit, per=per)


def test_no_more_in_flight_than_allowed(store: Any, admin: Any, clock: ManualClock) -> None:
    queue_with(admin, max_in_flight=3)
    store.producer(QUEUE).enqueue_many(range(10))
    with store.consumer(QUEUE) as one, store.consumer(QUEUE) as two:
        held = one.dequeue(2)
        more = two.dequeue(10)
        assert [message.payload for message in held + more] == [0, 1, 2]
        assert one.dequeue(10) == two.dequeue(10) == []
        one.ack(held[0])
        one.release(held[1])
        assert [message.payload for message in two.dequeue(10)] == [1, 3]
        clock.advance(29)
        two.extend(more[0], 30)
        clock.advance(2)  # two leases have lapsed, one goes on
        assert [message.payload for message in one.dequeue(10)] == [1, 3]
        assert two.dequeue(10) == []


@pytest.mark.parametrize("end", ["ack", "release", "delete", "fail", "dead"])
def test_every_end_makes_room(store: Any, admin: Any, end: str) -> None:
    queue_with(admin, max_in_flight=1)
    store.producer(QUEUE).enqueue_many([1, 2])
    with store.consumer(QUEUE) as consumer:
        (held,) = consumer.dequeue(10)
        assert consumer.dequeue(10) == []
        if end == "dead":
            consumer.fail(held, dead=True)
        else:
            getattr(consumer, end)(held)
        assert len(consumer.dequeue(10)) == 1
        assert consumer.dequeue(10) == []


def test_no_more_of_a_key_than_allowed(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=2)
    keys = ["a"] * 5 + ["b", None, None, None]
    store.producer(QUEUE).enqueue_many(range(9), keys=keys, unique=None)
    with store.consumer(QUEUE) as consumer:
        held = consumer.dequeue(10)
        assert [message.payload for message in held] == [0, 1, 5, 6, 7, 8]
        assert consumer.dequeue(10) == []
        assert admin.queue_stats(QUEUE).blocked == 3
        consumer.ack(held[0])
        assert [message.payload for message in consumer.dequeue(10)] == [2]
        consumer.ack_many(held[1:3])
        assert [message.payload for message in consumer.dequeue(10)] == [3]
        assert consumer.dequeue(10) == []


def test_a_key_with_a_long_backlog_blocks_nobody(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue_many(range(500), keys=["busy"] * 500, unique=None)
    producer.enqueue("other", key="other", unique=None)
    with store.consumer(QUEUE) as consumer:
        found = [message.payload for _ in range(5) for message in consumer.dequeue(10)]
        assert found == [0, "other"]


def test_a_claim_looks_past_any_number_of_messages_without_room(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue_many(range(4200), keys=["busy"] * 4200, unique=None)
    producer.enqueue("other", key="other", unique=None)
    with store.consumer(QUEUE) as consumer:
        assert [message.payload for message in consumer.dequeue()] == [0]
        assert [message.payload for message in consumer.dequeue()] == ["other"]


def test_a_message_of_a_group_can_have_a_key_with_a_limit(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    store.producer(QUEUE).enqueue_many(
        range(4), keys=["k"] * 4, groups=["a", "b", "a", "b"], unique=None
    )
    with store.consumer(QUEUE) as consumer:
        order = []
        for _ in range(4):
            (message,) = consumer.dequeue(10)
            order.append(message.payload)
            assert consumer.dequeue(10) == []
            consumer.ack(message)
    assert sorted(order) == [0, 1, 2, 3]
    assert order.index(0) < order.index(2)
    assert order.index(1) < order.index(3)


def test_no_more_in_a_period_than_allowed(store: Any, admin: Any, clock: ManualClock) -> None:
    queue_with(admin, rate=Rate(5, per=60))
    store.producer(QUEUE).enqueue_many(range(30))
    with store.consumer(QUEUE) as consumer:
        consumer.ack_many(consumer.dequeue(2))
        clock.advance(30)
        held = consumer.dequeue(10)
        assert len(held) == 3
        assert consumer.dequeue(10) == []
        consumer.ack_many(held)  # what has started counts, also when it is over
        assert consumer.dequeue(10) == []
        clock.advance(30.5)
        assert len(consumer.dequeue(10)) == 2
        clock.advance(30)
        assert len(consumer.dequeue(10)) == 3


def test_messages_that_are_not_there_use_nothing_up(store: Any, admin: Any) -> None:
    queue_with(admin, rate=Rate(3, per=60))
    with store.consumer(QUEUE) as consumer:
        for _ in range(5):
            assert consumer.dequeue(10) == []
        store.producer(QUEUE).enqueue_many(range(5))
        assert len(consumer.dequeue(10)) == 3


def test_limits_change_while_messages_are_in_flight(store: Any, admin: Any) -> None:
    queue_with(admin)
    store.producer(QUEUE).enqueue_many(range(10))
    with store.consumer(QUEUE) as consumer:
        held = consumer.dequeue(4)
        admin.configure_queue(QUEUE, max_in_flight=3)
        assert consumer.dequeue(10) == []
        consumer.ack_many(held[:2])
        assert len(consumer.dequeue(10)) == 1
        admin.configure_queue(QUEUE, max_in_flight=5)
        assert len(consumer.dequeue(10)) == 2
        admin.configure_queue(QUEUE, max_in_flight=None)
        assert len(consumer.dequeue(10)) == 3


def test_a_limit_of_keys_that_goes_away_leaves_nothing_behind(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    store.producer(QUEUE).enqueue_many(range(6), keys=["k"] * 6, unique=None)
    with store.consumer(QUEUE) as consumer:
        assert len(consumer.dequeue(10)) == 1
        admin.configure_queue(QUEUE, max_in_flight_per_key=3)
        assert len(consumer.dequeue(10)) == 2
        admin.configure_queue(QUEUE, max_in_flight_per_key=None)
        assert len(consumer.dequeue(10)) == 3


def test_delayed_expired_and_paused_are_as_without_limits(
    store: Any, admin: Any, clock: ManualClock
) -> None:
    queue_with(admin, max_in_flight=5)
    producer = store.producer(QUEUE)
    producer.enqueue("late", delay=10)
    producer.enqueue("gone", ttl=5)
    producer.enqueue("urgent", priority=9, delay=10)
    with store.consumer(QUEUE) as consumer:
        clock.advance(10)
        admin.pause_queue(QUEUE)
        assert consumer.dequeue(10) == []
        admin.resume_queue(QUEUE)
        assert [message.payload for message in consumer.dequeue(10)] == ["urgent", "late"]
        assert [found.payload for found in admin.list_archive(QUEUE)] == ["gone"]


def test_threads_never_exceed_the_limits(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight=4, max_in_flight_per_key=2)
    total = 120
    store.producer(QUEUE).enqueue_many(
        range(total), keys=[f"key {n % 3}" for n in range(total)], unique=None
    )
    lock, in_flight, most, done = threading.Lock(), Counter[str](), Counter[str](), [0]

    def consume(_: int) -> None:
        with store.consumer(QUEUE, lease=600) as consumer:
            while done[0] < total:
                claimed = consumer.dequeue(3)
                with lock:
                    for message in claimed:
                        in_flight[message.key] += 1
                        most[message.key] = max(most[message.key], in_flight[message.key])
                    most["all"] = max(most["all"], in_flight.total())
                    in_flight.subtract(message.key for message in claimed)
                    done[0] += len(claimed)
                consumer.ack_many(claimed)

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(consume, range(5)))
    assert done[0] == total
    assert most.pop("all") <= 4
    assert max(most.values()) <= 2


def drain(consumer: Any, clock: ManualClock, times: int = 6) -> list[Any]:
    """The payloads of all that comes out when messages are acked as they come, in some hours."""
    seen = []
    for _ in range(times):
        for message in consumer.dequeue(10):
            consumer.ack(message)
            seen.append(message.payload)
        clock.advance(3600)
    return seen


def test_what_is_parked_behind_an_expired_message_is_let_in(
    store: Any, admin: Any, clock: ManualClock
) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue("first", key="k", unique=None)
    producer.enqueue("short-lived", key="k", unique=None, ttl=5)
    producer.enqueue("last", key="k", unique=None)
    with store.consumer(QUEUE) as consumer:
        (first,) = consumer.dequeue(10)
        clock.advance(6)
        consumer.ack(first)
        assert drain(consumer, clock) == ["last"]
    assert admin.queue_stats(QUEUE).blocked == 0


@pytest.mark.parametrize("end", ["cancel", "expire", "purge"])
def test_one_that_was_let_in_and_left_makes_room_for_the_next(
    store: Any, admin: Any, clock: ManualClock, end: str
) -> None:
    queue_with(admin, max_in_flight_per_key=1, rate=Rate(1, per=60))
    producer = store.producer(QUEUE)
    a, b, *rest = producer.enqueue_many(
        ["a", "b"], keys=["k"] * 2, unique=None, ttl=600 if end == "expire" else None
    )
    assert not rest
    with store.consumer(QUEUE, lease=300) as consumer:
        (held,) = consumer.dequeue(10)
        assert held.id == a
        producer.enqueue("c", key="k", unique=None)
        clock.advance(61)
        assert consumer.dequeue(10) == []
        assert admin.queue_stats(QUEUE).blocked == 2
        producer.enqueue("other", priority=5)
        consumer.ack_many(consumer.dequeue(10))  # the only turn of this minute
        consumer.ack(held)
        clock.advance(30)
        assert consumer.dequeue(10) == []  # no turn in this minute: b is only let in
        assert admin.queue_stats(QUEUE).blocked == 1
        if end == "cancel":
            admin.cancel(b)
        elif end == "expire":
            clock.advance(600)
            admin.expire(QUEUE)
        else:
            admin.purge_queue(QUEUE)
            producer.enqueue("c", key="k", unique=None)
        clock.advance(3600)
        assert drain(consumer, clock) == ["c"]
    assert admin.queue_stats(QUEUE).blocked == 0


def test_the_first_of_those_parked_is_the_most_urgent(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue("running", key="k", unique=None)
    with store.consumer(QUEUE) as consumer:
        (running,) = consumer.dequeue()
        producer.enqueue_many(["low", "lower"], keys=["k"] * 2, unique=None)
        producer.enqueue("urgent", key="k", unique=None, priority=9)
        assert consumer.dequeue(10) == []
        order = []
        for _ in range(3):
            consumer.ack(running)
            (running,) = consumer.dequeue(10)
            order.append(running.payload)
        assert order == ["urgent", "low", "lower"]


def test_one_that_was_let_in_does_not_overtake_a_more_urgent_one(
    store: Any, admin: Any, clock: ManualClock
) -> None:
    queue_with(admin, max_in_flight_per_key=1, max_in_flight=2)
    producer = store.producer(QUEUE)
    producer.enqueue_many(["running", "low"], keys=["k"] * 2, unique=None)
    with store.consumer(QUEUE, lease=300) as consumer:
        (running,) = consumer.dequeue(10)
        producer.enqueue_many(["x", "y"], priority=7)
        others = consumer.dequeue(10)  # one of them: the queue is full
        consumer.ack(running)
        producer.enqueue("z", priority=7)
        others += consumer.dequeue(10)  # full again; low is let in, and waits
        producer.enqueue("urgent", key="k", unique=None, priority=3)
        consumer.ack_many(others)
        order = [message.payload for message in consumer.dequeue(10)]
        assert order == ["z", "urgent"]
        assert consumer.dequeue(10) == []


def test_a_lapsed_claim_is_over_in_a_queue_with_limits(
    store: Any, admin: Any, clock: ManualClock
) -> None:
    queue_with(admin, max_in_flight=1)
    producer = store.producer(QUEUE)
    producer.enqueue("slow")
    with store.consumer(QUEUE) as slow, store.consumer(QUEUE) as quick:
        (held,) = slow.dequeue()
        clock.advance(31)
        with pytest.raises(LeaseLost):
            slow.extend(held, 1000)
        producer.enqueue("urgent", priority=5)
        (urgent,) = quick.dequeue(10)
        with pytest.raises(LeaseLost):
            slow.extend(held, 1000)
        quick.extend(urgent, 1000)
        assert admin.queue_stats(QUEUE).leased == 1
        slow.ack(held)  # nobody else has it: what was done counts
        quick.ack(urgent)
        assert slow.dequeue(10) == []


@pytest.mark.parametrize("change", ["extend", "release", "fail"])
def test_one_that_lapsed_and_was_parked(
    store: Any, admin: Any, clock: ManualClock, change: str
) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue("one", key="k", unique=None)
    with store.consumer(QUEUE) as slow, store.consumer(QUEUE) as quick:
        (one,) = slow.dequeue()
        clock.advance(31)
        producer.enqueue("two", key="k", unique=None, priority=5)
        (two,) = quick.dequeue(10)  # the first has come back, and is parked behind the second
        assert (two.payload, admin.queue_stats(QUEUE).blocked) == ("two", 1)
        if change == "extend":
            with pytest.raises(LeaseLost):
                slow.extend(one, 1000)
        elif change == "release":
            slow.release(one, delay=3600)
        else:
            slow.fail(one, "oops", delay=3600)
        quick.ack(two)
        again = [message.payload for message in quick.dequeue(10)]
        assert again == (["one"] if change == "extend" else [])
        clock.advance(3600)
        assert [message.payload for message in quick.dequeue(10)] == ["one"]


def test_a_message_may_be_given_back_and_claimed_by_many(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight=5)
    store.producer(QUEUE).enqueue_many(range(8))

    def consume(_: int) -> int:
        taken = 0
        with store.consumer(QUEUE) as consumer:
            for _ in range(30):
                claimed = consumer.dequeue(2)
                consumer.release_many(claimed)
                taken += len(claimed)
        return taken

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(consume, range(4))) > 0
    assert admin.queue_stats(QUEUE).ready == 8


def test_many_at_once_within_limits(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight=2500)
    store.producer(QUEUE).enqueue_many(range(3000))
    with store.consumer(QUEUE) as consumer:
        held = consumer.dequeue(2400)
        assert [message.payload for message in held] == list(range(2400))
        assert len(consumer.dequeue(2400)) == 100


def test_a_rate_goes_on_when_the_clock_is_set_back(store: Any, admin: Any, clock: Any) -> None:
    queue_with(admin, rate=Rate(5, per=60))
    store.producer(QUEUE).enqueue_many(range(30))
    with store.consumer(QUEUE) as consumer:
        assert len(consumer.dequeue(10)) == 5
        clock._now -= timedelta(hours=1)
        assert consumer.dequeue(10) == []  # how long ago those were is not known any more
        clock.advance(61)
        assert len(consumer.dequeue(10)) == 5


def test_limits_that_go_away_leave_no_message_behind_however_many_are_parked(
    store: Any, admin: Any
) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    total = 1500
    store.producer(QUEUE).enqueue_many(range(total), keys=["k"] * total, unique=None)
    with store.consumer(QUEUE) as consumer:
        seen = consumer.dequeue(total)
        assert len(seen) == 1
        assert admin.queue_stats(QUEUE).blocked == total - 1
        admin.configure_queue(QUEUE, max_in_flight_per_key=None)
        while claimed := consumer.dequeue(total):
            seen += claimed
        assert sorted(message.payload for message in seen) == list(range(total))
        assert admin.queue_stats(QUEUE).blocked == 0
        consumer.extend_many(seen, 60)


def test_limits_that_go_away_and_come_back_leave_no_message_behind(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue_many(range(1100), keys=["a"] * 1100, unique=None)
    producer.enqueue_many(range(3), keys=["b"] * 3, unique=None)
    with store.consumer(QUEUE) as consumer:
        held = consumer.dequeue(10)
        assert [message.key for message in held] == ["a", "b"]
        admin.configure_queue(QUEUE, max_in_flight_per_key=None)
        held += consumer.dequeue()  # lets some of those in that are parked, and not all
        assert admin.queue_stats(QUEUE).blocked > 0
        admin.configure_queue(QUEUE, max_in_flight_per_key=1)
        assert consumer.dequeue(10) == []  # of both keys there is one in flight, or more
        consumer.ack_many(held)
        for _ in range(2):
            held = consumer.dequeue(10)
            assert sorted(message.key for message in held) == ["a", "b"]
            consumer.ack_many(held)


def test_another_limit_moves_only_the_messages_that_have_room_now(store: Any, admin: Any) -> None:
    queue_with(admin, max_in_flight_per_key=1)
    producer = store.producer(QUEUE)
    producer.enqueue_many(range(1100), keys=["a"] * 1100, unique=None)
    producer.enqueue_many(range(4), keys=["b"] * 4, unique=None)
    with store.consumer(QUEUE) as consumer:
        assert [message.key for message in consumer.dequeue(10)] == ["a", "b"]
        admin.configure_queue(QUEUE, max_in_flight_per_key=3)
        claimed = consumer.dequeue(10)
        assert [(message.key, message.payload) for message in claimed] == [
            *(("a", 1), ("a", 2), ("b", 1), ("b", 2))
        ]
        admin.configure_queue(QUEUE, max_in_flight_per_key=2)
        assert consumer.dequeue(10) == []
        assert admin.queue_stats(QUEUE).blocked == 1098


@pytest.mark.parametrize("limits", [{"max_in_flight": 10}, {"max_in_flight_per_key": 10}], ids=str)
def test_one_claim_takes_no_more_bytes_than_it_may(
    harness: Harness, admin: Any, limits: dict[str, int]
) -> None:
    queue_with(admin, **limits)
    store = harness.open(clock=harness.clock, max_dequeue_bytes=250_000)
    large = [[n, "x" * 100_000] for n in range(7)]
    store.producer(QUEUE).enqueue_many(large, keys=["k"] * 7, unique=None)
    store.producer(QUEUE).enqueue(["last", "x" * 300_000])
    with store.consumer(QUEUE) as consumer:
        seen = []
        while claimed := consumer.dequeue(100):
            seen.append([message.payload[0] for message in claimed])
            consumer.ack_many(claimed)
    assert seen == [[0, 1, 2], [3, 4, 5], [6, "last"]]
