"""Streams: batches that stay claimed until they are acknowledged, and reading along."""

from __future__ import annotations

from typing import Any

import pytest

from pgqrs import InvalidArgument, QueueNotFound, StreamNotFound, StreamTaken, WorkerStopped
from pgqrs.repositories import streams, tails
from pgqrs.repositories.streams import Batch, Owned
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE

STREAM = "nightly"


class Reader:
    """Somebody who works with a stream, in the name of a consumer."""

    def __init__(self, store: Any, worker: int, clock: ManualClock) -> None:
        self._store = store = store.shard(QUEUE)
        self._worker = worker
        self._clock = clock
        self._owned: Owned = store.write(
            lambda c: streams.take_over(c, STREAM, QUEUE, worker=worker, now=clock.now())
        )

    def plan(self, after: int, limit: int = 10, through: int = streams.ANY) -> Batch | None:
        now = self._clock.now()
        batch: Batch | None = self._store.write(
            lambda c: streams.next_batch(
                c,
                self._owned,
                after=after,
                worker=self._worker,
                limit=limit,
                now=now,
                through=through,
            )
        )
        return batch

    def add_followers(self, limit: int = 10) -> Batch | None:
        now = self._clock.now()
        batch: Batch | None = self._store.write(
            lambda c: streams.add_followers(
                c, self._owned, worker=self._worker, limit=limit, now=now
            )
        )
        return batch

    def add(self, limit: int) -> Batch | None:
        now = self._clock.now()
        batch: Batch | None = self._store.write(
            lambda c: streams.add_batch(c, self._owned, worker=self._worker, limit=limit, now=now)
        )
        return batch

    def payloads(self, batch: Batch) -> list[str]:
        found = self._store.read(lambda c: streams.records(c, batch.holds))
        return [record.payload for record in found]


@pytest.fixture
def reader(store: Any, consumer: Any, clock: ManualClock) -> Reader:
    return Reader(store, consumer.worker_id, clock)


def test_a_batch_stays_claimed_until_the_next_is_asked_for(
    admin: Any, producer: Any, rival: Any, reader: Reader, clock: ManualClock
) -> None:
    producer.enqueue_many(range(5))
    first = reader.plan(0, limit=3)
    assert first is not None
    assert (first.number, len(first.holds.tokens)) == (1, 3)
    assert reader.payloads(first) == ["0", "1", "2"]
    clock.advance(10 * 365 * 86400)
    assert len(rival.dequeue(10)) == 2
    clock.advance(31)
    second = reader.plan(1)
    assert second is not None
    assert (second.number, reader.payloads(second)) == (2, ["3", "4"])
    assert admin.queue_stats(QUEUE).archived["completed"] == 3
    assert reader.plan(2) is None
    assert admin.queue_stats(QUEUE).archived["completed"] == 5


def test_who_asks_again_is_given_the_same_batch(
    store: Any, admin: Any, producer: Any, consumer: Any, reader: Reader, clock: ManualClock
) -> None:
    producer.enqueue_many(range(3))
    first = reader.plan(0, limit=2)
    assert first is not None
    assert reader.plan(0) == first._replace(is_new=False)
    again = Reader(store, consumer.worker_id, clock)
    producer.enqueue(3)
    assert again.plan(0) == first._replace(is_new=False)
    with pytest.raises(StreamTaken) as caught:
        reader.plan(1)
    assert caught.value.name == STREAM
    assert admin.queue_stats(QUEUE).archived["completed"] == 0
    second = again.plan(1)
    assert second is not None
    assert again.payloads(second) == ["2", "3"]


def test_batches_that_are_claimed_beside_each_other_end_together(
    store: Any, admin: Any, producer: Any, rival: Any, reader: Reader, clock: ManualClock
) -> None:
    producer.enqueue_many(range(5))
    first, second = reader.add(3), reader.add(3)
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (1, 2)
    assert reader.payloads(first) + reader.payloads(second) == ["0", "1", "2", "3", "4"]
    assert reader.add(3) is None
    assert rival.dequeue(10) == []
    producer.enqueue(5)

    def end() -> Any:
        return store.shard(QUEUE).write(lambda c: streams.end(c, STREAM, now=clock.now()))

    assert end() == (QUEUE, 5)
    assert admin.list_streams() == []
    assert admin.queue_stats(QUEUE).archived["completed"] == 5
    assert [message.payload for message in rival.dequeue(10)] == [5]
    with pytest.raises(StreamNotFound):
        end()


def test_streams_are_in_flight_and_listed(
    admin: Any, producer: Any, reader: Reader, clock: ManualClock
) -> None:
    producer.enqueue_many(range(4))
    reader.plan(0, limit=3)
    found = admin.queue_stats(QUEUE)
    assert (found.ready, found.leased) == (1, 3)
    (stream,) = admin.list_streams()
    assert (stream.name, stream.queue, stream.last_batch) == (STREAM, QUEUE, 1)
    assert (stream.batches, stream.messages, stream.claimed_since) == (1, 3, clock.now())
    reader.plan(1, limit=0)
    (stream,) = admin.list_streams()
    assert (stream.batches, stream.messages, stream.claimed_since) == (0, 0, None)


def test_an_abandoned_stream_is_released_by_hand(
    admin: Any, producer: Any, rival: Any, reader: Reader
) -> None:
    producer.enqueue_many(range(3))
    reader.plan(0, limit=2)
    assert admin.release_stream(STREAM) == 2
    assert admin.release_stream(STREAM) == 0
    found = rival.dequeue(10)
    assert [message.payload for message in found] == [0, 1, 2]
    assert {message.attempt for message in found} == {1}
    with pytest.raises(StreamTaken):
        reader.plan(1)
    with pytest.raises(StreamNotFound):
        admin.release_stream("unknown")


def test_numbers_go_on_after_what_somebody_remembers(producer: Any, reader: Reader) -> None:
    producer.enqueue_many(range(2))
    first = reader.plan(7, limit=1)
    assert first is not None
    assert first.number == 8
    pending = reader.plan(0, limit=1)
    assert pending == first._replace(is_new=False)
    second = reader.plan(8, limit=1)
    assert second is not None
    assert second.number == 9


def test_limits_groups_and_expiry_count_for_streams(
    admin: Any, producer: Any, rival: Any, reader: Reader, clock: ManualClock
) -> None:
    producer.enqueue(0, ttl=5)
    for n in (1, 2):
        producer.enqueue(n, group="one")
    producer.enqueue(3)
    producer.enqueue(4, delay=20)
    clock.advance(10)
    first = reader.plan(0)
    assert first is not None
    assert reader.payloads(first) == ["1", "3"]
    assert admin.queue_stats(QUEUE).archived["expired"] == 1
    assert rival.dequeue(10) == []
    second = reader.plan(1)
    assert second is not None
    assert reader.payloads(second) == ["2"]
    admin.configure_queue(QUEUE, max_in_flight=1)
    clock.advance(60)
    producer.enqueue(5)
    third = reader.plan(2)
    assert third is not None
    assert reader.payloads(third) == ["4"]


def test_a_stream_belongs_to_one_queue_and_to_its_worker(
    store: Any, admin: Any, producer: Any, consumer: Any, reader: Reader, clock: ManualClock
) -> None:
    admin.create_queue("other")
    now = clock.now()
    with pytest.raises(InvalidArgument):
        store.shard(QUEUE).write(lambda c: streams.take_over(c, STREAM, "other", worker=1, now=now))
    with pytest.raises(QueueNotFound):
        store.shard(QUEUE).write(
            lambda c: streams.take_over(c, "third", "missing", worker=1, now=now)
        )
    producer.enqueue(1)
    admin.stop_worker(consumer.worker_id)
    with pytest.raises(WorkerStopped):
        reader.plan(0)


def test_a_queue_takes_its_streams_with_it(admin: Any, producer: Any, reader: Reader) -> None:
    producer.enqueue(1)
    reader.plan(0)
    admin.delete_queue(QUEUE, force=True)
    assert admin.list_streams() == []


def test_quiet_is_when_nothing_is_claimed_or_ready(
    store: Any, producer: Any, reader: Reader, clock: ManualClock
) -> None:
    def is_quiet() -> Any:
        now = clock.now()
        return store.shard(QUEUE).read(lambda c: streams.is_quiet(c, STREAM, QUEUE, now=now))

    assert is_quiet()
    producer.enqueue(1, delay=10)
    assert is_quiet()
    clock.advance(11)
    assert not is_quiet()
    reader.plan(0)
    assert not is_quiet()
    reader.plan(1)
    assert is_quiet()


def test_reading_along_sees_each_message_once_finished_or_not(
    store: Any, admin: Any, producer: Any, consumer: Any
) -> None:
    admin.create_queue("other")
    ids = producer.enqueue_many([{"n": 0}, {"n": 1}])
    other = store.producer("other").enqueue("of another queue")
    ids += producer.enqueue_many([{"n": 2}], headers={"a": 1})
    consumer.ack(consumer.dequeue()[0])

    def between(after: int, through: int) -> Any:
        return store.shard(QUEUE).read(
            lambda c: tails.records(c, QUEUE, after=after, through=through)
        )

    def last_of(limit: int, after: int = 0) -> Any:
        return store.shard(QUEUE).read(
            lambda c: tails.last_of_first(c, QUEUE, after=after, through=ids[-1], limit=limit)
        )

    assert store.shard(QUEUE).read(tails.greatest_id) == ids[-1]
    found = between(0, ids[-1])
    assert [record.id for record in found] == ids
    assert {record.queue for record in found} == {QUEUE}
    assert [record.payload.replace(" ", "") for record in found] == [
        '{"n":0}',
        '{"n":1}',
        '{"n":2}',
    ]
    assert found[-1].headers.replace(" ", "") == '{"a":1}'
    assert [record.id for record in between(ids[0], ids[1])] == [ids[1]]
    assert between(ids[1], other) == []
    assert (last_of(2), last_of(10), last_of(1, ids[-1])) == (ids[1], ids[-1], None)


def test_what_comes_later_is_passed_over(
    store: Any, producer: Any, rival: Any, reader: Reader
) -> None:
    early = producer.enqueue_many(range(4))
    late = producer.enqueue_many(["late"] * 3, priority=5)
    first = reader.plan(0, limit=3, through=early[-1])
    second = reader.plan(1, through=early[-1])
    assert first is not None
    assert second is not None
    assert [*first.holds.tokens, *second.holds.tokens] == early
    assert reader.plan(2, through=early[-1]) is None
    assert [(message.id, message.read_ct) for message in rival.dequeue(10)] == [
        (id, 1) for id in late
    ]


def test_groups_are_taken_message_by_message(producer: Any, reader: Reader) -> None:
    ids = producer.enqueue_many(range(6), groups=["a", "b"] * 3)
    late = producer.enqueue("late", group="a")
    taken = [reader.plan(number, through=ids[-1]) for number in range(4)]
    assert [batch and list(batch.holds.tokens) for batch in taken] == [
        ids[:2],
        ids[2:4],
        ids[4:],
        None,
    ]
    last = reader.plan(3)
    assert last is not None
    assert list(last.holds.tokens) == [late]


def test_all_of_a_group_can_be_held_together(
    store: Any, admin: Any, producer: Any, rival: Any, reader: Reader, clock: ManualClock
) -> None:
    ids = producer.enqueue_many(range(6), groups=["a", "b", "c"] * 2)
    others = rival.dequeue(1)
    assert reader.add_followers() is None
    heads = reader.add(10)
    delayed = producer.enqueue("delayed", group="b", delay=60)
    behind = producer.enqueue("behind", group="b")
    assert heads is not None
    assert list(heads.holds.tokens) == ids[1:3]
    followers = reader.add_followers()
    assert followers is not None
    assert sorted(followers.holds.tokens) == ids[4:]
    assert reader.payloads(followers) == ["4", "5"]
    assert reader.add_followers() is None
    found = admin.queue_stats(QUEUE)
    assert (found.ready, found.leased, found.blocked) == (0, 5, 3)
    assert admin.release_stream(STREAM) == 4
    found = admin.queue_stats(QUEUE)
    assert (found.ready, found.leased, found.blocked) == (2, 1, 5)
    again = rival.dequeue(10)
    assert [message.id for message in again] == ids[1:3]
    rival.ack_many([*others, *again])
    assert [message.id for message in rival.dequeue(10)] == [ids[3], ids[4], ids[5]]
    assert {delayed, behind}.isdisjoint(message.id for message in rival.dequeue(10))


def test_a_group_that_was_held_together_ends_together(
    store: Any, admin: Any, producer: Any, rival: Any, reader: Reader, clock: ManualClock
) -> None:
    producer.enqueue_many(range(3), groups=["a"] * 3)
    assert reader.add(10) is not None
    assert reader.add_followers() is not None
    later = producer.enqueue("later", group="a")
    assert rival.dequeue(10) == []
    assert store.shard(QUEUE).write(lambda c: streams.end(c, STREAM, now=clock.now())) == (QUEUE, 3)
    assert [message.id for message in rival.dequeue(10)] == [later]
