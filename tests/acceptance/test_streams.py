"""Streams and tails as Spark uses them, among others who use the same queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

import pgqrs
from pgqrs.repositories import tails
from pgqrs.streams import Stream, acknowledge, batches
from pgqrs.tails import Tail
from tests.conftest import create_database

COMPLETED = pgqrs.ArchiveReason.COMPLETED


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        yield store


def test_a_stream_goes_through_a_queue_batch_by_batch(store: pgqrs.Store) -> None:
    store.producer("tasks").enqueue_many(range(25))
    stream = Stream(store._database, "nightly", "tasks")
    sizes, done = [], 0
    while batch := stream.next_batch(done, limit=10):
        sizes.append(len(batch.holds.tokens))
        done = batch.number
        assert (
            batches(store._database, "nightly", after=done - 1, through=done)[0].holds
            == batch.holds
        )
    assert (sizes, done) == ([10, 10, 5], 3)
    assert store.admin().queue_stats("tasks").archived[COMPLETED] == 25
    assert len(store.admin().list_workers()) == 1
    stream.close()
    assert store.admin().list_workers() == []


def test_a_purged_row_among_the_workers_is_replaced(store: pgqrs.Store) -> None:
    producer, stream = store.producer("tasks"), Stream(store._database, "nightly", "tasks")
    producer.enqueue(1)
    first = stream.next_batch(0, limit=10)
    store.admin().purge_workers(silent_for=0)
    producer.enqueue(2)
    second = stream.next_batch(1, limit=10)
    assert first is not None
    assert second is not None
    assert first.holds.worker_id != second.holds.worker_id
    assert acknowledge(store._database, "nightly", through=2) == 1
    assert store.admin().queue_stats("tasks").archived[COMPLETED] == 2


def test_who_takes_over_replaces_the_row_of_who_died(store: pgqrs.Store) -> None:
    for _ in range(3):
        Stream(store._database, "nightly", "tasks").next_batch(0, limit=10)
    assert len(store.admin().list_workers()) == 1


def test_the_last_batch_can_be_acknowledged_by_others(store: pgqrs.Store) -> None:
    store.producer("tasks").enqueue_many(range(3))
    Stream(store._database, "nightly", "tasks").next_batch(0, limit=10)
    assert acknowledge(store._database, "nightly", through=0) == 0
    assert acknowledge(store._database, "nightly", through=1) == 3
    assert acknowledge(store._database, "nightly", through=1) == 0


def test_readers_of_one_stream_take_turns(store: pgqrs.Store) -> None:
    store.producer("tasks").enqueue_many(range(20))
    found, taken = [], []

    def read() -> None:
        stream, done = Stream(store._database, "nightly", "tasks"), 0
        try:
            while batch := stream.next_batch(done, limit=2):
                done = batch.number
                found.append(batch)
        except pgqrs.StreamTaken:
            taken.append(stream)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # One reads to the end. Whoever it took the stream from is told, unless it asks again, or begins,
    # only when nothing is left: then there is nothing to tell.
    assert len(taken) < len(threads)
    assert store.admin().queue_stats("tasks").archived[COMPLETED] == 20
    # Two may have been given the same batch, one after the other; no message is in two of them.
    distinct = {batch.number: frozenset(batch.holds.tokens) for batch in found}
    assert sum(map(len, distinct.values())) == len(frozenset().union(*distinct.values())) == 20


def test_large_batches_are_claimed_in_pieces(
    store: pgqrs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.repositories.streams.AT_ONCE", 7)
    store.producer("tasks").enqueue_many(range(30))
    stream = Stream(store._database, "nightly", "tasks")
    batch = stream.next_batch(0, limit=25)
    assert batch is not None
    assert len(batch.holds.tokens) == 25
    assert store.admin().queue_stats("tasks").leased == 25
    rest = stream.next_batch(1, limit=25)
    assert rest is not None
    assert len(rest.holds.tokens) == 5
    assert store.admin().release_stream("nightly") == 5


def test_tails_do_not_look_again_where_there_was_nothing(store: pgqrs.Store) -> None:
    store.admin().create_queue("other")
    tail = Tail(store._database, "tasks")
    store.producer("other").enqueue_many(range(10))
    assert tail.last_of_next(0, through=tail.mark()) == 0
    id = store.producer("tasks").enqueue(1)
    mark = tail.mark()
    assert tail.last_of_next(0, through=mark) == id == mark
    assert tail.last_of_next(id, through=mark) == id
    ids = store.producer("tasks").enqueue_many(range(5))
    assert tail.last_of_next(id, through=tail.mark(), limit=2) == ids[1]
    assert tail.last_of_next(ids[1], through=tail.mark()) == ids[-1]


ENQUEUE = """
INSERT INTO pgqrs_messages (queue_id, priority, ready, vt, read_ct, released_ct, enqueued_at, payload)
SELECT id, 0, true, now(), 0, 0, now(), %s::text::jsonb FROM pgqrs_queues RETURNING id
"""


def test_an_id_that_is_committed_late_is_not_skipped(postgres: str) -> None:
    url = create_database(postgres)
    with (
        pgqrs.Store(url, upgrade=True) as store,
        psycopg.connect(url) as slow,
        psycopg.connect(url) as idle,
    ):
        store.admin().create_queue("tasks")
        idle.execute("CREATE TABLE others_work (n int)")  # writes, though no messages
        tail = Tail(store._database, "tasks")
        (early,) = slow.execute(ENQUEUE, ["1"]).fetchone() or (0,)
        late = store.producer("tasks").enqueue(2)
        assert early < late
        assert tail.mark() == tail.mark() == 0
        assert tail.settled_mark(patience=0.05) == 0
        # Who begins to write after the mark was seen is not waited for.
        with psycopg.connect(url) as newer:
            (newest,) = newer.execute(ENQUEUE, ["3"]).fetchone() or (0,)
            slow.commit()
            assert tail.mark() == tail.last_of_next(0, through=tail.mark()) == late
            found = store.read(lambda c: tails.records(c, "tasks", after=0, through=late))
            assert [record.id for record in found] == [early, late]
            assert tail.mark() == late
        assert tail.mark() == newest


def test_reading_along_stops_at_no_rolled_back_id(postgres: str) -> None:
    url = create_database(postgres)
    with pgqrs.Store(url, upgrade=True) as store, psycopg.connect(url) as slow:
        store.admin().create_queue("tasks")
        tail = Tail(store._database, "tasks")
        slow.execute(ENQUEUE, ["1"])
        late = store.producer("tasks").enqueue(2)
        assert tail.mark() == 0
        slow.rollback()
        assert tail.mark() == late
